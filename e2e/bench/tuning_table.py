"""The tuner against other rules in simulation: share of requests inside the objectives, and what it cost.

    python -m e2e.bench.tuning_table TRACES OUT [--seeds 1,2] [--loads conv,flat] [--policies tuner,clairvoyant]

TRACES is a folder with the public traces (docs/tuning.md names them). Each run is one `busload simulate`; its numbers
go to OUT/LOAD-SEED-POLICY.json and are not computed again, so that an interrupted table goes on where it stopped.
Prints the table as Markdown.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONV = "azure2023_conv.csv"
LOADS: dict[str, list[str]] = {
    "conv, 8B on 24 GB": ["--trace", CONV, "--hardware", "tight", "--replicas", "4"],
    "flat, 8B on 24 GB": [
        *("--load", "flat:6", "--lengths", CONV, "--hardware", "tight", "--minutes", "40", "--replicas", "3"),
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
    "aibrix x6, 8B on 96 GB": ["--trace", "aibrix_8min_up_down.csv", "--copies", "6", "--replicas", "2"],
    "conv x3, 8B on 96 GB": ["--trace", CONV, "--copies", "3", "--replicas", "3"],
    "mooncake, 8B on 96 GB": [
        *("--trace", "mooncake_conversation.jsonl", "--max-sequence-length", "131072", "--ttft", "5"),
        *("--replicas", "4"),
    ],
}
POLICIES = ("tuner", "clairvoyant", "busy", "wva", "static:best")


def simulate(arguments: list[str], traces: Path, seed: int, policy: str) -> dict[str, Any]:
    """The summary of one run."""
    places = [str(traces / a) if a.endswith((".csv", ".jsonl")) else a for a in arguments]
    command = [sys.executable, "-m", "busload_operator.cli", "simulate", *places]
    command += ["--max-replicas", "12", "--seed", str(seed), "--policy", policy, "--json", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["policies"][0]
    for long in ("timeline", "limits_changes"):
        del found[long]
    return found


def cell(found: dict[str, Any]) -> str:
    changes = found["replica_changes_per_hour"] + found["settings_changes_per_hour"]
    which = f" ({found['policy'].split(' ')[0]})" if "best" in found["policy"] else f", {changes:.0f}/h"
    return f"{100 * found['inside']:.1f} @ {found['replica_minutes']:.0f}{which}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--loads", default=";".join(LOADS), help="names, separated by ;")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--show", action="store_true", help="only print what there is")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    policies = options.policies.split(",")
    print("| load | seed | " + " | ".join(policies) + " |")
    print("| --- " * (2 + len(policies)) + "|")
    for load in options.loads.split(";"):
        for seed in map(int, options.seeds.split(",")):
            cells = []
            for policy in policies:
                file = options.out / f"{load}-{seed}-{policy.replace(':', '_')}.json"
                if not file.exists() and not options.show:
                    file.write_text(json.dumps(simulate(LOADS[load], options.traces, seed, policy), indent=1))
                cells.append(cell(json.loads(file.read_text())) if file.exists() else "-")
            print(f"| {load} | {seed} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
