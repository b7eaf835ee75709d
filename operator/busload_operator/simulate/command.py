"""What `busload simulate` does: options -> load and setup -> runs -> table, JSON, plot. The only place that prints."""

import json
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from busload_operator.simulate import compare, plot
from busload_operator.simulate.compare import COMPARED, Entry
from busload_operator.simulate.fleet import Fault, Router
from busload_operator.simulate.hardware import HARDWARE, Hardware, SetupError, parse_law
from busload_operator.simulate.report import as_json, table
from busload_operator.simulate.run import Setup
from busload_operator.simulate.traces import RateDay, is_rates, read_arrivals, read_lengths, read_rates
from busload_operator.simulate.workload import Arrival, Lengths, cut, diurnal, flat, repeat
from busload_operator.tuning import Bounds, Objectives, Range
from busload_runtime.contract import LimitsDocument, LimitsError, parse_limits

_MINUTES = 60.0
_ORDERS = {"": None, "fifo": False, "late-last": True}


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options, as its help describes them. None and empty: not given."""

    trace: Path | None
    load: str
    minutes: float | None
    lengths: str
    cv: float
    copies: int
    spread: float
    speed: float
    rates: str
    hardware: str
    law: str
    kv_tokens: int | None
    time_to_first_token: float | None
    inter_token_latency: float | None
    replicas: int
    min_replicas: int
    max_replicas: int
    batch_size: int | None
    max_batch_size: int | None
    token_budget: int | None
    kv_cache_percent: int | None
    max_sequence_length: int | None
    max_queued_requests: int | None
    order: str
    time_budget: bool | None
    router: str
    startup: float
    scrape: float
    scrape_delay: float
    noise: float | None
    front_end: float | None
    faults: tuple[str, ...]
    seed: int
    policies: tuple[str, ...]
    compare: bool
    target: float
    jobs: int
    json_file: str
    plot: Path | None
    decisions: bool


def run(options: Options) -> None:
    """Runs and prints. Raises `SetupError` for anything that cannot be used, before the first run where possible.

    Interrupted (without --jobs), it prints what was done before it raises `KeyboardInterrupt`.
    """
    names = list(options.policies) or ([] if options.compare else ["tuner"])
    if options.compare:
        names += [name for name in COMPARED if name not in names]
    if options.jobs < 1:
        raise SetupError(f"--jobs {options.jobs} must be at least 1")
    if not 0 < options.target <= 1:
        raise SetupError(f"--target {options.target} must be above 0 and at most 1")
    if options.plot is not None:
        plot.check(options.plot)
    setup = make_setup(options)
    load = make_load(options)
    for name in names:
        compare.check(name, load, setup)
    print(_describe(load, setup, options), file=sys.stderr)
    if options.jobs == 1 or len(names) == 1:
        entries: list[Entry] = []
        try:
            for name in names:
                entries.append(_run_here(name, load, setup, options.target))
        except KeyboardInterrupt:
            _write(options, entries, _describe(load, setup, options))
            raise
    else:
        entries = _run_beside(names, load, setup, options)
    _write(options, entries, _describe(load, setup, options))


def _run_here(name: str, load: list[Arrival], setup: Setup, target: float) -> Entry:
    with _Progress() as progress:
        entry = compare.run(name, load, setup, target, progress.show)
    _speed(entry, progress.seconds)
    return entry


def _run_beside(names: list[str], load: list[Arrival], setup: Setup, options: Options) -> list[Entry]:
    """The policies in processes beside each other; the order of `names` stays."""
    with _Progress() as progress, ProcessPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(compare.run, name, load, setup, options.target, _silent) for name in names]
        for done, _ in enumerate(as_completed(runs), 1):
            progress.show(f"{done} of {len(runs)} policies", done / len(runs))
        entries = [run.result() for run in runs]
    print(f"{len(names)} policies in {progress.seconds:.1f} s, {options.jobs} at once", file=sys.stderr, flush=True)
    return entries


def _silent(name: str, share: float) -> None: ...


def make_load(options: Options) -> list[Arrival]:
    """The arrivals. Raises `SetupError`."""
    seed = options.seed
    if options.trace is None:
        return _synthetic(options)
    if is_rates(options.trace):
        model, day, peak = _fields("--rates", options.rates, "MODEL:DAY:PEAK", str, int, float)
        seconds = 60 * (options.minutes or _MINUTES)
        chosen = RateDay(model, day, seconds, peak)
        return read_rates(options.trace, chosen, _lengths(options), seed, options.cv)
    arrivals = read_arrivals(options.trace, seed)
    seconds_or_all = None if options.minutes is None else 60 * options.minutes
    return cut(repeat(arrivals, options.copies, options.spread, seed), options.speed, seconds_or_all)


def _synthetic(options: Options) -> list[Arrival]:
    seconds, lengths = 60 * (options.minutes or _MINUTES), _lengths(options)
    kind = options.load.partition(":")[0]
    if kind == "flat":
        _, rate = _fields("--load", options.load, "flat:RATE or diurnal:LOW:HIGH", str, float)
        return flat(rate, seconds, lengths, options.seed, options.cv)
    if kind == "diurnal":
        _, low, high = _fields("--load", options.load, "flat:RATE or diurnal:LOW:HIGH", str, float, float)
        return diurnal(low, high, seconds, lengths, options.seed, cv=options.cv)
    raise SetupError(f"--load {options.load!r} must be flat:RATE or diurnal:LOW:HIGH, as in flat:10")


def _lengths(options: Options) -> Lengths:
    prompt, colon, output = options.lengths.partition(":")
    if colon and prompt.isdigit() and output.isdigit():
        return Lengths.lognormal(int(prompt), int(output))
    return read_lengths(Path(options.lengths))


def _fields(option: str, text: str, form: str, *kinds: type) -> list[Any]:
    parts = text.split(":")
    try:
        return [kind(part) for kind, part in zip(kinds, parts, strict=True)]
    except ValueError:
        raise SetupError(f"{option} {text!r} must be {form}") from None


def make_setup(options: Options) -> Setup:
    """Preset, then what was given in its place. Raises `SetupError`."""
    hardware = _hardware(options)
    if options.router not in set(Router):
        raise SetupError(f"--router {options.router!r} is unknown; known are {', '.join(Router)}")
    if options.order not in _ORDERS:
        raise SetupError(f"--order {options.order!r} is unknown; known are {', '.join(filter(None, _ORDERS))}")
    limits = replace(
        hardware.limits,
        **{
            name: value
            for name in (
                "batch_size",
                "token_budget",
                "kv_cache_percent",
                "max_sequence_length",
                "max_queued_requests",
            )
            if (value := getattr(options, name)) is not None
        },
    )
    try:
        parse_limits(LimitsDocument(1, limits).to_json())
        most = options.max_batch_size or limits.batch_size
        bounds = Bounds(
            max_sequence_length=Range(min(1024, limits.max_sequence_length), limits.max_sequence_length),
            kv_cache_percent=Range(min(20, limits.kv_cache_percent), max(90, limits.kv_cache_percent)),
            batch_size=Range(1, most),
            batch_size_initial=min(8, most),
            replicas=Range(options.min_replicas, options.max_replicas),
        )
    except LimitsError as error:
        raise SetupError(str(error).replace("default.", "")) from None
    except ValueError as error:
        raise SetupError(str(error)) from None
    return Setup(
        hardware=hardware,
        limits=limits,
        bounds=bounds,
        objectives=Objectives(hardware.time_to_first_token, hardware.inter_token_latency, options.target),
        replicas=options.replicas,
        router=Router(options.router),
        late_last=_ORDERS[options.order],
        time_budget=options.time_budget,
        startup=options.startup,
        scrape=options.scrape,
        scrape_delay=options.scrape_delay,
        faults=tuple(map(Fault.parse, options.faults)),
        seed=options.seed,
    )


def _hardware(options: Options) -> Hardware:
    if options.hardware not in HARDWARE:
        raise SetupError(f"--hardware {options.hardware!r} is unknown; known are {', '.join(HARDWARE)}")
    hardware = HARDWARE[options.hardware]
    if options.law:
        hardware = replace(hardware, law=parse_law(options.law))
    given = {
        name: value
        for name in ("kv_tokens", "time_to_first_token", "inter_token_latency", "noise", "front_end")
        if (value := getattr(options, name)) is not None
    }
    for name, value in given.items():
        zero = name in ("noise", "front_end")
        allowed = "0 or more" if zero else "above 0"
        if not math.isfinite(value) or not (value > 0 or (value == 0 and zero)):
            raise SetupError(f"{name.replace('_', ' ')}: {value} must be {allowed}")
    return replace(hardware, **given)


# What is printed.


def _describe(load: list[Arrival], setup: Setup, options: Options) -> str:
    seconds = max(load[-1].at, 1.0)
    what = options.trace.name if options.trace is not None else options.load
    prompt, output = (sum(tokens) / len(load) for tokens in zip(*((a.prompt, a.output) for a in load), strict=True))
    return (
        f"{what}: {len(load)} requests in {seconds / 60:.0f} min ({len(load) / seconds:.2f}/s), "
        f"{prompt:.0f} prompt and {output:.0f} output tokens; {options.hardware}, TTFT "
        f"{setup.objectives.time_to_first_token:g} s, TPOT {1e3 * setup.objectives.inter_token_latency:g} ms, "
        f"seed {setup.seed}"
    )


class _Progress:
    """A line on stderr that is rewritten on a terminal; elsewhere nothing until a run ends."""

    def __enter__(self) -> "_Progress":
        self._started = time.perf_counter()
        self._shown = 0.0
        self.seconds = 0.0
        return self

    def show(self, name: str, share: float) -> None:
        now = time.perf_counter()
        if sys.stderr.isatty() and now - self._shown > 0.2:
            self._shown = now
            print(f"\r{name}: {share:4.0%}\x1b[K", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _speed(entry: Entry, seconds: float) -> None:
    text = f"{entry.summary.policy}: {entry.outcome.seconds:.0f} s simulated in {seconds:.1f} s"
    print(text, file=sys.stderr, flush=True)


def _write(options: Options, entries: list[Entry], title: str) -> None:
    if not entries:
        return
    if options.json_file:
        text = json.dumps(
            {"load": title, "policies": [as_json(entry.summary, entry.outcome) for entry in entries]}, indent=1
        )
        if options.json_file == "-":
            print(text)
        else:
            try:
                Path(options.json_file).write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                raise SetupError(f"--json {options.json_file}: {error.strerror}") from None
    if options.json_file != "-":
        print(table([entry.summary for entry in entries]))
        if options.decisions:
            for entry in entries:
                _list_decisions(entry)
    if options.plot is not None:
        plot.plot(options.plot, title, entries)


def _list_decisions(entry: Entry) -> None:
    for decision in entry.outcome.decisions:
        print(f"{entry.summary.policy} at {decision.at / 60:.1f} min: {decision.message}")
        print(f"    {decision.outcome.verdict.value}: {decision.outcome.message}")
