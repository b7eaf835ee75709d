"""The engine as a process: its messages, its exit codes, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hashing_executor import expected_text

from busload_runtime.contract import Limits
from busload_runtime.engine.messages import (
    Abort,
    ApplyLimits,
    Failed,
    FromEngine,
    LimitsApplied,
    LimitsRefused,
    Ready,
    Stats,
    Submit,
    TextLoaded,
    TokenOut,
    Tokens,
)
from busload_runtime.engine.wire import FrameReader, FrameWriter

LIMITS = Limits(1024, 4, 90, 64, 16, 4096)
SCRIPT = Path(__file__).with_name("engine_process.py")


class Peer:
    """The HTTP process's side."""

    def __init__(self, fault: str, *flags: str) -> None:
        self.socket, theirs = socket.socketpair()
        program = ["-m", "busload_runtime.engine.process"] if fault == "real" else [str(SCRIPT), fault]
        with theirs:
            command = [sys.executable, *program, "--socket", str(theirs.fileno()), "--model", "tiny.gguf"]
            command += ["--limits", json.dumps(LIMITS.to_json()), *flags]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=(theirs.fileno(),))
        self.reader: FrameReader[FromEngine] = FrameReader(FromEngine)
        self.stats: list[Stats] = []

    def send(self, message: msgspec.Struct) -> None:
        self.socket.sendall(FrameWriter().frame(message))

    def messages(self, seconds: float) -> Iterator[FromEngine]:
        """All that comes within the time."""
        deadline = time.monotonic() + seconds
        while True:
            for message in self.reader.take(1):
                yield message
                break
            else:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    data = self.socket.recv(1 << 16)
                except TimeoutError:
                    return
                if not data:
                    return
                self.reader.feed(data)

    def receive(self, seconds: float = 60.0) -> FromEngine:
        """The next message that is not Stats."""
        for message in self.messages(seconds):
            if not isinstance(message, Stats):
                return message
            self.stats.append(message)
        raise TimeoutError("the engine said nothing")

    def ready(self) -> Ready:
        self.send(TextLoaded())
        message = self.receive()
        assert isinstance(message, Ready), message
        return message

    def tokens(self, *requests: int) -> dict[int, list[TokenOut]]:
        """All that comes until these requests have ended."""
        outputs: dict[int, list[TokenOut]] = {request: [] for request in requests}
        while not all(out and out[-1].finish_reason for out in outputs.values()):
            message = self.receive()
            assert isinstance(message, Tokens), message
            for output in message.tokens:
                outputs[output.request_id].append(output)
        return outputs

    def wait_stats(self, condition: Callable[[Stats], bool], seconds: float = 60.0) -> Stats:
        for message in self.messages(seconds):
            if isinstance(message, Stats) and condition(message):
                return message
        raise TimeoutError("no such statistics came")

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stderr is not None
            self.process.stderr.close()


Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    peers: list[Peer] = []

    def starter(fault: str = "none", *flags: str) -> Peer:
        peers.append(Peer(fault, *flags))
        return peers[-1]

    yield starter
    for peer in peers:
        peer.close()


def apply(generation: int, **changes: int) -> ApplyLimits:
    values = {name: getattr(LIMITS, name) for name in Limits.__slots__} | changes
    return ApplyLimits(generation=generation, **values)


def test_serves_requests_and_reports_them(start: Start) -> None:
    peer = start("none", "--memory", str(1 << 32))
    ready = peer.ready()
    assert (ready.block_size, ready.context_length, ready.memory_budget_bytes) == (16, 4096, 1 << 32)
    for request in range(6):
        peer.send(Submit(request, [request, 2, 3], 20, seed=request, submitted_at=time.monotonic()))
    outputs = peer.tokens(*range(6))
    for request, output in outputs.items():
        assert [token.token for token in output] == expected_text([request, 2, 3], 20, request)
        assert [token.finish_reason for token in output] == [None] * 19 + ["length"]
    assert outputs[5][0].queue_seconds > 0  # the batch limit is 4
    stats = peer.wait_stats(lambda stats: stats.running == stats.waiting == 0 and stats.generated_tokens == 120)
    assert stats.kv_blocks_free == stats.kv_blocks
    assert stats.bytes_moved > stats.steps * ready.weight_bytes
    assert stats.busy_seconds > 0
    assert stats.batch_seconds > 0


def test_idle_engine_speaks_each_second_and_burns_no_processor(start: Start) -> None:
    peer = start()
    peer.ready()
    first = peer.wait_stats(lambda stats: True)
    ticks = os.sysconf("SC_CLK_TCK")

    def processor() -> float:
        fields = Path(f"/proc/{peer.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    before = processor()
    later = peer.wait_stats(lambda stats: stats.clock > first.clock + 2)
    assert later.steps == first.steps
    assert processor() - before < 0.5


def test_abort_frees_at_once(start: Start) -> None:
    peer = start("slow")
    peer.ready()
    for request in range(5):
        peer.send(Submit(request, [1] * 20, 900))
    peer.wait_stats(lambda stats: stats.running == 4 and stats.waiting == 1)
    for request in (4, 0, 1, 2, 3, 77):
        peer.send(Abort(request))
    stats = peer.wait_stats(lambda stats: stats.running == stats.waiting == 0)
    assert stats.kv_blocks_free == stats.kv_blocks
    assert stats.queued_prompt_tokens == 0


def test_limits_change_while_requests_run(start: Start) -> None:
    peer = start("slow", "--memory", str(1 << 32))
    peer.ready()
    before = peer.wait_stats(lambda stats: True).kv_blocks
    for request in range(8):
        peer.send(Submit(request, [request] * 30, 150, seed=3))
    peer.wait_stats(lambda stats: stats.running == 4)
    peer.send(apply(7, batch_size=8, kv_cache_percent=20))
    answer = peer.receive()
    while isinstance(answer, Tokens):
        answer = peer.receive()
    assert answer == LimitsApplied(7)
    peer.wait_stats(lambda stats: stats.running == 8 and stats.kv_blocks < before)
    stats = peer.wait_stats(lambda stats: stats.running == stats.waiting == 0)
    assert stats.generated_tokens == 8 * 150


def test_impossible_limits_are_refused_with_numbers(start: Start) -> None:
    peer = start()
    peer.ready()
    peer.send(apply(3, max_sequence_length=8192))
    answer = peer.receive()
    assert answer == LimitsRefused(
        3, "maxSequenceLength 8192 is above the model's context length 4096: set it to at most 4096"
    )
    peer.send(Submit(1, [5], 2))
    assert peer.tokens(1)[1][-1].finish_reason == "length"


def test_a_request_that_cannot_run_is_answered(start: Start) -> None:
    peer = start()
    peer.ready()
    peer.send(Submit(1, [5] * 1024, 2))
    peer.send(Submit(2, [5, -1], 2))
    peer.send(Submit(3, [], 2))
    outputs = peer.tokens(1, 2, 3)
    errors = [outputs[request][0].error or "" for request in (1, 2, 3)]
    assert "1024 tokens and maxSequenceLength is 1024" in errors[0]
    assert "from 0 to 49999" in errors[1]
    assert "at least 1 prompt token" in errors[2]


@pytest.mark.parametrize(
    ("fault", "flags", "code", "text"),
    [
        ("load", (), 2, "tiny.gguf: scripted model error"),
        ("real", (), 2, "tiny.gguf"),
        ("real", ("--executor", "nope"), 2, "executor 'nope' is unknown; allowed: reference"),
        ("memory", (), 2, "not enough memory to load tiny.gguf"),
        (
            "none",
            ("--memory", "2000000"),
            2,
            "no memory is left for the KV cache: 2 MiB budget (--memory) - 1 MiB weights",
        ),
        ("step", (), 1, "the engine failed: FloatingPointError: scripted fault"),
    ],
)
def test_failures_say_why_in_one_line(start: Start, fault: str, flags: tuple[str, ...], code: int, text: str) -> None:
    peer = start(fault, *flags)
    peer.send(TextLoaded())
    if fault == "step":
        assert isinstance(peer.receive(), Ready)
        peer.send(Submit(1, [5], 50))
    message = peer.receive()
    while isinstance(message, Tokens):
        message = peer.receive()
    assert isinstance(message, Failed)
    assert text in message.error
    assert "\n" not in message.error
    assert peer.process.wait(60) == code


def test_a_message_it_cannot_read_ends_it_with_a_reason(start: Start) -> None:
    peer = start()
    peer.ready()
    peer.socket.sendall(b"\x11\0\0\0\x93 no such message")
    message = peer.receive()
    assert isinstance(message, Failed)
    assert "the engine failed: " in message.error
    assert peer.process.wait(60) == 1


def test_signals_are_ignored_and_the_closed_socket_ends_it(start: Start) -> None:
    peer = start("slow")
    peer.ready()
    peer.send(Submit(1, [5], 20))
    for number in (signal.SIGTERM, signal.SIGINT):
        peer.process.send_signal(number)
    assert len(peer.tokens(1)[1]) == 20
    peer.socket.close()
    assert peer.process.wait(60) == 0


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_ends_when_its_parent_is_killed(when: str) -> None:
    """A parent that only starts the engine and is killed: nobody closes the other end of the socket, which is here."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        flags = ["--socket", str(theirs.fileno()), "--model", "m", "--limits", json.dumps(LIMITS.to_json())]
        code = (
            "import subprocess, sys, time; "
            f"p = subprocess.Popen([sys.executable, {str(SCRIPT)!r}, 'none', *{flags!r}], close_fds=False); "
            "print(p.pid, flush=True); time.sleep(600)"
        )
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=(theirs.fileno(),)) as parent:
            assert parent.stdout is not None
            engine = int(parent.stdout.readline())
            if when == "serving":
                ours.sendall(FrameWriter().frame(TextLoaded()))
                ours.settimeout(60)
                assert ours.recv(4)  # Ready
            else:  # it waits for TextLoaded, or has not come so far
                _wait(lambda: _ignores(engine, signal.SIGTERM), "the engine does not start")
            parent.kill()
        _wait(lambda: "\nState:\tZ" in _status(engine), "the engine outlives its parent")


def _ignores(process: int, number: signal.Signals) -> bool:
    mask = next((line for line in _status(process).splitlines() if line.startswith("SigIgn:")), "SigIgn: 0")
    return bool(int(mask.split()[1], 16) >> number - 1 & 1)


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def _status(process: int) -> str:
    try:
        return Path(f"/proc/{process}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def test_it_ends_with_0_when_the_other_end_is_closed_before_it_looks(start: Start) -> None:
    peer = start()
    peer.socket.close()
    assert peer.process.wait(20) == 0


@pytest.mark.parametrize(
    ("change", "flags", "said"),
    [
        ({"batchSize": 0}, (), "default.batchSize must be an integer from 1 to 4096, got 0"),
        ({}, ("--socket", "999"), "--socket 999: Bad file descriptor"),
    ],
)
def test_bad_flags(start: Start, change: dict[str, int], flags: tuple[str, ...], said: str) -> None:
    peer = start("none", "--limits", json.dumps(LIMITS.to_json() | change), *flags)
    assert peer.process.wait(20) == 2
    assert peer.process.stderr is not None
    assert said in peer.process.stderr.read()
