"""`busload simulate`: hours of traffic in minutes, on the code that pods run."""

from pathlib import Path
from typing import Annotated

import typer

_LOAD = "Load"
_SERVICE = "Service"
_SURROUNDINGS = "Surroundings"
_RESULT = "Result"


def command(
    trace: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_LOAD,
            help="Requests from a file: Azure, Mooncake (with prefix reuse), AIBrix, BurstGPT, or JSON lines with "
            "seconds, input_tokens, output_tokens. ServeGen's rates (window_start_s, requests_per_s) need --lengths.",
        ),
    ] = None,
    load: Annotated[
        str,
        typer.Option(
            rich_help_panel=_LOAD,
            help="Without --trace: flat:RATE or diurnal:LOW:HIGH, in requests per second (diurnal: one day in "
            "--minutes, with four bursts).",
        ),
    ] = "flat:10",
    minutes: Annotated[
        float | None,
        typer.Option(rich_help_panel=_LOAD, help="Length of the load.", show_default="60; a trace: all of it"),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            rich_help_panel=_LOAD,
            metavar="PROMPT:OUTPUT|FILE",
            help="Lengths of a synthetic load: medians of lognormal ones, or a trace whose pairs are drawn from.",
        ),
    ] = "600:150",
    cv: Annotated[
        float, typer.Option(rich_help_panel=_LOAD, help="Coefficient of variation of gaps (synthetic; 1 is Poisson).")
    ] = 1.0,
    copies: Annotated[
        int, typer.Option(rich_help_panel=_LOAD, help="Each request of a trace this many times, --spread apart.")
    ] = 1,
    spread: Annotated[
        float, typer.Option(rich_help_panel=_LOAD, help="Seconds within which the copies of a request arrive.")
    ] = 5.0,
    speed: Annotated[float, typer.Option(rich_help_panel=_LOAD, help="A trace's time divided by this.")] = 1.0,
    rates: Annotated[
        str,
        typer.Option(
            rich_help_panel=_LOAD,
            metavar="MODEL:DAY:PEAK",
            help="What of a ServeGen file: which model, which day (from 1), and requests per second at its busiest.",
        ),
    ] = "m-small:1:10",
    hardware: Annotated[
        str,
        typer.Option(
            rich_help_panel=_SERVICE,
            help="What a pod runs on: roomy (8B, 500,000 KV tokens), tight (8B, 41,408), cpu (135M, two cores). Sets "
            "law, KV tokens, objectives and starting limits, which the options below replace.",
        ),
    ] = "roomy",
    law: Annotated[
        str, typer.Option(rich_help_panel=_SERVICE, metavar="a=,b=,c=,d=", help="Step law, in seconds.")
    ] = "",
    kv_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=_SERVICE, help="Tokens the KV cache holds at 100%.")
    ] = None,
    ttft: Annotated[float | None, typer.Option(rich_help_panel=_SERVICE, help="Objective, seconds.")] = None,
    itl: Annotated[
        float | None,
        typer.Option(rich_help_panel=_SERVICE, help="Objective for the mean gap between tokens, seconds."),
    ] = None,
    replicas: Annotated[int, typer.Option(rich_help_panel=_SERVICE, help="At the start.")] = 2,
    min_replicas: Annotated[int, typer.Option(rich_help_panel=_SERVICE, help="bounds.replicas.min")] = 1,
    max_replicas: Annotated[int, typer.Option(rich_help_panel=_SERVICE, help="bounds.replicas.max")] = 12,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=_SERVICE, help="At the start.")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(rich_help_panel=_SERVICE, help="bounds.batchSize.max", show_default="as at the start")
    ] = None,
    token_budget: Annotated[int | None, typer.Option(rich_help_panel=_SERVICE, help="Tokens per step.")] = None,
    kv_cache_percent: Annotated[int | None, typer.Option(rich_help_panel=_SERVICE, help="At the start.")] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(rich_help_panel=_SERVICE, help="Prompt plus output tokens of one request.")
    ] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(rich_help_panel=_SERVICE, help="Per pod; one more is refused.")
    ] = None,
    order: Annotated[
        str,
        typer.Option(
            rich_help_panel=_SERVICE,
            help="Who waits is admitted fifo, or late-last: those whose first token comes too late anyway behind the "
            "others.",
            show_default="late-last for tuner, settings, clairvoyant; else fifo",
        ),
    ] = "",
    time_budget: Annotated[
        bool | None,
        typer.Option(
            "--time-budget/--no-time-budget",
            rich_help_panel=_SERVICE,
            help="Prompts beside decodes get only what the inter-token objective leaves time for, by the step law.",
            show_default="on for tuner, settings, clairvoyant; else off",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="What decides; may be given several times. tuner, settings (tuner, replicas fixed), static:N, "
            "static:best, waiting[:N], busy[:PERCENT], concurrency[:PERCENT], wva, wva-tokens, clairvoyant.",
            show_default="tuner",
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All of them, beside those given with --policy.")] = False,
    target: Annotated[
        float,
        typer.Option(help="Share of requests inside the objectives that tuner and static:best are to reach, 0 to 1."),
    ] = 0.99,
    jobs: Annotated[int, typer.Option(help="Policies run in so many processes beside each other.")] = 1,
    router: Annotated[
        str, typer.Option(rich_help_panel=_SURROUNDINGS, help="least-requests, round-robin or least-tokens.")
    ] = "least-requests",
    startup: Annotated[
        float, typer.Option(rich_help_panel=_SURROUNDINGS, help="Seconds from asking for a pod to its being ready.")
    ] = 60.0,
    scrape: Annotated[float, typer.Option(rich_help_panel=_SURROUNDINGS, help="Seconds between scrapes.")] = 5.0,
    scrape_delay: Annotated[
        float, typer.Option(rich_help_panel=_SURROUNDINGS, help="Seconds from a scrape to the decision on it.")
    ] = 0.0,
    noise: Annotated[
        float | None,
        typer.Option(rich_help_panel=_SURROUNDINGS, help="Scatter of step times, as a share.", show_default="0.15"),
    ] = None,
    front_end: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_SURROUNDINGS,
            help="Seconds of a request outside the engine until its first token arrives: HTTP, tokenizer.",
            show_default="0",
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SURROUNDINGS,
            metavar="KIND:POD@AT+SECONDS",
            help="silent, frozen, reset or restart of a pod (0: the oldest), as silent:0@600+120. May be repeated.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(rich_help_panel=_SURROUNDINGS, help="Equal seeds, equal results.")] = 1,
    json_file: Annotated[
        str, typer.Option("--json", rich_help_panel=_RESULT, metavar="FILE|-", help="All numbers and the timeline.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(rich_help_panel=_RESULT, help="Batch, KV, queue, replicas over time: .svg or .png.")
    ] = None,
    decisions: Annotated[
        bool, typer.Option("--decisions", rich_help_panel=_RESULT, help="List the tuner's decisions.")
    ] = False,
) -> None:
    """Simulate a service: many pods, each running the runtime's own scheduler on a fitted step law, under a load, with
    the operator's tuner or another policy deciding. Prints what share of requests met the objectives, at what cost.

    Exit code 2: an option, a file or a policy cannot be used; one line on stderr says which and what is allowed.

    Examples:

    busload simulate --load flat:10 --policy tuner --decisions

    busload simulate --trace azure2023_conv.csv --copies 5 --compare --plot conv.svg

    busload simulate --trace servegen_rates.csv --rates m-small:1:60 --lengths azure2023_conv.csv --minutes 120

    busload simulate --hardware tight --replicas 3 --policy settings --batch-size 4 --kv-cache-percent 40
    """
    from busload_operator.simulate import command as simulate
    from busload_operator.simulate.hardware import SetupError

    options = simulate.Options(
        trace=trace,
        load=load,
        minutes=minutes,
        lengths=lengths,
        cv=cv,
        copies=copies,
        spread=spread,
        speed=speed,
        rates=rates,
        hardware=hardware,
        law=law,
        kv_tokens=kv_tokens,
        time_to_first_token=ttft,
        inter_token_latency=itl,
        replicas=replicas,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        batch_size=batch_size,
        max_batch_size=max_batch_size,
        token_budget=token_budget,
        kv_cache_percent=kv_cache_percent,
        max_sequence_length=max_sequence_length,
        max_queued_requests=max_queued_requests,
        order=order,
        time_budget=time_budget,
        router=router,
        startup=startup,
        scrape=scrape,
        scrape_delay=scrape_delay,
        noise=noise,
        front_end=front_end,
        faults=tuple(fault or ()),
        seed=seed,
        policies=tuple(policy or ()),
        compare=compare,
        target=target,
        jobs=jobs,
        json_file=json_file,
        plot=plot,
        decisions=decisions,
    )
    try:
        simulate.run(options)
    except SetupError as error:
        typer.echo(f"busload simulate: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
