"""What a request says about the form of its answer, as a grammar."""

from collections.abc import Awaitable, Callable

from busload_runtime.grammar.text import (
    GrammarTextError,
    choice_expression,
    grammar,
    json_expression,
    regex_expression,
)
from busload_runtime.server.errors import invalid
from busload_runtime.server.protocol import ResponseFormat, Sampled, StructuredOutputs

CheckGrammar = Callable[[str], Awaitable[str]]
"""A grammar -> what is wrong with it, or nothing (`GrammarChecker.check`)."""

ANY_OBJECT = {"type": "object"}


async def grammar_of(body: Sampled, check: CheckGrammar) -> str:
    """The grammar of `response_format` or `structured_outputs`, checked; empty when neither asks for one.

    Raises `ApiError` 400 that names the one which cannot be followed, and 429 when too many others are being checked.
    """
    expressions = {
        "response_format": format_expression(body.response_format),
        "structured_outputs": _structured_expression(body.structured_outputs),
    }
    asked = {param: make for param, make in expressions.items() if make is not None}
    if len(asked) > 1:
        raise invalid("response_format and structured_outputs both say what to answer; give one", "structured_outputs")
    for param, make in asked.items():
        return await checked(make, check, param)
    return ""


async def checked(make: Callable[[], str], check: CheckGrammar, param: str, whole: bool = False) -> str:
    """The grammar of an expression, or a grammar (`whole`), checked. Raises `ApiError` 400 that names `param`."""
    text = ""
    try:
        text = make() if whole else grammar(make())
        wrong = await check(text)
    except GrammarTextError as error:
        wrong = str(error)
    if wrong:
        raise invalid(f"{param} cannot be followed: {wrong}", param, "invalid_grammar")
    return text


def format_expression(asked: ResponseFormat | None) -> Callable[[], str] | None:
    """Makes the expression of a response format; None if it asks for nothing."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return lambda: json_expression(ANY_OBJECT)
    if asked.json_schema is None:
        raise invalid("response_format of type json_schema needs json_schema: {name, schema}", "response_format")
    schema = asked.json_schema.schema
    return lambda: json_expression(ANY_OBJECT if schema is None else schema)


def _structured_expression(asked: StructuredOutputs | None) -> Callable[[], str] | None:
    if asked is None:
        return None
    makers: list[Callable[[], str]] = []
    if (schema := asked.json) is not None:
        makers.append(lambda: json_expression(schema))
    if asked.json_object:
        makers.append(lambda: json_expression(ANY_OBJECT))
    if (regex := asked.regex) is not None:
        makers.append(lambda: regex_expression(regex))
    if (choice := asked.choice) is not None:
        makers.append(lambda: choice_expression(choice))
    if len(makers) != 1:
        raise invalid(
            f"structured_outputs has {len(makers)} of json, json_object, regex, choice; give one", "structured_outputs"
        )
    return makers[0]
