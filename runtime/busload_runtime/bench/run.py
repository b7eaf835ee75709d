"""`busload bench` from top to bottom: levels in turn, signals, output, exit code."""

import asyncio
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from busload_runtime.bench.client import Client
from busload_runtime.bench.loops import Ending, closed_loop, open_loop
from busload_runtime.bench.options import BenchOptions, checked
from busload_runtime.bench.outcome import Level, Outcome
from busload_runtime.bench.progress import shown
from busload_runtime.bench.render import document, table
from busload_runtime.bench.summary import summarise
from busload_runtime.bench.workload import Plan, Workload

_OTHER_FILES = 32
"""Descriptors beside the connections."""


def main(options: BenchOptions) -> int:
    """Measures and prints. Exit code 0; 1 when a request failed (unless allowed) or none was made; 2: wrong flags."""
    try:
        checked(options)
        workload = Workload(options)
        if options.json not in ("", "-"):
            Path(options.json).open("a").close()  # better now than after an hour
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--json {options.json}: {error.strerror}; name a file in a folder that exists", file=sys.stderr)
        return 2
    if problem := _too_few_descriptors(options):
        print(problem, file=sys.stderr)
        return 2
    levels = asyncio.run(_with_signals(options, workload))
    pairs = [(level, summarise(level, options.goals)) for level in levels]
    lines = [table(pairs, options.goals) if pairs else "nothing was measured"]
    lines += [f"  {note}" for note in workload.notes()]
    _print("\n".join([*lines, f"seed {options.seed}"]), options)
    if options.json:
        text = json.dumps(document(pairs, _about(options, workload), options.records), indent=None)
        if options.json == "-":
            print(text)
        else:
            try:
                Path(options.json).write_text(text + "\n")
            except OSError as error:
                print(f"--json {options.json}: not written: {error.strerror}", file=sys.stderr)
                return 1
    failed = sum(len(level.errors) for level in levels)
    return 1 if not any(level.outcomes for level in levels) or (failed and not options.allow_errors) else 0


async def measure(options: BenchOptions, workload: Workload, ending: Ending | None = None) -> list[Level]:
    """All levels in turn, those begun before `ending` said to stop. Shows progress on stderr."""
    ending = ending or Ending()
    if options.warmup:
        plan = Plan("warm-up", concurrency=min(options.warmup, 8), requests=options.warmup)
        await _level(options, workload, plan, ending)
    levels = []
    for plan in workload.plans():
        if ending.send_no_more.is_set():
            break
        levels.append(await _level(options, workload, plan, ending))
    return levels


async def _with_signals(options: BenchOptions, workload: Workload) -> list[Level]:
    ending = Ending()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        ending.send_no_more.set()
        ending.cut.set()

    loop.add_signal_handler(signal.SIGTERM, ending.send_no_more.set)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    return await measure(options, workload, ending)


async def _level(options: BenchOptions, workload: Workload, plan: Plan, ending: Ending) -> Level:
    outcomes: list[Outcome] = []
    chunks = 0

    def count_chunk() -> None:
        nonlocal chunks
        chunks += 1

    cpu = time.process_time()
    client = Client(options.target, count_chunk)
    try:
        async with shown(lambda: _progress(plan, outcomes, chunks, client.now)):
            if plan.concurrency is not None:
                requests = workload.requests(plan.requests)
                await closed_loop(client, requests, plan.concurrency, plan.seconds, ending, outcomes)
            else:
                await open_loop(client, workload.arrivals(plan), ending, outcomes)
    finally:
        await client.close()
    # What a cut kept from being sent at all is no request.
    sent = [outcome for outcome in outcomes if outcome.end]
    cpu_share = (time.process_time() - cpu) / max(client.now(), 1e-9)
    return Level(plan.name, client.began, sent, plan.concurrency, plan.rate, cpu_share)


def _progress(plan: Plan, outcomes: list[Outcome], chunks: int, now: Callable[[], float]) -> str:
    ended = sum(1 for outcome in outcomes if outcome.end)
    failed = sum(1 for outcome in outcomes if outcome.kind is not None)
    of = f" of {plan.requests}" if plan.requests else ""
    until = f" of {plan.seconds:.0f}" if plan.seconds else ""
    return (
        f"{plan.name}: {now():.0f}{until} s, {ended}{of} requests done, {len(outcomes) - ended} running, "
        f"{failed} failed, {chunks / max(now(), 1e-9):.0f} tok/s"
    )


def _print(text: str, options: BenchOptions) -> None:
    print(text, file=sys.stderr if options.json == "-" else sys.stdout)


def _about(options: BenchOptions, workload: Workload) -> dict[str, Any]:
    trace = workload.trace
    return {
        "format": "busload-bench/1",
        "url": options.target.url,
        "model": options.target.model,
        "endpoint": "chat" if options.target.chat else "completions",
        "seed": options.seed,
        "prompts": "words" if options.words else "ids",
        "input_tokens": None if trace else vars(options.input_lengths),
        "output_tokens": None if trace else vars(options.output_lengths),
        "shared_prefix_tokens": options.prefix_tokens,
        "prefixes": options.prefixes if options.prefix_tokens else 0,
        "trace": trace
        and {
            "file": str(options.trace),
            "rows": len(trace.rows),
            "left_out": trace.left_out,
            "arrivals_spread": trace.spread,
            "speed": options.speed,
        },
        "goals": vars(options.goals),
    }


def _too_few_descriptors(options: BenchOptions) -> str:
    """Allows as many open sockets as the system lets this process have; what to do if the closed loop needs more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    clients = max(options.concurrencies, default=0)
    if most == resource.RLIM_INFINITY or clients + _OTHER_FILES <= most:
        return ""
    return (
        f"--concurrency {clients} needs {clients + _OTHER_FILES} open files and this process may have {most}; "
        f"raise it (ulimit -n), or give at most {max(1, most - _OTHER_FILES)}"
    )
