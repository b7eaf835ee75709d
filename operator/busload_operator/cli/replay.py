"""`busload replay`: the tuning core over a recording, offline."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from busload_operator.tuning.recording import Replayed


def command(
    file: Annotated[Path, typer.Argument(help="A recording, as the operator writes it.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Print no decisions; end with 1 at the first result that differs.")
    ] = False,
) -> None:
    """Run the tuning core over what an operator recorded, and print what it decides: a line of JSON for each decision
    made and each outcome known.

    The same code gives the same lines, byte for byte. Other code shows what it would have decided from the same
    observations, up to where its decisions differ: from there on the recorded pods did not follow them. The last line,
    on standard error, says whether the results are those that were recorded, and if not, from which line on.

    An operator records with BUSLOAD_RECORD_DIRECTORY set: a file for each service, NAMESPACE.NAME.jsonl, and the one
    before it, NAMESPACE.NAME.1.jsonl. A recording holds counters, limits and the names of pods, no text of any request.

    Exit codes: 0; 1 with --verify when a result differs; 2 when the file cannot be read.
    """
    from busload_operator.tuning.recording import RecordingError, decisions, replay

    counted = _Counted()
    try:
        with file.open(encoding="utf-8") as lines:
            steps = counted.follow(replay(lines, str(file)), stop=verify)
            for text in decisions(steps):
                if not verify:
                    typer.echo(text)
    except (RecordingError, UnicodeDecodeError, OSError) as error:
        typer.echo(str(error) if isinstance(error, RecordingError) else f"{file}: cannot be read: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(counted.summary(str(file)), err=True)
    raise typer.Exit(1 if verify and counted.differs is not None else 0)


class _Counted:
    """Counts steps as they pass and remembers the first whose result is not the recorded one."""

    def __init__(self) -> None:
        self.steps = 0
        self.differs: Replayed | None = None

    def follow(self, steps: "Iterator[Replayed]", stop: bool) -> "Iterator[Replayed]":
        for step in steps:
            self.steps += 1
            if self.differs is None and not step.agrees:
                self.differs = step
                if stop:
                    return
            yield step

    def summary(self, file: str) -> str:
        if self.differs is None:
            return f"{file}: {self.steps} steps, every result as it was recorded"
        result, line = self.differs.result, self.differs.line
        found = f"{result.bottleneck}, {result.replicas} replicas, {result.limits}"
        if result.decision is not None:
            found += f", decision {result.decision.id}: {result.decision.message}"
        return f"{file}: line {line}: the result differs from the recorded one; it is now {found}"
