"""Prompts that the queue has no room for cost no tokenising."""

from pathlib import Path

import pytest

from busload_runtime.model.text import load_text_model
from busload_runtime.server.errors import ApiError
from busload_runtime.server.tokenise import PromptEncoder


def refuse(tokens: int) -> None:
    raise ApiError(429, f"no room for {tokens}", code="queue_full")


@pytest.fixture
def encoder(tiny_model: Path) -> PromptEncoder:
    return PromptEncoder(load_text_model(str(tiny_model)))


async def test_who_is_not_welcome_is_not_tokenised(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[str] = []
    monkeypatch.setattr(encoder.model.tokenizer, "encode", lambda text, **how: worked.append(text))
    monkeypatch.setattr(type(encoder.model), "encode_chat", lambda *arguments: worked.append("chat"))
    with pytest.raises(ApiError, match="no room"):
        await encoder.encode({"prompt": "x" * 100}, 1000, refuse)
    with pytest.raises(ApiError, match="no room"):
        await encoder.encode_chat([{"role": "user", "content": "x" * 100}], 1000, admit=refuse)
    assert worked == []


async def test_what_is_expected_follows_what_texts_turned_out_to_be(encoder: PromptEncoder) -> None:
    """The tiny model has a token for each byte. Half of what is usual is expected, so that hardly a text is refused
    that would have fitted."""
    told: list[int] = []
    for _ in range(3):
        await encoder.encode({"prompt": "x" * 2000}, 4000, told.append)
    assert 0 < told[0] < 200, "nothing is known yet"
    assert told[0] < told[1] <= told[2] <= 1000
    assert told[2] > 900
