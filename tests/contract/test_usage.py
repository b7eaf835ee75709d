"""Token counts: in an answer always; in a stream once, last, and only when asked."""

from typing import Any

import openai
import pytest
from live_server import BUNDLED, LiveServer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_no_chunk_has_usage_unless_asked(server: LiveServer, path: str, options: Any) -> None:
    body: dict[str, Any] = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    chunks = server.stream(path, **body, stream_options=options)
    assert chunks.pop() == "[DONE]"
    assert chunks
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks if isinstance(chunk, dict))


def test_usage_comes_once_and_last_and_cached_tokens_are_the_same_both_ways(client: openai.OpenAI) -> None:
    """The first answer takes nothing from the cache and says 0, the next two find the same blocks."""
    words = "one two three four five six seven eight nine ten " * 12
    request: dict[str, Any] = {"model": BUNDLED, "messages": [{"role": "user", "content": words}], "max_tokens": 2}
    first = client.chat.completions.create(**request).usage
    whole = client.chat.completions.create(**request).usage
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    streamed = chunks[-1].usage
    assert first is not None
    assert whole is not None
    assert streamed is not None
    details = [usage.prompt_tokens_details for usage in (first, whole, streamed)]
    cached = [detail.cached_tokens for detail in details if detail is not None]
    assert cached[0] == 0
    assert cached[1] == cached[2] > 64
    assert whole == streamed
