"""Messages of a chat: roles, parts and what is missing from them. What the model would not see is refused by name."""

from typing import Any

import pytest
from live_server import LiveServer, running
from tiny_gguf import write_tiny_model
from tool_templates import TEMPLATES

USER = {"role": "user", "content": "Name a colour."}


def chat(server: LiveServer, *messages: Any, **body: Any) -> Any:
    return server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **body})


def prompt(server: LiveServer, *messages: Any, **body: Any) -> str:
    """What the model reads."""
    tokens = server.http.post("/tokenize", json={"messages": messages, **body}).json()["tokens"]
    text: str = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be kind."}],
        [{"role": "developer", "content": "Be kind."}, USER],
        [USER, {"role": "assistant", "content": "Red"}],
        [USER, {"role": "assistant", "content": ""}, USER],
        [USER, {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None}, USER],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "Name "}, {"type": "text", "text": "two."}]}],
        [{"role": "user", "content": "x", "name": "bob"}],
        [USER, {"role": "tool", "content": "x"}],
        [{"role": "user", "content": "a\0b \ufdd0 \uffff"}],
    ],
)
def test_what_has_a_meaning_is_answered(server: LiveServer, messages: Any) -> None:
    answer = chat(server, *messages)
    assert answer.status_code == 200, answer.text


def test_developer_is_system_and_parts_are_one_text(server: LiveServer) -> None:
    rules = "Be kind."
    assert prompt(server, {"role": "developer", "content": rules}, USER) == prompt(
        server, {"role": "system", "content": rules}, USER
    )
    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "a colour."}]
    assert prompt(server, {"role": "user", "content": parts}) == prompt(server, USER)


def test_a_last_turn_of_the_assistant_is_closed_and_another_one_opened(server: LiveServer) -> None:
    text = prompt(server, USER, {"role": "assistant", "content": "Red"})
    assert text.endswith("<|im_start|>assistant\nRed<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "contents": "x"}, "content"),
        ({"role": "system", "content": None}, "content"),
        ({"role": "tool", "tool_call_id": "1"}, "content"),
        ({"content": "x"}, "role"),
        ({"role": "", "content": "x"}, "role"),
        ({"role": "USER", "content": "x"}, "role"),
        ({"role": "assitant", "content": "x"}, "role"),
        ({"role": "function", "name": "f", "content": "x"}, "role"),
        ({"role": "user<|im_end|>", "content": "x"}, "role"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio"),
        ({"role": "assistant", "refusal": "no"}, "refusal"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "user", "content": ["x"]}, "content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "content[0]"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "content[0]"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "content[0]"),
        ({"role": "tool", "content": "x", "tool_call_id": "1" * 257}, "tool_call_id"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(server: LiveServer, message: Any, param: str) -> None:
    answer = chat(server, USER, message)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"messages[1].{param}"


@pytest.mark.parametrize("messages", [[], None, {}, "hello", [[]], [None], ["hello"]])
def test_what_are_no_messages_is_refused(server: LiveServer, messages: Any) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("messages", "messages[0]")


def test_a_role_of_the_template_itself_is_known(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("roles")
    template = "{% for m in messages if m.role != 'documents' %}{{ m.content }}{% endfor %}" + TEMPLATES["hermes"]
    with running(folder, f"--model={write_tiny_model(folder / 'tiny.gguf', chat_template=template)}") as live:
        assert chat(live, {"role": "documents", "content": "x"}).status_code == 200
        assert chat(live, {"role": "document", "content": "x"}).status_code == 400
