"""The checked flags of `busload bench`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from busload_runtime.bench.client import Target
from busload_runtime.bench.lengths import Lengths
from busload_runtime.bench.summary import Goals


@dataclass(frozen=True)
class BenchOptions:
    """What to send, how, and what to print. Made by `checked`, or by programs that measure for themselves."""

    target: Target
    input_lengths: Lengths
    output_lengths: Lengths
    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    """Exactly one of `concurrencies`, `rates` and a trace with times says when requests are sent."""
    requests: int | None = None
    """Per level; None: until `seconds`, or a number that suits the level."""
    seconds: float | None = None
    warmup: int = 1
    seed: int = 0
    words: bool = False
    first_id: int = 1000
    last_id: int = 30000
    prefix_tokens: int = 0
    prefixes: int = 1
    trace: Path | None = None
    speed: float = 1.0
    limit: int | None = None
    longest: int | None = None
    goals: Goals = field(default_factory=Goals)
    json: str = ""
    """File for the JSON document, - for standard output."""
    records: bool = False
    allow_errors: bool = False


def checked(options: BenchOptions) -> BenchOptions:
    """The options, with a default for how requests are sent. Raises ValueError that names the flag."""
    url = urlsplit(options.target.url)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ValueError(
            f"--url {options.target.url!r} is not an http(s) URL; give one such as http://127.0.0.1:8000/v1"
        )
    if not options.target.api_key.isascii() or not options.target.api_key.isprintable():
        raise ValueError("--api-key (OPENAI_API_KEY) holds a line break or a character that no HTTP header carries")
    try:
        _ = url.port
    except ValueError as error:
        raise ValueError(f"--url {options.target.url!r}: {error}") from None
    if options.concurrencies and options.rates:
        raise ValueError("--concurrency (closed loop) and --rate (open loop) exclude each other; give one of them")
    if options.target.chat and not options.words:
        raise ValueError("--prompt ids does not work with --endpoint chat, which takes text; use --prompt words")
    if options.trace is None and (options.speed != 1 or options.limit is not None or options.longest is not None):
        raise ValueError("--speed, --limit and --longest are about a trace; give --trace FILE")
    if options.trace is not None and options.prefix_tokens:
        raise ValueError("--shared-prefix-tokens does not go with --trace, whose lengths are whole prompts")
    for flag, values, least in (
        ("--concurrency", options.concurrencies, 1),
        ("--requests", (options.requests,), 1),
        ("--warmup", (options.warmup,), 0),
        ("--retry", (options.target.retries,), 0),
        ("--shared-prefix-tokens", (options.prefix_tokens,), 0),
        ("--prefixes", (options.prefixes,), 1),
        ("--limit", (options.limit,), 1),
        ("--longest", (options.longest,), 2),
    ):
        for value in values:
            if value is not None and value < least:
                raise ValueError(f"{flag} must be {least} or more, got {value}")
    for flag, numbers in (
        ("--rate", options.rates),
        ("--seconds", (options.seconds,)),
        ("--speed", (options.speed,)),
        ("--timeout", (options.target.timeout,)),
        ("--slo-ttft", (options.goals.time_to_first_token,)),
        ("--slo-itl", (options.goals.inter_token_latency,)),
    ):
        for number in numbers:
            if number is not None and not (number > 0 and math.isfinite(number)):
                raise ValueError(f"{flag} must be a number above 0, got {number:g}")
    return options


def parse_ids(text: str, flag: str) -> tuple[int, int]:
    """The range FIRST:LAST of token ids. Raises ValueError that names the flag."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"{flag} {text!r} must be FIRST:LAST, two whole numbers with FIRST below LAST")
    return int(first), int(last)


def numbers(text: str, flag: str) -> tuple[float, ...]:
    """A list such as 1,8,32. Raises ValueError that names the flag."""
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not a list of numbers such as 1,8,32") from None


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """A list such as 1,8,32. Raises ValueError that names the flag."""
    found = numbers(text, flag)
    if any(number != int(number) for number in found if math.isfinite(number)) or not all(map(math.isfinite, found)):
        raise ValueError(f"{flag} {text!r} is not a list of whole numbers such as 1,8,32")
    return tuple(int(number) for number in found)
