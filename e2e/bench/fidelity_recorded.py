"""`simulator_fidelity` against runs that were recorded elsewhere: NAME_requests.jsonl, NAME_timeseries.csv and
NAME_meta.json of LLMServingSim's examples. The law comes from the run's own gauges, one a second."""

import csv
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from busload_operator.simulate.hardware import HARDWARE
from busload_operator.simulate.workload import Arrival
from busload_operator.tuning import Law
from busload_operator.tuning.fit import Fit, add, solve
from busload_operator.tuning.window import PodWindow
from busload_runtime.contract import Limits, StepLaw
from e2e.bench.fidelity_bars import MEASURED_BARS, Timing, compare, simulated


def check_measured(folder: Path) -> bool:
    names = sorted(path.name.removesuffix("_requests.jsonl") for path in folder.glob("*_requests.jsonl"))
    if not names:
        raise SystemExit(f"--measured {folder}: there is no file NAME_requests.jsonl")
    good = [_check_measured(folder, name) for name in names]  # all of them, also after one that missed
    return all(good)


def _check_measured(folder: Path, name: str) -> bool:
    meta = json.loads((folder / f"{name}_meta.json").read_text())
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache", {})
    with (folder / f"{name}_timeseries.csv").open(newline="") as file:
        gauges = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    recorded = [json.loads(line) for line in (folder / f"{name}_requests.jsonl").read_text().splitlines()]
    recorded.sort(key=lambda request: request["queued_ts"])
    start = recorded[0]["queued_ts"]
    # Without a size the run never came near its pool's end.
    kv_tokens = cache.get("num_kv_tokens") or 8 * sum(r["input_toks"] + r["output_toks"] for r in recorded)
    law = gauge_law(gauges, kv_tokens)
    longest = max(r["input_toks"] + r["output_toks"] for r in recorded) + 1
    limits = Limits(longest, engine["max_num_seqs"], 100, engine["max_num_batched_tokens"], 100_000, 2_000_000_000)
    hardware = replace(
        HARDWARE["tight"],
        law=StepLaw(law.a, law.b, law.c, law.d),
        kv_tokens=kv_tokens,
        block_size=cache.get("block_size", 16),
        noise=0.0,
        drift=0.0,
    )
    load = [Arrival(r["queued_ts"] - start, r["input_toks"], r["output_toks"]) for r in recorded]
    real = [
        Timing(r["queued_ts"] - start, r["first_token_ts"] - start, r["last_token_ts"] - start, r["output_toks"])
        for r in recorded
    ]
    return compare(f"{name} (law error {law.error:.0%})", MEASURED_BARS, real, simulated(load, hardware, limits))


def gauge_law(gauges: Sequence[dict[str, float]], kv_tokens: int) -> Law:
    """The law from gauges once a second: steps = generated tokens / running, the engine taken to be always busy."""
    fit = Fit()
    nothing = {field.name: 0.0 for field in fields(PodWindow)}
    for row in gauges:
        if row["running"] < 2 or row["gen_throughput"] <= 0:
            continue  # the mean of a second in which the run began or ended says little
        steps = row["gen_throughput"] / row["running"]
        values = {
            "seconds": 1.0,
            "busy_seconds": 1.0,
            "steps": steps,
            "step_batch": row["gen_throughput"],
            "step_kv_tokens": steps * row["kv_cache_pct"] / 100 * kv_tokens,
            "prefill_tokens": row["prompt_throughput"],
        }
        fit = add(fit, PodWindow(**(nothing | values | {"pod": "run", "waiting_throughout": True})))  # type: ignore[arg-type]
    law = solve(fit)
    if law is None:
        raise SystemExit("the time series has no second with at least two running requests")
    return law
