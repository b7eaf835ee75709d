"""Tools of a chat request: whether the model knows any, what its template reads, and the grammar of calls."""

import json
from typing import Any

import msgspec

from busload_runtime.grammar.text import grammar, json_expression, text_expression
from busload_runtime.model.text import TextModel
from busload_runtime.model.tool_format import ToolFormat
from busload_runtime.server.constrain import CheckGrammar, checked, format_expression
from busload_runtime.server.errors import ApiError, invalid
from busload_runtime.server.protocol import ChatRequest, ChosenTool, Function, Message, TokenizeRequest
from busload_runtime.server.tool_calls import CallsOfTools, ToolCallParser

_MAX_CALLS = 8
"""In an answer that must be calls."""
_OPEN = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
"""What may allow arguments beside those that are listed."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def usable_tools(body: ChatRequest | TokenizeRequest) -> list[Function]:
    """The tools that the answer may call."""
    if body.tool_choice == "none":
        return []
    return [tool.function for tool in body.tools or ()]


def rendered_tools(body: ChatRequest | TokenizeRequest, model: TextModel) -> list[dict[str, Any]] | None:
    """Tools as the template takes them. Raises `ApiError` 400 when the model knows none, or no way of calling them that
    is known here."""
    if not usable_tools(body):
        return None
    _format_of(model, "tools")
    tools: list[dict[str, Any]] = msgspec.to_builtins(body.tools)
    return tools


def rendered_calls(message: Message, model: TextModel, param: str) -> dict[str, Any]:
    """What a message says about calls, as the template takes it: arguments as objects. Raises `ApiError` 400."""
    fields: dict[str, Any] = {}
    if message.tool_calls:
        _format_of(model, f"{param}.tool_calls")
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{param}.tool_calls[{i}].function.arguments"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def calls_of(body: ChatRequest, model: TextModel) -> CallsOfTools | None:
    """How calls are found in the answer; None if there can be none."""
    tools = usable_tools(body)
    if not tools:
        return None
    tool_format, names = _format_of(model, "tools"), frozenset(tool.name for tool in tools)
    most = None if _several(body, tool_format) else 1
    marker, text = model.tokenizer.control_id(tool_format.begin), tool_format.begin.encode()

    def token_bytes(token: int) -> bytes:
        return text if token == marker else model.tokenizer.token_bytes(token)  # a control token has no text else

    return CallsOfTools(lambda: ToolCallParser(tool_format, names, most), token_bytes)


async def chat_grammar(body: ChatRequest, model: TextModel, check: CheckGrammar) -> str | None:
    """The grammar of an answer that must be calls, or may be calls beside what `response_format` asks for.

    None when tools have no say in it. Raises `ApiError` 400 that names the tool whose parameters cannot be followed.
    """
    tools, choice = usable_tools(body), body.tool_choice
    reply = format_expression(body.response_format)
    forced = choice == "required" or isinstance(choice, ChosenTool)
    if not tools or not (forced or reply):
        return None
    if isinstance(choice, ChosenTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
    if body.structured_outputs is not None:
        raise invalid(
            "structured_outputs does not go together with calls of tools; leave one out", "structured_outputs"
        )
    for i, tool in enumerate(body.tools or ()):
        if tool.function in tools:
            await checked(lambda tool=tool: json_expression(_parameters(tool.function)), check, _path(i))  # type: ignore[misc]
    if reply is not None and not forced:
        await checked(reply, check, "response_format")
    tool_format = _format_of(model, "tools")
    marker = model.tokenizer.control_id(tool_format.begin)

    def written(begin: str) -> str:
        rules = _rules(tools, tool_format, begin, several=_several(body, tool_format))
        return grammar("calls" if forced or reply is None else f"calls | {reply()}", rules)

    # The checker's vocabulary has no such token: there it is its text.
    await checked(lambda: written(text_expression(tool_format.begin)), check, "tools", whole=True)
    return written(text_expression(tool_format.begin) if marker is None else f"<[{marker}]>")


def _rules(tools: list[Function], tool_format: ToolFormat, begin: str, several: bool) -> list[str]:
    rules = []
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{tool_format.arguments}": '
        rules += [
            f"call_{i}: {text_expression(head)} arguments_{i} {text_expression('}')}",
            f"arguments_{i}: {json_expression(_parameters(tool))}",
        ]
    call = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f" ({text_expression(tool_format.between)} one){{0,{_MAX_CALLS - 1}}}" if several else ""
    if tool_format.array:
        return [f'calls: {begin} / ?/ "[" one{more} "]"', f"one: {call}", *rules]
    if not tool_format.begin:
        return [f"calls: one{more}", f"one: {call}", *rules]
    line = text_expression("\n")
    one = f"one: {begin} {line} ({call}) {line} {text_expression(tool_format.end)}"
    return [f"calls: one{more}", one, *rules]


def _parameters(tool: Function) -> dict[str, Any]:
    """The schema of a call's arguments. Where it lists them and is silent about others there are no others: functions
    fail on arguments that they do not have, and clients (LangChain's) leave out to say so."""
    if tool.parameters is None:
        return _NO_ARGUMENTS
    schema = {"type": "object", **tool.parameters}
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or _OPEN & schema.keys():
        return schema
    if any(not isinstance(name, str) or name not in listed for name in required):
        return schema
    return {**schema, "additionalProperties": False}


def _several(body: ChatRequest, tool_format: ToolFormat) -> bool:
    return (
        tool_format.several and body.parallel_tool_calls is not False and not isinstance(body.tool_choice, ChosenTool)
    )


def _path(position: int) -> str:
    return f"tools[{position}].function.parameters"


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{param} must be a JSON object as text, got {text!r:.80}", param)
    return arguments


def _format_of(model: TextModel, param: str) -> ToolFormat:
    """How the model calls tools. Raises `ApiError` 400 if it does not."""
    if (tool_format := model.chat.tool_format) is not None:
        return tool_format
    why = (
        "its chat template writes calls in a way that this server does not know"
        if model.chat.takes_tools
        else "its chat template has no place for them"
    )
    raise _unsupported(
        f"{param}: this model takes no tools, since {why}; leave them out or serve a model that does", param
    )


def _unsupported(message: str, param: str) -> ApiError:
    return invalid(message, param, "unsupported_parameter")
