"""How model families write calls of tools: what their chat templates taught them, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`begin`, then a call as JSON, then `end`; or `begin`, then a JSON array of calls."""

    name: str
    arguments: str
    """Key of the arguments, beside `name`."""
    begin: str = ""
    """Nothing: the whole answer is a call if it begins with a brace."""
    end: str = ""
    array: bool = False
    between: str = ""
    """What models write between calls."""
    several: bool = True
    """Whether an answer may hold several calls."""
    short_ids: bool = False
    """The template wants call ids of nine letters and digits."""


# Hermes and Qwen (https://github.com/NousResearch/Hermes-Function-Calling).
HERMES = ToolFormat("hermes", "arguments", "<tool_call>", "</tool_call>", between="\n")
# Mistral before its version 11 (https://docs.mistral.ai, "tekken"); later ones write no JSON around the call.
MISTRAL = ToolFormat("mistral", "arguments", "[TOOL_CALLS]", array=True, between=", ", short_ids=True)
# Llama 3.1 and 3.2 (https://github.com/meta-llama/llama-models, "JSON based tool calling").
LLAMA3 = ToolFormat("llama3", "parameters", several=False)


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template which takes tools teaches; None if it is not one of these."""
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return LLAMA3
    return None
