"""`busload serve`: one model behind the OpenAI API."""

from pathlib import Path
from typing import Annotated

import typer

from busload_operator.cli._signals import end_quietly_until_handled

_LIMITS = "Limits (change while running with --limits-file)"
_OBJECTIVES = "Objectives (a limits file has its own)"
_TIMES = "Time limits of a request"
_TENANTS = "Tenants"
_LOG = "Log and traces"
_PROCESS = "Process"


def command(
    model: Annotated[
        str,
        typer.Option(
            help="What to serve: bundled:NAME (a model from a Python package), the path of a GGUF file or, with "
            "--executor cuda, of a Hugging Face folder."
        ),
    ] = "bundled:smollm2-135m-instruct",
    served_model_name: Annotated[
        str, typer.Option(help="Name in the API.", show_default="the name or file name of --model")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port, 1 to 65535; 0 takes a free one.")] = 8000,
    executor: Annotated[
        str,
        typer.Option(
            help="What computes: cpu (C++, compiled on first use), cuda (torch and Triton, on a GPU), or reference "
            "(numpy, slow, exact)."
        ),
    ] = "cpu",
    kv_precision: Annotated[
        str | None,
        typer.Option(
            metavar="int8|fp8|bf16|fp32",
            help="Numbers of the KV cache: int8 or fp32 with cpu, fp32 with reference, int8, fp8 or bf16 with cuda. "
            "fp32 takes almost four times the memory of int8, and nothing is rounded.",
            show_default="int8, fp32 with reference",
        ),
    ] = None,
    weight_precision: Annotated[
        str | None,
        typer.Option(
            metavar="int8|fp8|bf16",
            help="What cuda makes of the model's matrices at load. Other executors take them as the file has them.",
            show_default="int8",
        ),
    ] = None,
    allow_int4: Annotated[
        bool,
        typer.Option(
            "--allow-int4",
            help="Take a checkpoint with 4-bit weights (GPTQ, AWQ): only where an evaluation of its answers passed.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cuda|cpu",
            help="Where cuda computes. cpu is plain torch in fp32 instead of the kernels, to test without a GPU: slow.",
            show_default="cuda",
        ),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Memory the runtime may use in all.",
            show_default="the container's limit, else what is free",
        ),
    ] = None,
    limits_file: Annotated[
        Path | None,
        typer.Option(
            help="JSON limits document, watched: an edit applies between two steps and loses no request. "
            "Replaces the six limits flags."
        ),
    ] = None,
    pod_name: Annotated[
        str, typer.Option(envvar="POD_NAME", help="Own name, to find out whether a trial in the limits file is ours.")
    ] = "",
    max_sequence_length: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, help="Prompt plus output tokens of one request.")
    ] = 2048,
    batch_size: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, help="Requests computed together in one step.")
    ] = 8,
    kv_cache_percent: Annotated[
        int,
        typer.Option(
            rich_help_panel=_LIMITS, help="Share of the memory left after weights that holds the KV cache, 1 to 100."
        ),
    ] = 90,
    token_budget: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_LIMITS,
            help="Tokens computed in one step: smaller keeps streams smooth, larger reads prompts in fewer steps.",
            show_default="256 + batch size",
        ),
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, help="Requests that may wait; one more gets 429.")
    ] = 256,
    max_queued_tokens: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, help="Prompt tokens that may wait; more get 429.")
    ] = 262144,
    time_to_first_token: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_OBJECTIVES,
            metavar="SECONDS",
            help="When not all can make it, those that still can go before those that cannot.",
            show_default="order of arrival",
        ),
    ] = None,
    inter_token_latency: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_OBJECTIVES,
            metavar="SECONDS",
            help="Between two tokens of a request: long prompts are computed in pieces that leave time for it.",
            show_default="only the token budget cuts prompts",
        ),
    ] = None,
    queue_timeout: Annotated[
        float,
        typer.Option(
            rich_help_panel=_TIMES,
            help="Seconds to the first token: 429 at once when the queue is known to take longer, 408 when it did.",
        ),
    ] = 300.0,
    request_timeout: Annotated[
        float,
        typer.Option(
            rich_help_panel=_TIMES,
            help="Seconds to the last token; then 408, or an error event in a stream. "
            "A client asks for less with the header X-Request-Timeout.",
        ),
    ] = 3600.0,
    token_timeout: Annotated[
        float,
        typer.Option(rich_help_panel=_TIMES, help="Seconds from one token to the next; then as above."),
    ] = 120.0,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_TENANTS,
            help="File with a line NAME:SHA256 or NAME:SHA256:WEIGHT for each key, watched. Requests then need a key, "
            "/health and /metrics do not, and the key's name is the tenant.",
            show_default="no key is needed",
        ),
    ] = None,
    tenant_header: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TENANTS,
            help="Header that names the tenant of a request; set by a gateway that drops what clients put there. "
            "Tenants take turns by tokens, fill at most half the queue each and share no cached prefix. Empty: none. "
            "With API keys it does not count.",
        ),
    ] = "X-Busload-Tenant",
    log_format: Annotated[
        str, typer.Option(rich_help_panel=_LOG, metavar="json|text", help="Of the line that each request leaves.")
    ] = "json",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", rich_help_panel=_LOG, help="Let that line hold the prompt's text.")
    ] = False,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            rich_help_panel=_LOG,
            help="OpenTelemetry collector that gets a span for each request, such as http://127.0.0.1:4318/v1/traces. "
            "Needs the extra otel.",
            show_default="no traces",
        ),
    ] = "",
    drain_seconds: Annotated[
        float,
        typer.Option(rich_help_panel=_PROCESS, help="After SIGTERM: time for running and queued requests to finish."),
    ] = 30.0,
    engine_timeout: Annotated[
        float,
        typer.Option(
            rich_help_panel=_PROCESS,
            help="Seconds without a finished step while requests wait, after which the engine counts as dead.",
        ),
    ] = 60.0,
) -> None:
    """Serve one model through the OpenAI API with continuous batching.

    Answers /v1/chat/completions, /v1/completions and /v1/models; /metrics for Prometheus;
    /health/startup, /health/ready and /health/live for probes.

    SIGTERM drains: new requests get 503, running ones finish, exit code 0. SIGUSR1 quiesces: not ready any more,
    still serving. Exit code 1: the engine died. Exit code 2: a flag, the model or the limits are wrong.

    Example: busload serve --model bundled:smollm2-135m-instruct --batch-size 16
    """
    end_quietly_until_handled()
    from busload_runtime.contract import Limits, default_token_budget
    from busload_runtime.server.deadline import Timeouts
    from busload_runtime.server.options import ServeOptions
    from busload_runtime.server.start import serve

    options = ServeOptions(
        model=model,
        served_model_name=served_model_name or _name_of(model),
        host=host,
        port=port,
        executor=executor,
        kv_precision=kv_precision,
        weight_precision=weight_precision,
        device=device,
        allow_int4=allow_int4,
        memory=memory,
        limits_file=limits_file,
        pod_name=pod_name,
        limits=Limits(
            max_sequence_length=max_sequence_length,
            batch_size=batch_size,
            kv_cache_percent=kv_cache_percent,
            token_budget=default_token_budget(batch_size) if token_budget is None else token_budget,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
        ),
        drain_seconds=drain_seconds,
        engine_timeout=engine_timeout,
        time_to_first_token=time_to_first_token,
        inter_token_latency=inter_token_latency,
        timeouts=Timeouts(queue=queue_timeout, request=request_timeout, token=token_timeout),
        api_keys_file=api_keys_file,
        tenant_header=tenant_header,
        log_format=log_format,
        log_prompts=log_prompts,
        otlp_endpoint=otlp_endpoint,
    )
    raise typer.Exit(serve(options))


def _name_of(model: str) -> str:
    """`bundled:NAME` is NAME, `/models/FILE.gguf` is FILE."""
    prefix, colon, name = model.partition(":")
    return name if colon and prefix == "bundled" else Path(model).stem
