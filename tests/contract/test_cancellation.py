"""Clients that leave: whatever their request was doing, its place and memory come back, and it counts as aborted."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from live_server import BUNDLED, LiveServer, eventually, running

ABORTED = 'busload_requests_finished_total{reason="abort"}'
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
"""Never over before its client leaves."""
LEVELS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "busload_queued_prompt_tokens")


class Connection:
    """A request on a connection of its own, which can be cut at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def send(cls, server: LiveServer, path: str = "/v1/completions", **body: Any) -> "Connection":
        url, content = httpx.URL(server.url), json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(content), content)
        )
        return cls(reader, writer)

    async def first_event(self) -> None:
        await self._reader.readuntil(b"data: ")

    def drop(self, reset: bool = False) -> None:
        """Closes it, or resets it, which is what a client that crashed with data unread does."""
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled model with a small batch, so that of many requests most wait."""
    flags = ("--batch-size=4", "--max-sequence-length=8192", "--token-budget=64")
    with running(tmp_path_factory.mktemp("crowded"), f"--served-model-name={BUNDLED}", *flags) as server:
        yield server


async def sooner_or_later(check: Callable[[], bool]) -> None:
    """`eventually`, while the connections of this thread go on."""
    await asyncio.to_thread(eventually, check)


@asynccontextmanager
async def all_comes_back(server: LiveServer, aborts: int) -> AsyncIterator[dict[str, float]]:
    """What the block leaves behind is gone soon: every level is 0, every block free, and so many aborts are counted."""
    before = server.metrics()
    yield before
    left = time.monotonic()
    await sooner_or_later(lambda: [server.level(name) for name in LEVELS] == [0, 0, 0])
    print(f"all levels 0 after {time.monotonic() - left:.2f} s")
    after = server.metrics()
    assert after["busload_kv_blocks_free"] == after["busload_kv_blocks"] == before["busload_kv_blocks"]
    assert after[ABORTED] - before[ABORTED] == aborts
    assert server.level("vllm:kv_cache_usage_perc") == 0
    assert server.complete(prompt="hello", max_tokens=1).status_code == 200


async def test_a_hundred_dropped_streams(crowded: LiveServer) -> None:
    """Four run, the others wait; all end at once and not at their last token."""
    async with all_comes_back(crowded, aborts=100) as before:
        streams = [await Connection.send(crowded, **LONG, stream=True) for _ in range(100)]
        await streams[0].first_event()
        await sooner_or_later(lambda: crowded.level("vllm:num_requests_waiting") == 96)
        for place, stream in enumerate(streams):
            stream.drop(reset=place % 2 == 1)
    generated = crowded.metrics()["busload_generated_tokens_total"] - before["busload_generated_tokens_total"]
    assert generated < 4 * 8000


async def test_who_leaves_the_queue_is_never_prefilled(crowded: LiveServer) -> None:
    async with all_comes_back(crowded, aborts=14):
        running = [await Connection.send(crowded, **LONG, stream=True) for _ in range(4)]
        for stream in running:
            await stream.first_event()
        prefilled = crowded.level("busload_step_prefill_tokens_total")
        prompt = list(range(1000, 1300))
        waiting = [
            await Connection.send(crowded, prompt=prompt, max_tokens=5, n=1 + (place == 0), stream=place % 2 == 0)
            for place in range(9)
        ]
        await sooner_or_later(lambda: crowded.level("vllm:num_requests_waiting") == 10)
        for stream in waiting:
            stream.drop()
        await sooner_or_later(lambda: crowded.level("vllm:num_requests_waiting") == 0)
        for stream in running:
            stream.drop()
    assert crowded.level("busload_step_prefill_tokens_total") - prefilled < len(prompt)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_during_prefill_is_not_computed_to_the_end(crowded: LiveServer, stream: bool) -> None:
    """A prompt of 8000 tokens takes 125 steps of 64 tokens: it ends before the last one."""
    prefilled = crowded.level("busload_step_prefill_tokens_total")
    async with all_comes_back(crowded, aborts=1):
        seed = 5000 + stream
        connection = await Connection.send(crowded, prompt=[seed] + [17] * 7999, max_tokens=50, stream=stream)
        await sooner_or_later(lambda: crowded.level("busload_step_prefill_tokens_total") >= prefilled + 128)
        connection.drop()
    assert crowded.level("busload_step_prefill_tokens_total") - prefilled < 8000


async def test_every_choice_of_a_request_ends(crowded: LiveServer) -> None:
    """Also those of a request of which one choice runs while others wait, in one piece as in a stream."""
    async with all_comes_back(crowded, aborts=3 * 6):
        requests = [await Connection.send(crowded, **LONG, n=6, stream=place == 0) for place in range(3)]
        await sooner_or_later(lambda: crowded.level("vllm:num_requests_waiting") == 14)
        for request in requests:
            request.drop()


async def test_who_was_preempted_frees_its_place_in_the_queue(tight: LiveServer) -> None:
    async with all_comes_back(tight, aborts=8) as before:
        streams = [
            await Connection.send(tight, prompt=[1000 + place] * 100, max_tokens=180, ignore_eos=True, stream=True)
            for place in range(8)
        ]
        preempted = before["busload_preemptions_total"]
        await sooner_or_later(lambda: tight.level("busload_preemptions_total") > preempted)
        for stream in streams:
            stream.drop()


async def test_a_thousand_aborts_at_random_times(crowded: LiveServer) -> None:
    """Before the body is whole, in the queue, in prefill, between tokens: afterwards it serves as before."""
    draw = random.Random(28)
    fields: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    expected = crowded.complete(**fields).json()["choices"]
    limit = asyncio.Semaphore(40)

    async def leave(place: int) -> None:
        async with limit:
            prompt = [1 + draw.randrange(40_000) for _ in range(draw.choice((1, 20, 200)))]
            body = {"prompt": prompt, "max_tokens": draw.choice((1, 5, 500)), "n": draw.choice((1, 1, 2))}
            path = draw.choice(("/v1/completions", "/v1/chat/completions"))
            if path == "/v1/chat/completions":
                body["messages"] = [{"role": "user", "content": f"question {place}"}]
            connection = await Connection.send(crowded, path, **body, stream=draw.random() < 0.5)
            await asyncio.sleep(draw.expovariate(20))
            connection.drop(reset=draw.random() < 0.3)

    await asyncio.gather(*(leave(place) for place in range(1000)))
    await sooner_or_later(lambda: [crowded.level(name) for name in LEVELS] == [0, 0, 0])
    metrics = crowded.metrics()
    assert metrics["busload_kv_blocks_free"] == metrics["busload_kv_blocks"]
    ended = sum(value for name, value in metrics.items() if name.startswith("busload_requests_finished_total"))
    assert ended == metrics["busload_requests_arrived_total"]
    answers = [crowded.complete(**fields) for _ in range(4)]
    assert [answer.json()["choices"] for answer in answers] == [expected] * 4


async def test_two_live_requests_may_have_one_id(crowded: LiveServer) -> None:
    """The client's own id is a label of theirs: no key of ours, so that neither can end or answer the other."""
    fields = {"prompt": "One, two, three,", "max_tokens": 40, "temperature": 0, "request_id": "same", "user": "same"}
    headers = {"x-request-id": "same"}
    expected = crowded.complete(**fields).json()["choices"]
    async with httpx.AsyncClient(base_url=crowded.url, timeout=60, headers=headers) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=fields) for _ in range(6)))
    assert [answer.json()["choices"] for answer in answers] == [expected] * 6
    assert len({answer.json()["id"] for answer in answers}) == 6
