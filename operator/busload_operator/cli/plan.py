"""`busload plan`: does it fit, and how fast can it be at best, before anything runs."""

from pathlib import Path
from typing import Annotated

import typer

_WHAT = "What"
_LIMITS = "Limits"
_MACHINE = "Machine"
_GPU = "GPU"


def command(
    service: Annotated[
        Path | None,
        typer.Option("--service", "-f", rich_help_panel=_WHAT, help="Manifest of an InferenceService (YAML or JSON)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="bundled:NAME|FILE.gguf",
            help="Model, instead of the manifest's. Only the header of a file is read.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MACHINE, help="What one replica may use, like 768Mi.", show_default="the manifest's"
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=4096, rich_help_panel=_MACHINE, help="CPUs of a replica.", show_default="2"),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_MACHINE,
            metavar="GB/S",
            help="Memory bandwidth in 10^9 bytes per second.",
            show_default="measured on this machine",
        ),
    ] = None,
    inter_token_latency: Annotated[
        str | None,
        typer.Option(rich_help_panel=_WHAT, help="Objective, like 50ms.", show_default="the manifest's, else 100ms"),
    ] = None,
    max_sequence_length: Annotated[
        int | None,
        typer.Option(
            min=16,
            max=16_777_216,
            rich_help_panel=_LIMITS,
            help="Tokens of the longest request, prompt and output.",
            show_default="the upper bound, else 8192",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, max=4096, rich_help_panel=_LIMITS, help="Requests in one step.", show_default="8"),
    ] = None,
    kv_cache_percent: Annotated[
        int | None,
        typer.Option(
            min=1, max=100, rich_help_panel=_LIMITS, help="Share of what is left, in percent.", show_default="90"
        ),
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            min=16, max=1_048_576, rich_help_panel=_LIMITS, help="Tokens in one step.", show_default="256 + batch"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(rich_help_panel=_MACHINE, help="cpu or gpu.", show_default="the manifest's, else cpu"),
    ] = None,
    weight_bits: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=32,
            rich_help_panel=_GPU,
            help="Bits of a weight, scales included.",
            show_default="8 and a scale for each row",
        ),
    ] = None,
    kv_bits: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=32,
            rich_help_panel=_GPU,
            help="Bits of a key or value, scales included.",
            show_default="8 and a scale for each token and head",
        ),
    ] = None,
    overhead: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MACHINE, help="Memory beside the model.", show_default="cpu: by vocabulary; gpu: 1.5Gi"
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Numbers as JSON instead of a table.")] = False,
) -> None:
    """Work out on paper whether a model fits a replica's memory, and the least time between two tokens.

    A replica's memory holds the weights once, the activations of one step, the processes themselves, and in what is
    left the KV cache: keys and values of every token of every request in flight. Length x batch is paid from that
    share, so the longer requests may be, the fewer run at once.

    Each step reads all weights from memory, however many requests share it. Weight bytes / memory bandwidth is
    therefore the least time between two tokens: no batch limit and no number of replicas goes below it.

    The operator plans with the same figures and says the same in the condition Feasible of a service.

    Examples:

    - busload plan -f service.yaml

    - busload plan --model bundled:smollm2-135m-instruct --memory 768Mi

    - busload plan --model chat.gguf --memory 24Gi --device gpu --bandwidth 4300 --batch-size 64

    Exit codes: 0 it fits; 1 it does not, and the last line says what would; 2 a wrong option or file.
    """
    from busload_operator.plan.command import Options, PlanError, run

    if device not in (None, "cpu", "gpu"):
        typer.echo(f"--device {device!r} must be cpu or gpu", err=True)
        raise typer.Exit(2)
    options = Options(
        service=service,
        model=model,
        memory=memory,
        threads=threads,
        max_sequence_length=max_sequence_length,
        batch_size=batch_size,
        kv_cache_percent=kv_cache_percent,
        token_budget=token_budget,
        inter_token_latency=inter_token_latency,
        bandwidth=bandwidth,
        device=device,
        weight_bits=weight_bits,
        kv_bits=kv_bits,
        overhead=overhead,
    )
    try:
        text, possible = run(options, json_output)
    except PlanError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(text)
    raise typer.Exit(0 if possible else 1)
