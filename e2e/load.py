"""A small load client: concurrent streamed completions, every token's arrival recorded, every failure counted.

    python -m e2e.load --url http://127.0.0.1:8000/v1 --requests 32 --concurrency 32 --max-tokens 96

Prints one JSON object (see `Report`). A request that fails (refused, cut, malformed) is an error in the report, never
an exception: the caller decides what a failure means. All loops are bounded by --requests or --seconds.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field

import aiohttp

WORDS = ("river", "stone", "quick", "lamp", "garden", "paper", "cloud", "seven", "music", "harbor", "winter", "orange")


@dataclass
class Outcome:
    """One request. Times are seconds of the wall clock (`time.time`), so that they compare with status times."""

    start: float
    end: float = 0.0
    tokens: list[float] = field(default_factory=list)
    """Arrival time of each streamed token."""
    completion_tokens: int = 0
    status: int = 0
    error: str | None = None


@dataclass
class Report:
    """A whole run. `tokens_per_second` is over the wall time of the run; `rate(a, b)` over any window of it."""

    outcomes: list[Outcome]

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error is not None]

    def rate(self, start: float, end: float) -> float:
        """Tokens per second that arrived in the window (wall clock seconds)."""
        count = sum(1 for outcome in self.outcomes for at in outcome.tokens if start <= at < end)
        return count / max(end - start, 1e-9)

    def to_json(self) -> str:
        start = min(o.start for o in self.outcomes)
        end = max(o.end for o in self.outcomes)
        total = sum(o.completion_tokens for o in self.outcomes)
        return json.dumps(
            {
                "requests": len(self.outcomes),
                "errors": self.errors,
                "completion_tokens": total,
                "seconds": round(end - start, 3),
                "tokens_per_second": round(total / max(end - start, 1e-9), 2),
                "outcomes": [asdict(o) for o in self.outcomes],
            }
        )


def from_json(text: str) -> Report:
    """The report that another process printed."""
    return Report([Outcome(**o) for o in json.loads(text)["outcomes"]])


async def one(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Outcome:
    """Sends one streamed completion and reads it to its end."""
    outcome = Outcome(start=time.time())
    try:
        async with session.post(f"{url}/completions", json=body) as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await _read(response, outcome)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.end = time.time()
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            outcome.error = f"error event: {event['error']}"
        elif event.get("choices"):
            outcome.tokens.append(time.time())
        elif event.get("usage"):
            outcome.completion_tokens = event["usage"]["completion_tokens"]
    if not done and outcome.error is None:
        outcome.error = f"stream cut after {len(outcome.tokens)} chunks, before [DONE]"


async def run(
    url: str,
    model: str,
    requests: int,
    concurrency: int,
    max_tokens: int,
    prompt_words: int,
    seconds: float,
    seed: int,
    connections: str,
) -> Report:
    """Closed loop: `concurrency` clients, until `requests` are sent, `seconds` have passed or SIGTERM says enough."""
    rng = random.Random(seed)
    outcomes: list[Outcome] = []
    left = requests
    deadline = time.monotonic() + seconds
    enough = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, enough.set)
    connector = aiohttp.TCPConnector(limit=0, force_close=connections == "fresh")
    timeout = aiohttp.ClientTimeout(total=seconds + 300, sock_connect=10)

    async def client() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < deadline and not enough.is_set():
            left -= 1
            prompt = " ".join(rng.choice(WORDS) for _ in range(prompt_words)) + f" {rng.randrange(10**9)}"
            body: dict[str, object] = {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            outcomes.append(await one(session, url, body))

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(client() for _ in range(concurrency)))
    return Report(outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="base URL, up to and including /v1")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--requests", type=int, default=32, help="requests in all (default 32)")
    parser.add_argument("--concurrency", type=int, default=32, help="clients at a time (default 32)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens each request generates (default 64)")
    parser.add_argument("--prompt-words", type=int, default=16, help="length of the random prompt (default 16)")
    parser.add_argument("--seconds", type=float, default=600, help="send no new request after this (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default 0)")
    parser.add_argument(
        "--connections",
        choices=["keep-alive", "fresh"],
        default="keep-alive",
        help="reuse connections as clients do, or open one per request (default keep-alive)",
    )
    args = parser.parse_args()
    report = asyncio.run(run(**vars(args)))
    print(report.to_json())
    if report.errors:
        print(f"{len(report.errors)} of {len(report.outcomes)} requests failed: {report.errors[0]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
