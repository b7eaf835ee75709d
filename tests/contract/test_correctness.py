"""The same request gets the same answer, whoever else is served at that time."""

import asyncio
from typing import Any

import httpx
from live_server import LiveServer

TOPICS = ("rivers", "bread", "clocks", "bridges", "owls", "salt", "trains", "maps")


async def together(server: LiveServer, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=request) for request in requests))
    return [answer.json() for answer in answers]


async def test_greedy_texts_do_not_depend_on_load(server: LiveServer) -> None:
    """The guarantee is equality: 32 prompts of several lengths alone, and all at once in batches of up to 8."""
    requests = [
        {
            "prompt": f"{'Once upon a time. ' * (place // 8 * 5)}A few words about {TOPICS[place % 8]}:",
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
        }
        for place in range(32)
    ]
    alone = [(await together(server, [request]))[0]["choices"] for request in requests]
    answers = [answer["choices"] for answer in await together(server, requests)]
    diverged = sum(one != other for one, other in zip(alone, answers, strict=True))
    print(f"{diverged} of {len(requests)} greedy texts depend on what else was served")
    assert diverged == 0


async def test_twins_in_one_instant_answer_as_one_alone(server: LiveServer) -> None:
    """Neither may read blocks that the other has not computed yet. Prompts are new each time, so nothing is cached."""
    for twins in (2, 5):
        words = " ".join(f"{twins * 31 + i * 17} apples" for i in range(120))
        request = {"prompt": f"{words} and", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answers = await together(server, [request] * twins)
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        alone = (await together(server, [request]))[0]
        print(f"{twins} twins: cached tokens {cached}, alone behind them {alone['usage']['prompt_tokens_details']}")
        assert [answer["choices"] for answer in answers] == [alone["choices"]] * twins
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
