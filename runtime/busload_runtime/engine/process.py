"""The engine process: `python -m busload_runtime.engine.process`, started by the HTTP process as its child.

Loads the model, sizes the pool, computes one token, says `Ready` and then serves messages between steps. It ignores
SIGTERM, SIGINT and SIGUSR1: those may reach the whole process group, and it is the HTTP process that drains and then
closes the socket. Exit codes: 0 the socket was closed; 1 a step failed; 2 the model, the memory or the flags cannot
work. Before 1 and 2 it sends `Failed` with one line.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache, partial
from typing import TYPE_CHECKING

from busload_runtime.contract import Limits, LimitsError, Pace, StepLaw, parse_limits, parse_pace
from busload_runtime.engine.grammar import Compile, Grammars
from busload_runtime.engine.link import Link, LinkClosed
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import (
    GRAMMAR_BYTES_PER_TOKEN,
    LimitsImpossible,
    MemoryPlan,
    device_budget,
    find_budget,
    measure_overhead,
    private_bytes,
    room_for_weights,
)
from busload_runtime.engine.messages import (
    Abort,
    ApplyLimits,
    Failed,
    LimitsApplied,
    LimitsRefused,
    Ready,
    Submit,
    TextLoaded,
    ToEngine,
    Tokens,
)
from busload_runtime.executors.contract import Executor
from busload_runtime.executors.create import create_executor
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.freed_memory import return_freed_memory
from busload_runtime.model.errors import ModelError
from busload_runtime.model.load import load_token_bytes

if TYPE_CHECKING:
    from busload_runtime.grammar.matcher import Vocabulary

BUSY_STATS_SECONDS = 0.1
IDLE_STATS_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1  # prctl(2)

LoadExecutor = Callable[[str, str], Executor]
"""(executor name, model source) -> executor. Raises `ModelError` or `ExecutorError`."""


LoadVocabulary = Callable[[str], "Vocabulary"]
"""Model source -> what grammars need to know of its tokens. Raises `ModelError`."""


def main(
    arguments: Sequence[str] | None = None,
    load: LoadExecutor | None = None,
    load_vocabulary: LoadVocabulary | None = None,
) -> int:
    options = _parse(arguments)
    gc.disable()  # hundred thousands of objects come and stay; on again when they are there
    if load is None:
        load, load_vocabulary = partial(_load, options), _load_vocabulary
    _end_with_parent()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked by the HTTP process until they can be ignored here
    try:
        link = Link(socket.socket(fileno=options.socket))
    except OSError as error:
        print(f"engine: --socket {options.socket}: {error.strerror or error}", file=sys.stderr)
        return 2
    except LinkClosed:
        return 0
    try:
        return _run(link, options, load, load_vocabulary)
    except LinkClosed:
        return 0
    finally:
        link.close()


def _end_with_parent() -> None:
    """Has this process killed when the HTTP process dies: nobody reads what it loads. Linux only; elsewhere it notices
    between two steps."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _load(options: argparse.Namespace, name: str, source: str) -> Executor:
    room = room_for_weights(find_budget(options.memory))
    return create_executor(
        name,
        source,
        options.kv_precision,
        room,
        device=options.device,
        weight_precision=options.weight_precision,
        allow_int4=options.allow_int4,
    )


def _load_vocabulary(source: str) -> "Vocabulary":
    from busload_runtime.grammar.matcher import Vocabulary  # here: most servers never see a grammar

    vocabulary = Vocabulary(*load_token_bytes(source))
    return_freed_memory()
    return vocabulary


def _run(link: Link, options: argparse.Namespace, load: LoadExecutor, load_vocabulary: LoadVocabulary | None) -> int:
    try:
        engine, ready = start(
            options.model,
            options.executor,
            options.memory,
            options.limits,
            load,
            options.pace,
            load_vocabulary,
            link.wake,
            options.plan_by_own_law,
            partial(_until_text_is_loaded, link),
        )
    except (ModelError, ExecutorError, LimitsImpossible) as error:
        link.send(Failed(_one_line(error)))
        return 2
    except MemoryError:
        link.send(
            Failed(f"not enough memory to load {options.model}: raise the memory limit or choose a smaller model")
        )
        return 2
    except Exception as error:
        link.send(Failed(f"the engine could not start: {type(error).__name__}: {_one_line(error)}"))
        _print_traceback()
        return 1
    link.send(ready)
    try:
        serve(link, engine)
    except LinkClosed:
        return 0
    except Exception as error:
        link.send(Failed(f"the engine failed: {type(error).__name__}: {_one_line(error)}"))
        _print_traceback()
    return 1


def start(
    source: str,
    executor_name: str,
    memory: int | None,
    limits: Limits,
    load: LoadExecutor,
    pace: Pace = Pace(),
    load_vocabulary: LoadVocabulary | None = None,
    wake: Callable[[], None] = lambda: None,
    plans_by_own_law: bool = False,
    until_measurable: Callable[[], None] = lambda: None,
) -> tuple[Engine, Ready]:
    """Loads, plans the memory, warms up. Without `load_vocabulary` it refuses constrained requests. `until_measurable`
    returns when the HTTP process has the memory that it needs.

    Raises `ModelError`, `ExecutorError` or `LimitsImpossible`."""
    started = time.monotonic()
    before_load = private_bytes()
    executor = load(executor_name, source)
    grammars = None if load_vocabulary is None else Grammars(_compiler(load_vocabulary, source), wake)
    return_freed_memory()
    until_measurable()
    if (device := executor.device_memory) is None:
        tables = 0 if grammars is None else executor.vocab_size * GRAMMAR_BYTES_PER_TOKEN
        budget, overhead = find_budget(memory), measure_overhead(before_load, executor.weight_bytes) + tables
    else:
        budget, overhead = device_budget(memory, device.name, device.num_bytes), device.taken
    plan = MemoryPlan(
        budget=budget,
        weights=executor.weight_bytes,
        overhead=overhead,
        block_size=executor.block_size,
        bytes_per_block=executor.bytes_per_block,
        context_length=executor.context_length,
        activations=executor.activation_bytes,
    )
    if device is not None:
        print(f"engine: {plan.describe(limits)}", file=sys.stderr, flush=True)
    engine = Engine(executor, plan, limits, pace=pace, grammars=grammars, plans_by_own_law=plans_by_own_law)
    engine.warm_up()
    probed = engine.probe()
    # What lives now lives for ever: keep the garbage collector from walking over it between steps. It does not look for
    # the few hundred cycles that loading has left either: that takes as long as ten steps.
    gc.freeze()
    gc.enable()
    return engine, Ready(
        context_length=executor.context_length,
        vocab_size=executor.vocab_size,
        block_size=executor.block_size,
        bytes_per_block=executor.bytes_per_block,
        weight_bytes=executor.weight_bytes,
        memory_budget_bytes=budget.num_bytes,
        copy_bandwidth=executor.copy_bandwidth,
        load_seconds=time.monotonic() - started,
        step_law=None if probed is None else astuple(probed.law),
        probed_batch=0 if probed is None else probed.batch,
    )


def _compiler(load_vocabulary: LoadVocabulary, source: str) -> Compile:
    """Compiles grammars over the vocabulary, which is read for the first of them: in one thread, beside the steps."""

    @cache
    def vocabulary() -> "Vocabulary":
        return load_vocabulary(source)

    return lambda text: vocabulary().compile(text)


def serve(link: Link, engine: Engine) -> None:
    """Messages, then one step, for ever. Ends by `LinkClosed`; sleeps in the socket while there is no work."""
    last_stats = -IDLE_STATS_SECONDS
    changed = True
    while True:
        idle = not engine.has_work
        due = last_stats + IDLE_STATS_SECONDS - time.monotonic()
        messages = link.receive(max(0.0, due) if idle and not changed else 0.0)
        for message in messages:
            _handle(link, engine, message)
        if refused := engine.compiled():
            link.send(Tokens(refused))
        changed = changed or bool(messages)
        if engine.has_work:
            if outputs := engine.step():
                link.send(Tokens(outputs))
            changed = True
        since = time.monotonic() - last_stats
        if since >= IDLE_STATS_SECONDS or (changed and (since >= BUSY_STATS_SECONDS or not engine.has_work)):
            link.send(engine.stats())
            last_stats = time.monotonic()
            changed = False


def _until_text_is_loaded(link: Link) -> None:
    """Nothing but `TextLoaded` comes before `Ready` was said."""
    while TextLoaded() not in link.receive(IDLE_STATS_SECONDS):
        pass


def _handle(link: Link, engine: Engine, message: ToEngine) -> None:
    outputs = []
    match message:
        case Submit():
            outputs = engine.submit(message)
        case Abort(request_id):
            engine.abort(request_id)
        case ApplyLimits():
            try:
                outputs = engine.apply(_limits(message), _pace(message))
            except LimitsImpossible as error:
                link.send(LimitsRefused(message.generation, str(error)))
            else:
                link.send(LimitsApplied(message.generation))
    if outputs:
        link.send(Tokens(outputs))


def _limits(message: ApplyLimits) -> Limits:
    return Limits(
        max_sequence_length=message.max_sequence_length,
        batch_size=message.batch_size,
        kv_cache_percent=message.kv_cache_percent,
        token_budget=message.token_budget,
        max_queued_requests=message.max_queued_requests,
        max_queued_tokens=message.max_queued_tokens,
    )


def _pace(message: ApplyLimits) -> Pace:
    law = None if message.step_law is None else StepLaw(*message.step_law)
    return Pace(message.time_to_first_token, message.inter_token_latency, law)


def _print_traceback() -> None:
    """Of the failure that was just told: a log that takes nothing must neither hide it nor keep this process alive.

    By then the HTTP process has seen the socket's message, and it ends what does not end by itself.
    """
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m busload_runtime.engine.process",
        description="Engine process of `busload serve`, which starts it.",
    )
    parser.add_argument(
        "--socket", type=int, required=True, metavar="FD", help="descriptor of a stream socket to the HTTP process"
    )
    parser.add_argument("--model", required=True, help="bundled:NAME, FILE.gguf or a Hugging Face folder")
    parser.add_argument("--executor", default="reference", help="who computes the steps (default: %(default)s)")
    parser.add_argument("--kv-precision", help="of the KV cache (default: the executor's)")
    parser.add_argument("--weight-precision", help="of the weights (cuda; default: the executor's)")
    parser.add_argument("--allow-int4", action="store_true", help="take 4-bit checkpoints (cuda)")
    parser.add_argument("--device", help="where cuda computes: cuda or cpu (default: cuda)")
    parser.add_argument(
        "--memory", type=int, metavar="BYTES", help="memory budget of both processes (default: cgroup limit, else free)"
    )
    parser.add_argument(
        "--limits",
        type=_limits_argument,
        required=True,
        metavar="JSON",
        help="the limits to start with: an object of the six fields of a limits document's `default`",
    )
    parser.add_argument(
        "--pace",
        type=_pace_argument,
        default=Pace(),
        metavar="JSON",
        help="what is known of a limits document's `objectives` and `stepLaw`: an object of these two",
    )
    parser.add_argument(
        "--plan-by-own-law",
        action="store_true",
        help="plan steps by the step law that is found here, because nobody will tell one",
    )
    return parser.parse_args(arguments)


def _limits_argument(text: str) -> Limits:
    try:
        return parse_limits(json.dumps({"generation": 0, "default": json.loads(text)})).default
    except (LimitsError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pace_argument(text: str) -> Pace:
    try:
        return parse_pace(json.loads(text))
    except (LimitsError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
