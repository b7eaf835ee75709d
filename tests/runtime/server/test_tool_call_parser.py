"""Calls of tools in scripted outputs of every format: whole, in any pieces, broken, and mixed with text."""

import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_templates import LLAMA3 as LLAMA3_TEMPLATE
from tool_templates import TEMPLATES, UNKNOWN

from busload_runtime.model.chat import ChatTemplate
from busload_runtime.model.tool_format import HERMES, LLAMA3, MISTRAL, ToolFormat, tool_format_of
from busload_runtime.server.tool_calls import Found, ToolCallParser, chunk_choices, message_of

NAMES = ("get_weather", "now")
ARGUMENTS = '{"city": "Paris }]\\" \\\\", "days": [1, {"x": 2}]}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'


def parse(tool_format: ToolFormat, pieces: list[str], most: int | None = None) -> tuple[Any, list[Found]]:
    parser = ToolCallParser(tool_format, NAMES, most)
    found = [news for piece in pieces for news in parser.push(piece)] + parser.finish()
    message = message_of(found)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return (message["content"], calls), found


# format, output, content, calls
CASES: dict[str, tuple[ToolFormat, str, str | None, list[tuple[str, str]]]] = {
    "one call": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", None, [("get_weather", ARGUMENTS)]),
    "text, then a call": (
        HERMES,
        f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>",
        "Let me see.",
        [("get_weather", ARGUMENTS)],
    ),
    "several calls": (
        HERMES,
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        None,
        [("get_weather", ARGUMENTS), ("now", "{}")],
    ),
    "no blanks": (HERMES, '<tool_call>{"name":"now","arguments":{"a":1}}</tool_call>', None, [("now", '{"a":1}')]),
    "arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>',
        None,
        [("now", '{"a": 1}')],
    ),
    "arguments as text": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        None,
        [("now", '{"a": 1}')],
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "now"}</tool_call>', None, [("now", "{}")]),
    "the end is missing": (HERMES, f"<tool_call>\n{CALL}", None, [("get_weather", ARGUMENTS)]),
    "cut in the arguments": (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a', None, [("now", '{"a')]),
    "cut in the name": (HERMES, '<tool_call>\n{"name": "no', '<tool_call>\n{"name": "no', []),
    "unknown name": (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "no JSON": (HERMES, "<tool_call>{oops}</tool_call> really", "<tool_call>{oops}</tool_call> really", []),
    "no call, then one": (
        HERMES,
        f"<tool_call>hm</tool_call> <tool_call>{CALL}</tool_call>",
        "<tool_call>hm</tool_call>",
        [("get_weather", ARGUMENTS)],
    ),
    "a tag in text": (HERMES, "a <tool_ b <tool_call", "a <tool_ b <tool_call", []),
    "text alone": (HERMES, " Hello, {world} \n", " Hello, {world} \n", []),
    "nothing": (HERMES, "", "", []),
    "a list of one": (MISTRAL, f"[TOOL_CALLS] [{CALL}]", None, [("get_weather", ARGUMENTS)]),
    "a list of two": (
        MISTRAL,
        f'[TOOL_CALLS][{CALL}, {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]',
        None,
        [("get_weather", ARGUMENTS), ("now", "{}")],
    ),
    "a cut list": (MISTRAL, f"[TOOL_CALLS][{CALL}, ", None, [("get_weather", ARGUMENTS)]),
    "no list": (MISTRAL, "[TOOL_CALLS] sorry", "[TOOL_CALLS] sorry", []),
    "a list of no calls": (MISTRAL, "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    "text with brackets": (MISTRAL, "see [1] and [TOOL", "see [1] and [TOOL", []),
    "bare JSON": (LLAMA3, '{"name": "now", "parameters": {"a": 1}}', None, [("now", '{"a": 1}')]),
    "bare JSON behind a blank": (LLAMA3, '\n {"name": "now", "parameters": {}}', None, [("now", "{}")]),
    "JSON that is no call": (LLAMA3, '{"city": "Paris"} is it', '{"city": "Paris"} is it', []),
    "text with JSON inside": (
        LLAMA3,
        'so: {"name": "now", "parameters": {}}',
        'so: {"name": "now", "parameters": {}}',
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_in_one_piece_and_in_any_other(case: str) -> None:
    tool_format, output, content, calls = CASES[case]
    assert parse(tool_format, [output])[0] == (content, calls)
    assert parse(tool_format, list(output))[0] == (content, calls)
    for seed in range(20):
        chance = random.Random(seed)
        cuts = sorted(chance.sample(range(len(output) + 1), min(4, len(output))))
        pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
        assert parse(tool_format, pieces)[0] == (content, calls)


def test_a_stream_has_the_name_first_and_then_the_arguments_as_they_come() -> None:
    _, found = parse(HERMES, list(f"<tool_call>\n{CALL}\n</tool_call>"))
    assert [news.name for news in found] == ["get_weather", *[None] * (len(found) - 1)]
    assert len(found) > len(ARGUMENTS) / 2
    assert "".join(news.arguments for news in found) == ARGUMENTS
    deltas = [news.delta() for news in found]
    first = deltas[0]["tool_calls"][0]
    assert (first["index"], first["type"], first["function"]) == (
        0,
        "function",
        {"name": "get_weather", "arguments": ""},
    )
    assert first["id"].startswith("call_")
    assert all(delta["tool_calls"][0].keys() == {"index", "function"} for delta in deltas[1:])


def test_no_more_calls_than_asked_for() -> None:
    output = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> and so on"
    assert parse(HERMES, [output], most=1)[0] == (None, [("get_weather", ARGUMENTS)])


def test_ids_are_unique_and_have_the_form_that_templates_want() -> None:
    twice = f"[TOOL_CALLS][{CALL}, {CALL}]"
    ids = [news.id for news in parse(MISTRAL, [twice])[1] if news.id]
    assert len(set(ids)) == 2
    assert all(len(name) == 9 and name.isalnum() for name in ids)


def test_the_reason_of_a_choice_with_calls() -> None:
    def reasons(output: str, reason: str) -> list[Any]:
        return [c["finish_reason"] for c in chunk_choices(0, ToolCallParser(HERMES, NAMES), output, reason, None)]

    assert reasons(f"<tool_call>{CALL}</tool_call>", "stop")[-1] == "tool_calls"
    assert reasons(f"<tool_call>{CALL}", "length")[-1] == "length"
    assert reasons("hello", "stop") == [None, "stop"]


@given(
    st.text(alphabet='<>/tolcal_{}[]":,\\ \nnamerguwTOLCS1', max_size=60), st.sampled_from((HERMES, MISTRAL, LLAMA3))
)
@example("a  [T", MISTRAL)
@example("a \n<tool_call>b", HERMES)
@settings(max_examples=400, deadline=None)
def test_whatever_comes_is_the_same_in_one_piece_and_in_many(output: str, tool_format: ToolFormat) -> None:
    output = output.replace("<t", f"<tool_call>{CALL[:30]}").replace("[T", "[TOOL_CALLS][")
    whole = parse(tool_format, [output])[0]
    assert parse(tool_format, list(output))[0] == whole
    content, calls = whole
    if not calls:
        assert content == output


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=6), max_size=3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_arguments_come_through_to_the_letter(arguments: dict[str, str], ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    for tool_format, output in (
        (HERMES, f'<tool_call>\n{{"name": "now", "arguments": {written}}}\n</tool_call>'),
        (MISTRAL, f'[TOOL_CALLS] [{{"name": "now", "arguments": {written}}}]'),
        (LLAMA3, f'{{"name": "now", "parameters": {written}}}'),
    ):
        assert parse(tool_format, list(output))[0] == (None, [("now", written)])


def test_formats_are_told_from_templates() -> None:
    formats = {name: tool_format_of(template) for name, template in TEMPLATES.items()}
    assert formats == {"hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA3}
    for template, takes_tools, known in (
        (LLAMA3_TEMPLATE, True, True),
        (UNKNOWN, True, False),
        (TEMPLATES["hermes"].replace("tools", "toys"), False, False),
        ("<tool_call> {{ tools }} <function=name>", True, False),
        ("{# tools #}{{ messages }}<tool_call>", False, False),
        (None, False, False),
    ):
        chat = ChatTemplate("x.gguf", template, {})
        assert (chat.takes_tools, chat.tool_format is not None) == (takes_tools, known)
