"""Medians, ratios within each repeat, and the bars they are measured by."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from busload_runtime.bench.outcome import Level
from busload_runtime.bench.render import duration
from busload_runtime.bench.summary import Summary, summarise, summary_to_json

OURS = "busload"
# For 128 tokens in and out on two cores: at least so many times a peer's output tokens per second ...
_RATE_BARS = {
    "openvino": {1: 3.0, 8: 2.0, 32: 1.7},
    "llama.cpp": {1: 3.5, 8: 5.0, 32: 6.0},
}
# ... and at most so many times its median time to first token.
_TTFT_BARS = {"openvino": {1: 1.0, 8: 0.8, 32: 0.8}}
_BAR_LENGTHS = (128, 128)


@dataclass(frozen=True)
class Measured:
    """One server at one concurrency in one repeat."""

    server: str
    concurrency: int
    repeat: int
    summary: Summary


@dataclass(frozen=True)
class Ratio:
    """Ours over the peer's, each pair from the same repeat. `figure`: "tok/s" (higher is better) or "TTFT" (lower)."""

    peer: str
    concurrency: int
    figure: str
    values: tuple[float, ...]
    bar: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def passed(self) -> bool | None:
        """None where there is no bar."""
        if self.bar is None:
            return None
        return self.median >= self.bar if self.figure == "tok/s" else self.median <= self.bar

    def __str__(self) -> str:
        spread = f"{min(self.values):.2f}..{max(self.values):.2f}"
        text = f"{self.figure:>5} {self.median:5.2f}x {self.peer:<9} ({spread})"
        if self.bar is None:
            return text
        sign = ">=" if self.figure == "tok/s" else "<="
        return f"{text}   bar {sign} {self.bar:g}x   {'pass' if self.passed else 'FAIL'}"


def measured(server: str, repeat: int, level: Level) -> Measured:
    assert level.concurrency is not None
    return Measured(server, level.concurrency, repeat, summarise(level))


def ratios(all_measured: Sequence[Measured], input_tokens: int, output_tokens: int) -> list[Ratio]:
    """Per peer and concurrency that both have in some repeat. Bars only for the lengths they are set for."""
    found = {(m.server, m.concurrency, m.repeat): m.summary for m in all_measured}
    barred = (input_tokens, output_tokens) == _BAR_LENGTHS
    result = []
    for concurrency in sorted({m.concurrency for m in all_measured}):
        for peer in dict.fromkeys(m.server for m in all_measured if m.server != OURS):
            repeats = sorted({m.repeat for m in all_measured})
            keys = [((OURS, concurrency, repeat), (peer, concurrency, repeat)) for repeat in repeats]
            pairs = [(found[ours], found[theirs]) for ours, theirs in keys if ours in found and theirs in found]
            if not pairs:
                continue
            rates = tuple(ours.output_rate / theirs.output_rate for ours, theirs in pairs)
            firsts = tuple(_first(ours) / _first(theirs) for ours, theirs in pairs)
            for figure, values, bars in (("tok/s", rates, _RATE_BARS), ("TTFT", firsts, _TTFT_BARS)):
                bar = bars.get(peer, {}).get(concurrency) if barred else None
                result.append(Ratio(peer, concurrency, figure, values, bar))
    return result


def _first(summary: Summary) -> float:
    return summary.time_to_first_token.at(50)


def report(all_measured: Sequence[Measured], found: Sequence[Ratio], what: dict[str, str]) -> str:
    """A block per concurrency: each server's medians over the repeats (and their range), then the ratios."""
    lines = []
    for concurrency in sorted({m.concurrency for m in all_measured}):
        lines.append(f"concurrency {concurrency}")
        for server in dict.fromkeys(m.server for m in all_measured):
            rows = [m.summary for m in all_measured if (m.server, m.concurrency) == (server, concurrency)]
            if not rows:
                continue
            rates = [row.output_rate for row in rows]
            firsts = [_first(row) for row in rows]
            each = [row.time_per_output_token.at(50) for row in rows]
            lines.append(
                f"  {server:<10} {what[server]:<18} {statistics.median(rates):7.1f} tok/s "
                f"({min(rates):.1f}..{max(rates):.1f})   TTFT p50 {duration(statistics.median(firsts)):>6} "
                f"({duration(min(firsts))}..{duration(max(firsts))})   TPOT {duration(statistics.median(each)):>6}"
            )
        lines += [f"    {ratio}" for ratio in found if ratio.concurrency == concurrency]
    return "\n".join(lines)


def document(all_measured: Sequence[Measured], found: Sequence[Ratio]) -> dict[str, Any]:
    return {
        "measured": [vars(m) | {"summary": summary_to_json(m.summary)} for m in all_measured],
        "ratios": [asdict(ratio) | {"median": ratio.median, "passed": ratio.passed} for ratio in found],
    }
