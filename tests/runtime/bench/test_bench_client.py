"""What the client notes of one request, whatever the server does."""

import asyncio
from collections.abc import Callable
from itertools import islice, repeat

import pytest
from fake_openai import Behaviour, FakeOpenAI, serving

from busload_runtime.bench.client import Client, Request, Target
from busload_runtime.bench.loops import Ending, closed_loop, open_loop
from busload_runtime.bench.outcome import (
    BAD_ANSWER,
    CLIENT_ERROR,
    CONNECTION,
    CUT,
    REFUSED,
    SERVER_ERROR,
    TIMEOUT,
    Outcome,
)

FOUR = Request([1, 2, 3], 3, 4)


async def ask(
    fake: FakeOpenAI, request: Request = FOUR, chat: bool = False, seconds: float = 60, retries: int = 0
) -> Outcome:
    async with serving(fake) as url:
        client = Client(Target(url, "m", chat=chat, timeout=seconds, retries=retries, api_key="secret"))
        outcome = Outcome(0.0)
        await client.send(request, client.now(), outcome)
        await client.close()
    return outcome


async def test_a_stream_is_timed_chunk_by_chunk() -> None:
    fake = FakeOpenAI(Behaviour(before=0.05, gap=0.02))
    outcome = await ask(fake)
    assert outcome.ok
    assert len(outcome.chunks) == 4
    assert outcome.time_to_first_token is not None
    assert outcome.time_to_first_token >= 0.05
    # A busy machine can make it longer, never shorter.
    assert outcome.chunks[-1] - outcome.intended >= 0.05 + 3 * 0.02
    assert len(outcome.gaps) == 3
    assert outcome.intended <= outcome.sent <= outcome.chunks[0] <= outcome.chunks[-1] <= outcome.end
    assert (outcome.input_tokens, outcome.output_tokens, outcome.cached_tokens, outcome.from_usage) == (3, 4, 3, True)


async def test_the_request_asks_for_exactly_so_many_tokens() -> None:
    fake = FakeOpenAI()
    await ask(fake)
    assert fake.bodies == [
        {
            "model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip
    assert fake.headers[0]["Authorization"] == "Bearer secret"


async def test_chat_counts_neither_the_opening_nor_the_closing_chunk() -> None:
    fake = FakeOpenAI(Behaviour(usage=False))
    outcome = await ask(fake, Request("one two", 2, 5), chat=True)
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "one two"}]
    assert outcome.ok
    assert (outcome.output_tokens, len(outcome.chunks), outcome.from_usage) == (5, 5, False)
    assert outcome.input_tokens == 2


async def test_several_tokens_per_chunk_are_known_from_usage() -> None:
    outcome = await ask(FakeOpenAI(Behaviour(tokens_per_chunk=2, gap=0.02)), Request([1], 1, 8))
    assert (len(outcome.chunks), outcome.output_tokens, outcome.tokens_per_chunk) == (4, 8, 2.0)
    assert outcome.time_per_output_token == pytest.approx((outcome.chunks[-1] - outcome.chunks[0]) / 7)


@pytest.mark.parametrize(
    ("behaviour", "kind", "said", "chunks"),
    [
        (Behaviour(status=429), REFUSED, "HTTP 429: ", 0),
        (Behaviour(status=400), CLIENT_ERROR, "as told", 0),
        (Behaviour(status=503), SERVER_ERROR, "HTTP 503", 0),
        (Behaviour(status=204), BAD_ANSWER, "HTTP 204", 0),
        (Behaviour(error_event_after=2), BAD_ANSWER, "error event: ", 2),
        (Behaviour(raw=b"<html>hello"), BAD_ANSWER, "text/html", 0),
        (Behaviour(cut_after=0), CONNECTION, "Disconnected", 0),
        (Behaviour(cut_after=2), CUT, "cut after 2 chunks", 2),
        (Behaviour(end_without_done_after=3), CUT, "before [DONE]", 3),
        (Behaviour(end_without_done_after=0), CUT, "cut after 0 chunks", 0),
        (Behaviour(usage_says={"completion_tokens": "4"}), BAD_ANSWER, "completion_tokens is '4', not a number of", 4),
        (Behaviour(usage_says={"completion_tokens": -1}), BAD_ANSWER, "completion_tokens is -1, not a number of", 4),
        (Behaviour(usage_says={"prompt_tokens": float("nan")}), BAD_ANSWER, "prompt_tokens is nan, not a number of", 4),
        (Behaviour(usage_says={"prompt_tokens": None}), BAD_ANSWER, "prompt_tokens is None, not a number of", 4),
        (
            Behaviour(usage_says={"prompt_tokens_details": {"cached_tokens": [1]}}),
            BAD_ANSWER,
            "cached_tokens is [1]",
            4,
        ),
        (Behaviour(events=b"data: " + b"[" * 200_000 + b"\n"), BAD_ANSWER, "an event that cannot be read", 0),
        (Behaviour(events=b"data: 7\n"), BAD_ANSWER, "an event that cannot be read", 0),
        (Behaviour(events=b"data: " + b"x" * (2**24 + 1)), BAD_ANSWER, "an event of over 16777216 bytes", 0),
        (Behaviour(status=500, charset="no-such"), SERVER_ERROR, "as told", 0),
    ],
)
async def test_failures_are_counted_by_kind(behaviour: Behaviour, kind: str, said: str, chunks: int) -> None:
    outcome = await ask(FakeOpenAI(behaviour))
    assert outcome.kind == kind
    assert said in (outcome.error or "")
    assert not outcome.ok
    assert len(outcome.chunks) == outcome.output_tokens == chunks
    assert outcome.end >= outcome.sent


async def test_a_stream_without_any_token_is_a_failure() -> None:
    outcome = await ask(FakeOpenAI(), Request([1], 1, 0))
    assert (outcome.kind, outcome.error) == (BAD_ANSWER, "the answer has no output token")


async def test_a_timeout_ends_a_request() -> None:
    outcome = await ask(FakeOpenAI(Behaviour(before=30)), seconds=0.05)
    assert outcome.kind == TIMEOUT


async def test_nobody_listening_is_a_failure_of_the_connection() -> None:
    async with serving(FakeOpenAI()) as url:
        pass
    client = Client(Target(url, "m"))
    outcome = Outcome(0.0)
    await client.send(FOUR, 0.0, outcome)
    await client.close()
    assert outcome.kind == CONNECTION


async def test_a_429_is_sent_again_only_when_asked() -> None:
    refusals = [Behaviour(status=429, retry_after="0.03"), Behaviour(status=429, retry_after="soon")]
    fake = FakeOpenAI()
    fake.next.extend(refusals[:1])
    outcome = await ask(fake, retries=1)
    assert outcome.ok
    assert (outcome.retries, len(fake.bodies)) == (1, 2)
    assert outcome.time_to_first_token is not None
    assert outcome.time_to_first_token >= 0.03
    fake.next.extend([refusals[0], refusals[0]])
    assert (await ask(fake, retries=1)).kind == REFUSED
    fake.next.append(Behaviour(status=503, retry_after="0"))
    assert (await ask(fake, retries=1)).retries == 0


async def run_closed(
    fake: FakeOpenAI,
    count: int | None,
    concurrency: int,
    ending: Ending,
    fresh: bool = False,
    on_chunk: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with serving(fake) as url:
        client = Client(Target(url, "m", fresh_connections=fresh), on_chunk)
        requests = islice(repeat(FOUR), count)
        await closed_loop(client, requests, concurrency, None, ending, outcomes)
        await client.close()
    return outcomes


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_closed_loop_keeps_its_concurrency_and_its_connections(fresh: bool) -> None:
    fake = FakeOpenAI(Behaviour(before=0.2))
    outcomes = await run_closed(fake, 12, 3, Ending(), fresh)
    assert len(outcomes) == 12
    assert all(outcome.ok for outcome in outcomes)
    assert fake.most_running == 3
    assert len(fake.peers) == (12 if fresh else 3)


async def test_an_ended_loop_lets_requests_finish_and_a_cut_one_does_not() -> None:
    fake = FakeOpenAI(Behaviour(before=1))
    ending = Ending()

    async def end_when_both_have_come() -> None:
        await fake.received(2)
        ending.send_no_more.set()

    _, outcomes = await asyncio.gather(end_when_both_have_come(), run_closed(fake, None, 2, ending))
    assert [outcome.ok for outcome in outcomes] == [True, True]
    ending = Ending()
    chunks = iter([lambda: None, ending.cut.set])
    fake.default = Behaviour(gap=30)
    outcomes = await run_closed(fake, None, 2, ending, on_chunk=lambda: next(chunks)())
    assert [(o.interrupted, o.kind, len(o.chunks)) for o in outcomes] == [(True, None, 1)] * 2


async def test_an_open_loop_sends_in_time_and_counts_from_the_intended_time() -> None:
    fake = FakeOpenAI(Behaviour(before=1))
    outcomes: list[Outcome] = []
    async with serving(fake) as url:
        client = Client(Target(url, "m"))
        # The last one should have been sent before the client even existed: as if it had been too busy to do so.
        arrivals = iter([(0.0, FOUR), (0.01, FOUR), (0.02, FOUR), (-1.0, FOUR)])
        await open_loop(client, arrivals, Ending(), outcomes)
        await client.close()
    assert fake.most_running == 4, "no request waits for the answer to an earlier one"
    assert [outcome.intended for outcome in outcomes] == [0.0, 0.01, 0.02, -1.0]
    assert all(outcome.sent >= outcome.intended for outcome in outcomes)
    late = outcomes[3]
    assert late.time_to_first_token is not None
    assert late.time_to_first_token >= 2
