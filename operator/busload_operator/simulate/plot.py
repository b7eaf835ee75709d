"""An outcome over time, as SVG or PNG: batch, KV cache, queue, replicas, and when something was changed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busload_operator.simulate.compare import Entry
from busload_operator.simulate.hardware import SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png")
_READABLE_DECISIONS = 60
_LABELS = (
    "batch per pod\n(dashed: limit)",
    "KV cache, %\n(fullest pod)",
    "queue, seconds\n(dotted: objective)",
    "replicas\n(dotted: ready)",
)


def check(path: Path) -> None:
    """Raises `SetupError` when a plot could not be written, before hours are simulated."""
    if path.suffix not in SUFFIXES:
        raise SetupError(f"--plot {path}: the name must end with {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise SetupError(f"--plot {path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise SetupError("--plot needs matplotlib: pip install 'busload[simulate]'") from None


def plot(path: Path, title: str, entries: Sequence[Entry]) -> None:
    """One colour per policy; four panels over one time axis, in minutes; the tuner's decisions are named at the top.

    Equal outcomes give equal files.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "busload"
    figure = Figure(figsize=(11, 10), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(4, 1, sharex=True)
    for number, entry in enumerate(entries):
        _draw(panels, entry, f"C{number % 10}")
    objective = entries[0].outcome.objectives.time_to_first_token
    panels[2].axhline(objective, color="0.6", linewidth=0.8, linestyle=":")
    panels[2].set_yscale("symlog", linthresh=1.0)
    for panel, label in zip(panels, _LABELS, strict=True):
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("minutes")
    figure.suptitle(title, fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise SetupError(f"--plot {path}: {error.strerror}") from None


def _draw(panels: "Sequence[Axes]", entry: Entry, colour: str) -> None:
    summary, moments = entry.summary, entry.outcome.timeline
    minutes = [moment.at / 60 for moment in moments]
    label = f"{summary.policy}: {100 * summary.inside:.1f}% inside, {summary.replica_minutes:.0f} replica-min"
    panels[0].plot(minutes, [m.batch for m in moments], color=colour, linewidth=1, label=label)
    limits = [m.batch_limit for m in moments]
    panels[0].step(minutes, limits, where="post", color=colour, linewidth=0.8, linestyle="--")
    panels[1].plot(minutes, [m.kv_percent for m in moments], color=colour, linewidth=1)
    queue = [float("nan") if m.queue_seconds is None else m.queue_seconds for m in moments]
    panels[2].plot(minutes, queue, color=colour, linewidth=1)
    panels[3].step(minutes, [m.replicas for m in moments], where="post", color=colour, linewidth=1.2)
    panels[3].step(minutes, [m.ready for m in moments], where="post", color=colour, linewidth=0.8, linestyle=":")
    for at, _, _ in entry.outcome.limits_changes:
        for panel in panels:
            panel.axvline(at / 60, color=colour, linewidth=0.6, alpha=0.5)
    _name_decisions(panels[0], entry, colour)


def _name_decisions(panel: "Axes", entry: Entry, colour: str) -> None:
    """Each decision beside its time; of those too close to be read the first."""
    minutes_apart = entry.outcome.seconds / 60 / _READABLE_DECISIONS
    free_from = float("-inf")
    for decision in entry.outcome.decisions:
        at = decision.at / 60
        if at >= free_from:
            free_from = at + minutes_apart
            text = f"{decision.knob.value} {decision.before} → {decision.after}"
            across = panel.get_xaxis_transform()
            panel.text(at, 0.98, text, color=colour, fontsize=6, rotation=90, va="top", ha="right", transform=across)
