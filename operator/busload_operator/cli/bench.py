"""`busload bench`: how fast an OpenAI-compatible server is, seen from a client."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_LOAD = "Load (one of --concurrency, --rate, --trace; default --concurrency 1,8,32)"
_SHAPE = "Shape of a request"
_TRACE = "Trace"
_RESULT = "Result"


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class PromptKind(StrEnum):
    IDS = "ids"
    WORDS = "words"


class Connections(StrEnum):
    KEEP_ALIVE = "keep-alive"
    FRESH = "fresh"


def command(
    model: Annotated[str, typer.Option(help="Name of the model in the server's API.")],
    url: Annotated[
        str, typer.Option(help="Base URL of the API, up to and including /v1.")
    ] = "http://127.0.0.1:8000/v1",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token; empty: none.", show_default=False)
    ] = "",
    endpoint: Annotated[Endpoint, typer.Option(help="Which endpoint to ask.")] = Endpoint.COMPLETIONS,
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            rich_help_panel=_LOAD,
            help="Closed loop: N clients, each sends its next request when the last one ended. One level per N.",
        ),
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            metavar="R,R,...",
            rich_help_panel=_LOAD,
            help="Open loop: R requests per second on average (Poisson), however slow the answers are.",
        ),
    ] = "",
    requests: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_LOAD, help="Requests per level.", show_default="4 per client, or what --seconds allows"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_LOAD, help="Send no request later than this in a level.", show_default="with --rate 60"
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(rich_help_panel=_LOAD, help="Requests before the first level, not measured.")
    ] = 1,
    seed: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_LOAD,
            help="Of prompts, lengths and arrivals.",
            show_default="another one each time; printed",
        ),
    ] = None,
    retry: Annotated[
        int, typer.Option(rich_help_panel=_LOAD, help="Times to send a request again after a 429 and its Retry-After.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(rich_help_panel=_LOAD, help="Seconds until a request counts as failed.")
    ] = 600,
    connections: Annotated[
        Connections, typer.Option(rich_help_panel=_LOAD, help="Reuse connections, or open one for each request.")
    ] = Connections.KEEP_ALIVE,
    input_tokens: Annotated[
        str,
        typer.Option(
            rich_help_panel=_SHAPE,
            help="Prompt length: 128; uniform 64:256; lognormal:MEDIAN:SIGMA[:MAX], as lognormal:200:0.8:2000.",
        ),
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(rich_help_panel=_SHAPE, help="Tokens to generate, as above; an end-of-text token is ignored.")
    ] = "128",
    prompt: Annotated[
        PromptKind | None,
        typer.Option(
            rich_help_panel=_SHAPE,
            help="Random token ids, exactly as long as asked for; or words, about one token each, for servers and "
            "endpoints that take text only.",
            show_default="ids; words for --endpoint chat",
        ),
    ] = None,
    token_ids: Annotated[
        str,
        typer.Option(
            metavar="FIRST:LAST", rich_help_panel=_SHAPE, help="Ids to draw prompts from; inside the vocabulary."
        ),
    ] = "1000:30000",
    shared_prefix_tokens: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SHAPE, help="Each prompt begins with a beginning of this length that others have too."
        ),
    ] = 0,
    prefixes: Annotated[int, typer.Option(rich_help_panel=_SHAPE, help="Different shared beginnings.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_TRACE,
            help="CSV or JSON lines with arrival times and lengths (Azure, Mooncake, BurstGPT, AIBrix, LLMServingSim, "
            "or columns seconds, input_tokens, output_tokens). With --concurrency or --rate only its lengths are used.",
        ),
    ] = None,
    speed: Annotated[float, typer.Option(rich_help_panel=_TRACE, help="2 replays twice as fast.")] = 1.0,
    limit: Annotated[int | None, typer.Option(rich_help_panel=_TRACE, help="Use the first so many rows.")] = None,
    longest: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_TRACE, help="Leave out rows of more tokens, input plus output, than the server takes."
        ),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        typer.Option(rich_help_panel=_RESULT, help="Seconds to the first token within which a request counts as good."),
    ] = None,
    slo_itl: Annotated[
        float | None,
        typer.Option(rich_help_panel=_RESULT, help="Mean seconds between its tokens within which it counts as good."),
    ] = None,
    json: Annotated[
        str,
        typer.Option(
            "--json",
            metavar="FILE|-",
            rich_help_panel=_RESULT,
            help="Write all percentiles as JSON; - for standard output (the table then goes to standard error).",
        ),
    ] = "",
    records: Annotated[
        bool,
        typer.Option("--records", rich_help_panel=_RESULT, help="Put every request into the JSON, with all arrivals."),
    ] = False,
    allow_errors: Annotated[
        bool, typer.Option("--allow-errors", rich_help_panel=_RESULT, help="Exit with 0 although requests failed.")
    ] = False,
) -> None:
    """Measure an OpenAI-compatible server (busload, vLLM, llama.cpp, ...) as its clients see it.

    Streams completions of random prompts nobody has seen before and prints, per level of load: tokens per second, time
    to first token (TTFT), gaps between tokens, mean time per output token (TPOT), each request's worst gap, and what
    failed, by kind. In an open loop all latencies count from the time a request should have been sent, so a server
    that falls behind shows it.

    Ctrl-C ends the measurement and prints what there is; SIGTERM lets running requests finish first. Exit code 1: a
    request failed. Exit code 2: a flag is wrong.

    Examples:

    - busload bench --model smollm2-135m-instruct

    - busload bench --model M --concurrency 32 --seconds 60 --input-tokens lognormal:300:0.9:1500 --json out.json

    - busload bench --model M --rate 2,5,10 --slo-ttft 2 --slo-itl 0.1

    - busload bench --model M --shared-prefix-tokens 1024 --prefixes 4 --input-tokens 64

    - busload bench --model M --trace azure.csv --speed 0.5 --limit 1000 --longest 2048

    - busload bench --url http://host:8080/v1 --model M --endpoint chat --connections fresh
    """
    try:
        from busload_runtime.bench.client import Target
        from busload_runtime.bench.lengths import parse_lengths
        from busload_runtime.bench.options import BenchOptions, numbers, parse_ids, whole_numbers
        from busload_runtime.bench.run import main
        from busload_runtime.bench.summary import Goals
    except ModuleNotFoundError as error:
        typer.echo(f"busload bench needs {error.name}; install it with: pip install 'busload[bench]'", err=True)
        raise typer.Exit(2) from None
    chat = endpoint is Endpoint.CHAT
    try:
        first_id, last_id = parse_ids(token_ids, "--token-ids")
        options = BenchOptions(
            target=Target(
                url=url.rstrip("/"),
                model=model,
                chat=chat,
                api_key=api_key,
                timeout=timeout,
                retries=retry,
                fresh_connections=connections is Connections.FRESH,
            ),
            input_lengths=parse_lengths(input_tokens, "--input-tokens"),
            output_lengths=parse_lengths(output_tokens, "--output-tokens"),
            concurrencies=whole_numbers(concurrency, "--concurrency"),
            rates=numbers(rate, "--rate"),
            requests=requests,
            seconds=seconds,
            warmup=warmup,
            seed=int.from_bytes(os.urandom(4)) if seed is None else seed,
            words=prompt is PromptKind.WORDS or (prompt is None and chat),
            first_id=first_id,
            last_id=last_id,
            prefix_tokens=shared_prefix_tokens,
            prefixes=prefixes,
            trace=trace,
            speed=speed,
            limit=limit,
            longest=longest,
            goals=Goals(slo_ttft, slo_itl),
            json=json,
            records=records,
            allow_errors=allow_errors,
        )
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(main(options))
