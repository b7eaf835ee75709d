"""The tuner against other rules in simulation: share of requests inside the objectives, and what it cost.

    python -m e2e.bench.tuning_table TRACES OUT [--seeds 1,2] [--loads "A;B"] [--policies tuner,static]
    python -m e2e.bench.tuning_table TRACES OUT --settings

TRACES is a folder with the public traces (docs/tuning.md names them). Each run is one `busload simulate`; its numbers
go to OUT/LOAD-SEED-POLICY.json and are not computed again, so that an interrupted table goes on where it stopped.
Prints the table as Markdown. With --settings: replicas fixed, bad settings at the start, against a grid over settings.
"""

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

CONV, AIBRIX, ARXIV = "azure2023_conv.csv", "aibrix_8min_up_down.csv", "arxiv_summarization_lengths.csv"
LOADS: dict[str, list[str]] = {
    "conv, 8B on 24 GB": ["--trace", CONV, "--hardware", "tight", "--replicas", "4"],
    "flat, 8B on 24 GB": [
        *("--load", "flat:6", "--lengths", CONV, "--hardware", "tight", "--minutes", "40", "--replicas", "3"),
    ],
    "flat for 2 h, 8B on 24 GB": [
        *("--load", "flat:6", "--lengths", CONV, "--hardware", "tight", "--minutes", "120", "--replicas", "3"),
    ],
    "diurnal, 8B on 24 GB": [
        *("--load", "diurnal:2:12", "--lengths", CONV, "--hardware", "tight", "--minutes", "50", "--replicas", "2"),
    ],
    "servegen, 8B on 24 GB": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "m-small:1:10", "--lengths", CONV, "--cv", "1.5"),
        *("--hardware", "tight", "--minutes", "50", "--replicas", "2"),
    ],
    "diurnal, 135M on CPUs": ["--load", "diurnal:3:15", "--lengths", "200:80", "--hardware", "cpu", "--minutes", "40"],
    "code x2, 8B on 96 GB": ["--trace", "azure2023_code.csv", "--copies", "2", "--replicas", "3"],
    "aibrix x6, 8B on 96 GB": ["--trace", AIBRIX, "--copies", "6", "--replicas", "2"],
    "conv x3, 8B on 96 GB": ["--trace", CONV, "--copies", "3", "--replicas", "3"],
    # Fleets of three to ten replicas.
    "conv x5, 8B on 96 GB": ["--trace", CONV, "--copies", "5", "--spread", "5", "--replicas", "5"],
    "conv x2, 8B on 24 GB": [
        *("--trace", CONV, "--copies", "2", "--spread", "5", "--hardware", "tight", "--replicas", "6"),
    ],
    "flat 30 a second, 8B on 96 GB": ["--load", "flat:30", "--lengths", CONV, "--minutes", "60", "--replicas", "5"],
    "diurnal 8 to 40 a second, 8B on 96 GB": [
        *("--load", "diurnal:8:40", "--lengths", CONV, "--minutes", "90", "--cv", "1.2", "--replicas", "2"),
    ],
    "servegen to 60 a second, 8B on 96 GB": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "m-small:1:60", "--lengths", CONV, "--cv", "1.5"),
        *("--minutes", "120", "--replicas", "3"),
    ],
    "servegen to 28 a second, 8B on 24 GB": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "m-large:2:28", "--lengths", CONV, "--cv", "1.5"),
        *("--hardware", "tight", "--minutes", "120", "--replicas", "6"),
    ],
    "flat 40 a second, 135M on CPUs": [
        *("--load", "flat:40", "--lengths", "148:67", "--hardware", "cpu", "--minutes", "60", "--replicas", "7"),
    ],
    "servegen to 45 a second, 135M on CPUs": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "m-small:1:45", "--lengths", "148:67", "--cv", "1.5"),
        *("--hardware", "cpu", "--minutes", "120", "--replicas", "3"),
    ],
    # No constant was chosen on these.
    "servegen m-mid to 50 a second, 8B on 96 GB": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "m-mid:3:50", "--lengths", CONV, "--cv", "1.5"),
        *("--minutes", "90", "--replicas", "4"),
    ],
    "servegen m-large to 50 a second, 8B on 96 GB": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "m-large:5:50", "--lengths", CONV, "--cv", "1.5"),
        *("--minutes", "90", "--replicas", "4"),
    ],
    "servegen to 14 a second, arXiv, 8B on 96 GB": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "m-small:4:14", "--lengths", ARXIV, "--cv", "1.5"),
        *("--minutes", "90", "--replicas", "3"),
    ],
    "servegen r1 to 120 a second, AIBrix, 8B on 96 GB": [
        *("--trace", "servegen_total_rate_week1.csv", "--rates", "deepseek-r1:1:120", "--lengths", AIBRIX),
        *("--cv", "1.5", "--minutes", "60", "--replicas", "2"),
    ],
    "flat 10 a second, arXiv, 8B on 96 GB": [
        *("--load", "flat:10", "--lengths", ARXIV, "--minutes", "60", "--replicas", "5"),
    ],
    "mooncake, 8B on 96 GB": [
        *("--trace", "mooncake_conversation.jsonl", "--max-sequence-length", "131072", "--ttft", "5"),
        *("--replicas", "4"),
    ],
}
POLICIES = ("tuner", "clairvoyant", "static", "wva", "wva-tokens", "busy")
"""`static` is the best number of replicas known in hindsight, with the settings of the start."""
MOST_REPLICAS = 12
TARGET = 0.99

FIXED = {"conv, 8B on 24 GB": 3, "diurnal, 135M on CPUs": 3}
"""Loads for --settings, and their replicas."""
STARTS = ((4, 40, 256), (8, 50, 512), (16, 90, 256), (256, 40, 8192), (32, 60, 128))
GRID = tuple(product((16, 64, 256), (50, 90), (320, 2048)))
"""Of batchSize, kvCachePercent and token budget."""


class Runs:
    """Simulations by name, each done once."""

    def __init__(self, traces: Path, out: Path, show: bool) -> None:
        self._traces, self._out, self._show = traces, out, show
        out.mkdir(parents=True, exist_ok=True)

    def of(self, load: str, seed: int, policy: str, *more: str, name: str = "") -> dict[str, Any] | None:
        """The summary of one run; None: not done, and nothing is to be computed."""
        file = self._out / f"{load}-{seed}-{name or policy.replace(':', '_')}.json"
        if not file.exists():
            if self._show:
                return None
            arguments = [*LOADS[load], *more]
            file.write_text(json.dumps(simulate(arguments, self._traces, seed, policy), indent=1))
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def fewest(self, load: str, seed: int, share: float) -> tuple[int, dict[str, Any]] | None:
        """The fewest replicas that reach this share: more are taken to be no worse. None: not even all of them do, or
        a run is missing."""
        low, high, found = 1, MOST_REPLICAS, self.of(load, seed, f"static:{MOST_REPLICAS}")
        if found is None or found["inside"] < share:
            return None
        while low < high:
            middle = (low + high) // 2
            tried = self.of(load, seed, f"static:{middle}")
            if tried is None:
                return None
            if tried["inside"] >= share:
                high, found = middle, tried
            else:
                low = middle + 1
        return high, found


def simulate(arguments: list[str], traces: Path, seed: int, policy: str) -> dict[str, Any]:
    """The summary of one run."""
    places = [str(traces / a) if a.endswith((".csv", ".jsonl")) else a for a in arguments]
    command = [sys.executable, "-m", "busload_operator.cli", "simulate", *places]
    command += ["--max-replicas", str(MOST_REPLICAS), "--seed", str(seed), "--policy", policy, "--json", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["policies"][0]
    for long in ("timeline", "limits_changes"):
        del found[long]
    return found


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    changes = found["replica_changes_per_hour"] + found["settings_changes_per_hour"]
    return f"{percent(found['inside'])} @ {found['replica_minutes']:.0f}, {changes:.0f}/h"


def best_static(runs: Runs, load: str, seed: int) -> str:
    """The fewest replicas that reach the target, or half a point less than the most do; and those that reach what the
    tuner did."""
    most, tuner = runs.of(load, seed, f"static:{MOST_REPLICAS}"), runs.of(load, seed, "tuner")
    if most is None:
        return "-"
    goals = [TARGET if most["inside"] >= TARGET else most["inside"] - 0.005]
    if tuner is not None:
        goals.append(tuner["inside"])
    said = []
    for goal in goals:
        found = runs.fewest(load, seed, goal)
        text = f"none ({MOST_REPLICAS}: {percent(most['inside'])})"
        if found is not None:
            text = f"{found[0]}: {percent(found[1]['inside'])} @ {found[1]['replica_minutes']:.0f}"
        if text not in said:
            said.append(text)
    return "; ".join(said)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def print_policies(runs: Runs, loads: list[str], seeds: list[int], policies: list[str]) -> None:
    print("| load | seed | " + " | ".join(policies) + " |")
    print("| --- " * (2 + len(policies)) + "|")
    for load in loads:
        for seed in seeds:
            cells = [best_static(runs, load, seed) if p == "static" else cell(runs.of(load, seed, p)) for p in policies]
            print(f"| {load} | {seed} | " + " | ".join(cells) + " |", flush=True)


def print_settings(runs: Runs) -> None:
    """Pods of the grid are told objectives and law as those of the tuner are."""
    print("| load, replicas | from batchSize, kvCachePercent, token budget | best of the grid |")
    print("| --- | --- | --- |")
    for load, replicas in FIXED.items():
        own, grid = [], {}
        for start in STARTS:
            found = runs.of(load, 1, "settings", *options(start, replicas), name=f"settings {start}")
            own.append(f"{', '.join(map(str, start))}: {percent(found['inside']) if found else '-'}")
        for point in GRID:
            more = (*options(point, replicas), "--order", "late-last", "--time-budget")
            found = runs.of(load, 1, f"static:{replicas}", *more, name=f"grid {point}")
            if found is not None:
                grid[point] = found["inside"]
        best = max(grid, key=lambda point: grid[point], default=None)
        text = "-" if best is None else f"{', '.join(map(str, best))}: {percent(grid[best])} (of {len(grid)})"
        print(f"| {load}, {replicas} | {'; '.join(own)} | {text} |", flush=True)


def options(settings: tuple[int, int, int], replicas: int) -> tuple[str, ...]:
    batch, kv_percent, budget = map(str, settings)
    places = ("--batch-size", batch, "--max-batch-size", "256", "--kv-cache-percent", kv_percent)
    return (*places, "--token-budget", budget, "--replicas", str(replicas))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--loads", default=";".join(LOADS), help="names, separated by ;")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--settings", action="store_true", help="settings alone instead")
    parser.add_argument("--show", action="store_true", help="only print what there is")
    given = parser.parse_args()
    runs = Runs(given.traces, given.out, given.show)
    if given.settings:
        print_settings(runs)
    else:
        seeds = [int(seed) for seed in given.seeds.split(",")]
        print_policies(runs, given.loads.split(";"), seeds, given.policies.split(","))


if __name__ == "__main__":
    main()
