"""Request bodies of the OpenAI API: decoding, ranges, and a clear no to what would change the meaning if ignored.

msgspec rather than pydantic: a body may carry millions of token ids, and msgspec checks them without freezing the loop.
"""

import codecs
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from busload_runtime.server.errors import ApiError, invalid

MAX_CHOICES = 16
MAX_STOP_STRINGS = 4
MAX_BIASED_TOKENS = 1024
MAX_COMPLETION_LOGPROBS = 5
MAX_CHAT_LOGPROBS = 20
MAX_TOOLS = 128

_Temperature = Annotated[float, Meta(ge=0, le=2)]
_TopP = Annotated[float, Meta(gt=0, le=1)]
_TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_MinP = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Any factor above 0 has a meaning; the bounds keep logits finite.
_RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
_LogitBias = Annotated[dict[_Count, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASED_TOKENS)]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_StopText = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Schemas are followed to the letter whatever this says."""


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: None = None
    """Where some servers take it; here it would be in vain."""


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's parameter; one of its fields."""

    json: dict[str, Any] | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    choice: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)] | None
    ) = None


class Sampled(msgspec.Struct, kw_only=True, frozen=True):
    """What both endpoints share. Fields that are not named here are ignored unless `_NEUTRAL` lists them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Positive | None = None
    min_tokens: _Count | None = None
    ignore_eos: bool | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _TopK | None = None
    seed: _Seed | None = None
    min_p: _MinP | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: _RepetitionPenalty | None = None
    logit_bias: _LogitBias | None = None
    n: _Choices | None = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[_Count], Meta(max_length=64)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def token_limit(self) -> int | None:
        return self.max_tokens

    def num_choices(self) -> int:
        """Sequences that the request asks for."""
        return self.n or 1

    def grammar_param(self) -> str:
        """The parameter that would say what the answer must be."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to report with each drawn one; None: no log-probabilities at all."""
        raise NotImplementedError

    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are wanted, too."""
        return False

    def check(self) -> None:
        """Raises `ApiError` 400 for parameters that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed together with stream: true", "stream_options")


class CompletionRequest(Sampled, kw_only=True, frozen=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def num_choices(self) -> int:
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return (self.n or 1) * (len(self.prompt) if several else 1)


class TextPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(max_length=256)]
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    """Of a message of role tool: the call that it answers."""
    # Parts of a message that would be lost; null is what clients give back of an answer that had none.
    function_call: None = None
    refusal: None = None
    audio: None = None


_FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    name: _FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; left out: there are none."""
    strict: bool | None = None
    """Arguments follow the schema where a call is required, whatever this says."""


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, frozen=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampled, kw_only=True, frozen=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None

    def grammar_param(self) -> str:
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)
        return "tools" if forced else super().grammar_param()

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid(
                f"top_logprobs is {self.top_logprobs} without logprobs: true; set that, too, or leave top_logprobs out",
                "top_logprobs",
            )
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise invalid(f"two tools are named {twice!r}; a call could mean either", "tools")
        choice = self.tool_choice
        if not names and (choice == "required" or isinstance(choice, ChosenTool)):
            raise invalid("tool_choice asks for a call, but there are no tools; give some", "tool_choice")
        if isinstance(choice, ChosenTool) and choice.function.name not in names:
            raise invalid(
                f"tool_choice names {choice.function.name[:64]!r}; the tools are {', '.join(names)[:500]}",
                "tool_choice",
            )

    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class TokenizeRequest(msgspec.Struct, frozen=True):
    """`POST /tokenize`: a prompt as completions take it, or messages as chats do."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: whether BOS is put in front where the model wants it. A chat has what its template writes."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


# Parameters that would change the answer and are not supported, with the values that ask for nothing: those of the
# OpenAI API, then those that other servers (vLLM, llama.cpp, TGI, SGLang) take.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": (None,),
    "top_logprobs": (None,),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "prediction": (None,),
    "echo": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "grammar": (None, ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "logits_processors": (None, []),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "max_new_tokens": (None,),
    "n_predict": (None, -1),
    "n_probs": (None, 0),
    "typical_p": (None, 1),
    "mirostat": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "dynatemp_range": (None, 0),
    "samplers": (None,),
    "lora_path": (None,),
}

_SHORT_BYTES = 256
_asked = msgspec.json.Decoder(
    msgspec.defstruct("Asked", [(param, msgspec.Raw, msgspec.Raw()) for param in (*_NEUTRAL, "n", "best_of")])
)
"""What is in a body of the parameters that are looked at by hand; empty where there is none."""

Body = TypeVar("Body", bound=msgspec.Struct)
Request = TypeVar("Request", bound=Sampled)


def decode_request(body: bytes, kind: type[Request]) -> Request:
    """The request in a JSON body. Raises `ApiError` 400 that names the parameter."""
    request = decode_body(body, kind)
    request.check()
    return request


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """The JSON object in a body as `kind`. Raises `ApiError` 400 that names the parameter, also for one that is not
    supported.

    Nothing else runs meanwhile, and a megabyte can hold half a million values. So it is decoded straight to its type,
    which makes no objects of what nobody reads, and the collector, which would walk over the others again and again,
    waits: five megabytes of lists take 0.2 s instead of 1.4 s.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        with _no_collection():
            asked = _asked.decode(body)
            request: Body = _decoder(kind).decode(body)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _named(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {_reason(error, body)}", code="invalid_json") from None
    _refuse_unsupported(asked, kind.__struct_fields__)
    return request


@cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(kind)


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _named(error: msgspec.ValidationError) -> ApiError:
    """The 400 of a validation error.

    msgspec ends its text with the path, as in "... - at `$.stop[0]`", and for keys of an object in "... - at `key` in
    `$.logit_bias`".
    """
    what, _, path = str(error).partition(" - at `")
    key, _, inside = path.rpartition("$.")
    param = inside.rstrip("`").removesuffix("[...]")
    if what.startswith("Object missing required field"):
        missing = f"{param}.{what.split('`')[1]}".lstrip(".")
        return invalid(f"{missing} is required", missing, "missing_required_parameter")
    if path:
        return invalid(f"{param}: {'a key: ' if key else ''}{what}", param)
    return invalid(f"the body: {what}")


def _reason(error: Exception, body: bytes) -> str:
    """Why a body is no JSON, where the decoder's own words mislead."""
    if body.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in body[:2]:
        return "it is UTF-16 or UTF-32; send UTF-8"
    if b"\\ud" in body.lower():
        return f"{error}; does a text hold half of a surrogate pair? That is no Unicode text"
    return "it is empty" if not body else str(error)


def _refuse_unsupported(asked: msgspec.Struct, known: tuple[str, ...]) -> None:
    for param, neutral in _NEUTRAL.items():
        if param in known or (value := _short(asked, param)) is msgspec.UNSET:
            continue
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral):
            raise invalid(
                f"{param} is not supported by this server (only {_words(neutral)}); leave it out",
                param,
                "unsupported_parameter",
            )
    choices = _short(asked, "n")
    choices = 1 if choices in (None, msgspec.UNSET) else choices
    best_of = _short(asked, "best_of")
    if best_of not in (None, msgspec.UNSET, choices):
        raise invalid(
            f"best_of must equal n ({choices}), got {best_of!r:.80}; leave it out", "best_of", "unsupported_parameter"
        )


def _short(asked: msgspec.Struct, param: str) -> Any:
    """The value of a parameter, itself as JSON if it is too long to ask for nothing; UNSET if it is not there."""
    raw = bytes(getattr(asked, param))
    if not raw:
        return msgspec.UNSET
    return msgspec.json.decode(raw) if len(raw) <= _SHORT_BYTES else raw


def unsupported_words() -> str:
    """The parameters that are refused, with the values that pass, for people."""
    return ", ".join(f"`{param}` (only {_words(neutral)})" for param, neutral in sorted(_NEUTRAL.items()))


def _words(values: tuple[Any, ...]) -> str:
    return " or ".join(msgspec.json.encode(value).decode() for value in values)
