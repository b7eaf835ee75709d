"""`busload crd`: the CustomResourceDefinition of InferenceService."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; standard output if not given.")
    ] = None,
) -> None:
    """Print the CustomResourceDefinition of InferenceService, ready for `kubectl apply -f -`."""
    from busload_operator.api.crd import render

    text = render()
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"--output {output}: {error.strerror}; name a file in a folder that exists", err=True)
        raise typer.Exit(2) from None
