"""Start, limits while running, quiesce, drain, and an engine that dies: each with a process of its own."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import MEMORY, PATIENCE, START, LiveServer, events, eventually, running, text_of

LONG = {"prompt": "hello", "max_tokens": 60_000, "ignore_eos": True, "temperature": 0}


def limits(generation: int, **changes: int) -> dict[str, Any]:
    default = {
        "maxSequenceLength": 4096,
        "batchSize": 4,
        "kvCachePercent": 50,
        "tokenBudget": 256,
        "maxQueuedRequests": 64,
        "maxQueuedTokens": 100_000,
    }
    return {"generation": generation, "default": default | changes}


def swap(path: Path, content: str) -> None:
    """Replaces the file as the kubelet does: a symlink that is renamed over the old one."""
    target = path.with_name(f"{path.name}-{abs(hash(content))}")
    target.write_text(content)
    link = path.with_name("link.tmp")
    link.symlink_to(target)
    link.rename(path)


def start_fails(*flags: str) -> tuple[int, str]:
    """Exit code and the last line on stderr."""
    result = subprocess.run(
        [sys.executable, "-c", START, "serve", "--port=0", *flags], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr.strip().splitlines()[-1]


@pytest.fixture
def limits_file(tmp_path: Path) -> Path:
    path = tmp_path / "limits.json"
    swap(path, json.dumps(limits(3)))
    return path


def test_limits_change_while_requests_run_and_bad_ones_change_nothing(
    tiny_model: Path, tmp_path: Path, limits_file: Path
) -> None:
    # The reference executor takes its time over a step, so that the requests still run when the documents change.
    flags = (f"--model={tiny_model}", "--executor=reference", f"--limits-file={limits_file}", "--pod-name=pod-a")
    with running(tmp_path, *flags) as server:
        metrics = server.metrics()
        assert (metrics["busload_limits_generation"], metrics["busload_limit_batch_size"]) == (3, 4)
        results: list[httpx.Response] = []

        def ask(seed: int) -> None:
            body = {"prompt": "hello", "max_tokens": 1200, "ignore_eos": True, "seed": seed}
            results.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.level("vllm:num_requests_running") == 4)
        swap(limits_file, json.dumps(limits(4, batchSize=12, maxSequenceLength=8192)))
        eventually(lambda: server.metrics()["busload_limits_generation"] == 4)
        eventually(lambda: server.level("vllm:num_requests_running") > 4)
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 8192

        refused = ("{not json", json.dumps(limits(5, batchSize=0)), json.dumps(limits(6, maxSequenceLength=1_000_000)))
        for count, document in enumerate(refused, 1):
            swap(limits_file, document)
            eventually(lambda count=count: server.metrics()["busload_limits_errors_total"] == count)
        trial = limits(7) | {"trial": {"pod": "pod-a", "limits": limits(0, batchSize=2)["default"]}}
        swap(limits_file, json.dumps(trial))
        eventually(lambda: server.metrics()["busload_limits_generation"] == 7)
        assert server.metrics()["busload_limit_batch_size"] == 2
        limits_file.unlink()
        eventually(lambda: "cannot be read" in server.log)

        for thread in threads:
            thread.join()
        assert [r.json()["usage"]["completion_tokens"] for r in results] == [1200] * 12
        metrics = server.metrics()
        assert (metrics["busload_limits_generation"], metrics["busload_limits_errors_total"]) == (7, 3)
        assert "default.batchSize must be an integer" in server.log
        assert server.log.count("refused, generation") == 3


def test_objectives_and_law_change_under_one_generation(tiny_model: Path, tmp_path: Path, limits_file: Path) -> None:
    law = {"a": 0.002, "b": 0.0005, "c": 1e-6, "d": 0.0001}
    swap(limits_file, json.dumps(limits(3) | {"objectives": {"timeToFirstTokenMs": 0.001}, "stepLaw": law}))
    with running(tmp_path, f"--model={tiny_model}", f"--limits-file={limits_file}") as server:
        first, between = ('{objective="time_to_first_token"}', '{objective="inter_token_latency"}')

        def shown(name: str) -> tuple[float, float]:
            metrics = server.metrics()
            return metrics[f"busload_objective_{name}{first}"], metrics[f"busload_objective_{name}{between}"]

        assert shown("seconds") == (pytest.approx(1e-6), 0)
        assert server.metrics()['busload_step_law_seconds{coefficient="d"}'] == 0.0001
        server.complete(prompt=[9, 8, 7], max_tokens=5, ignore_eos=True)
        assert (shown("requests_total"), shown("misses_total")) == ((1, 0), (1, 0)), "no token comes in a microsecond"

        objectives = {"timeToFirstTokenMs": 3_600_000, "interTokenLatencyMs": 3_600_000}
        swap(limits_file, json.dumps(limits(3) | {"objectives": objectives}))
        eventually(lambda: shown("seconds") == (3600, 3600))
        server.complete(prompt=[9, 8, 7], max_tokens=5, ignore_eos=True)
        assert (shown("requests_total"), shown("misses_total")) == ((2, 1), (1, 0))
        metrics = server.metrics()
        assert [metrics[f'busload_step_law_seconds{{coefficient="{name}"}}'] for name in "abcd"] == [0, 0, 0, 0]
        assert metrics["busload_finished_prompt_tokens_total"] == 6
        assert metrics["busload_finished_kv_token_steps_total"] == 2 * 5 * (3 + 2.5)
        assert "limits: objectives and step law applied: {'objectives'" in server.log
        swap(limits_file, json.dumps(limits(3) | {"stepLaw": law | {"d": -1}}))
        eventually(lambda: "stepLaw.d must be a number from 0 to 3600, got -1" in server.log)
        assert shown("seconds") == (3600, 3600)


def test_sigusr1_then_sigterm_lose_nothing(tiny_model: Path, tmp_path: Path) -> None:
    flags = (f"--model={tiny_model}", "--max-sequence-length=16384", "--drain-seconds=600")
    with running(tmp_path, *flags) as server:
        body = {**LONG, "max_tokens": 10_000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            got = [next(stream)]
            server.process.send_signal(signal.SIGUSR1)
            eventually(lambda: server.http.get("/health/ready").status_code == 503)
            assert server.http.get("/health/live").status_code == 200
            quiesced = server.complete(prompt="hello", max_tokens=1)
            assert (quiesced.status_code, quiesced.headers["connection"]) == (200, "close")

            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "draining" in server.log)
            refused = server.complete(prompt="hello", max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert "retry-after" in refused.headers
            got += list(stream)
        assert got[-1] == "[DONE]"
        assert len(text_of(got)) == 10_000
        assert server.wait() == 0


def test_a_connection_kept_before_quiescing_serves_one_more_request_while_draining(
    tiny_model: Path, tmp_path: Path
) -> None:
    # A stream that outlasts the quiescing began with a head that let the client keep its connection: the client's next
    # request comes on it, to a process that is leaving, and neither a 503 nor a closed connection may meet it.
    with running(tmp_path, f"--model={tiny_model}", "--max-sequence-length=16384") as server:
        port = httpx.URL(server.url).port
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def post(client: http.client.HTTPConnection, **body: Any) -> http.client.HTTPResponse:
            client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return client.getresponse()

        stream = post(kept, **{**LONG, "max_tokens": 10_000, "stream": True})
        assert stream.getheader("connection") != "close"
        stream.readline()
        server.process.send_signal(signal.SIGUSR1)
        eventually(lambda: "quiescing" in server.log)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "draining" in server.log)
        new = post(http.client.HTTPConnection("127.0.0.1", port, timeout=60), prompt="hello", max_tokens=1)
        assert new.status == 503
        assert b"[DONE]" in stream.read()
        promised = post(kept, prompt="hello", max_tokens=1)
        assert (promised.status, promised.getheader("connection")) == (200, "close")
        promised.read()
        assert server.wait() == 0


def test_what_outlives_the_drain_time_ends_with_an_error_event(tiny_model: Path, tmp_path: Path) -> None:
    flags = (f"--model={tiny_model}", "--max-sequence-length=65536", "--drain-seconds=0.5")
    with (
        running(tmp_path, *flags) as server,
        server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        stream = events(response)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        last = list(stream)[-1]
        assert isinstance(last, dict)
        assert "shut down" in last["error"]["message"]
        assert server.wait() == 0


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_lost_engine_ends_streams_and_the_process(tiny_model: Path, tmp_path: Path, fault: signal.Signals) -> None:
    flags = (f"--model={tiny_model}", "--max-sequence-length=65536", "--engine-timeout=2", "--batch-size=1")
    with running(tmp_path, *flags) as server:
        waiting: list[httpx.Response] = []
        queued = threading.Thread(
            target=lambda: waiting.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE))
        )
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            stream = events(response)
            next(stream)
            queued.start()
            eventually(lambda: server.level("vllm:num_requests_waiting") == 1)
            os.kill(server.engine_pid(), fault)
            last = list(stream)[-1]
        queued.join()
        assert isinstance(last, dict)
        assert last["error"]["code"] == "engine_error"
        assert (waiting[0].status_code, waiting[0].json()["error"]["code"]) == (500, "engine_error")
        assert server.wait() == 1
        assert ("killed by SIGKILL" if fault == signal.SIGKILL else "no step in 2 s") in server.log


def test_the_engine_does_not_outlive_a_killed_server(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, f"--model={tiny_model}") as server:
        pid = server.engine_pid()
        server.process.kill()
        server.wait()
        eventually(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())


def test_health_is_there_before_the_model(tiny_model: Path, tmp_path: Path, smol: LiveServer) -> None:
    assert smol.http.get("/health/startup").json() == {"status": "ok"}
    assert smol.http.get("/health/ready").status_code == 200
    assert smol.http.get("/health/live").status_code == 200
    assert "loading" in smol.log


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model=/nowhere/model.gguf",), "/nowhere/model.gguf"),
        (("--executor=abacus",), "abacus"),
        (("--max-sequence-length=1000000",), "1000000"),
        (("--memory=1" + "0" * 30,), "--memory"),
        (("--host=" + "a" * 70,), "--host"),
        (("--served-model-name=a\nb",), "--served-model-name"),
        (("--served-model-name=\udcff",), "--served-model-name"),
    ],
)
def test_wrong_flags_end_with_one_line_and_exit_code_2(tiny_model: Path, flags: tuple[str, ...], said: str) -> None:
    code, line = start_fails(f"--model={tiny_model}", *flags)
    assert code == 2, line
    assert said in line


def test_a_file_that_never_answers_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for flags in ((f"--model={fifo}",), (f"--model={tiny_model}", f"--limits-file={fifo}")):
        code, line = start_fails(*flags)
        assert (code, "regular file" in line) == (2, True), line


def test_whatever_lies_at_the_limits_file_the_server_lives_and_takes_the_next_document(
    tiny_model: Path, tmp_path: Path, limits_file: Path
) -> None:
    def fifo(path: Path) -> None:
        os.mkfifo(path)

    def deep(path: Path) -> None:
        path.write_text("[" * 60_000)

    def huge(path: Path) -> None:
        path.write_text("x" * 10_000_000)

    def not_utf8(path: Path) -> None:
        path.write_bytes(b"\xff")

    def endless(path: Path) -> None:
        path.symlink_to("/dev/zero")

    wanted = {fifo: "egular file", deep: "too deeply", huge: "larger than", not_utf8: "UTF-8", endless: "egular file"}
    with running(tmp_path, f"--model={tiny_model}", f"--limits-file={limits_file}") as server:
        for generation, (make, said) in enumerate(wanted.items(), 10):
            before = len(server.log)
            limits_file.unlink()
            make(limits_file)
            eventually(lambda before=before, said=said: said in server.log[before:])
            assert len(server.log) - before < 1000
            swap(limits_file, json.dumps(limits(generation)))
            eventually(lambda n=generation: server.metrics()["busload_limits_generation"] == n)


def test_a_full_disk_under_the_log_loses_no_request(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, f"--model={tiny_model}", "--max-sequence-length=4096") as server:
        port = server.url.rpartition(":")[2]
    with Path("/dev/full").open("w") as full:
        command = [
            sys.executable,
            "-c",
            START,
            "serve",
            f"--port={port}",
            f"--model={tiny_model}",
            f"--memory={MEMORY}",
        ]
        process = subprocess.Popen([*command, "--max-sequence-length=4096"], stderr=full)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            eventually(lambda: _ready(http))
            body = {**LONG, "max_tokens": 1000, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                stream = events(response)
                got = [next(stream)]
                process.send_signal(signal.SIGTERM)
                got += list(stream)
        assert got[-1] == "[DONE]"
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_pause_of_the_server_is_no_silence_of_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    flags = (f"--model={tiny_model}", "--max-sequence-length=65536", "--engine-timeout=1")
    with running(tmp_path, *flags) as server:
        body = {**LONG, "max_tokens": 6000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            got = [next(stream)]
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(3)
            server.process.send_signal(signal.SIGCONT)
            got += list(stream)
        assert (got[-1], len(text_of(got))) == ("[DONE]", 6000)
        assert server.http.get("/health/live").status_code == 200


def test_modules_in_the_working_directory_are_not_the_engine_s(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    console_script = [sys.executable, "-P", "-c", START, "serve", "--port=0", f"--model={tiny_model}", "--memory=1"]
    result = subprocess.run(console_script, capture_output=True, text=True, timeout=60)
    assert "both processes need" in result.stderr  # said by the engine, which thus has started


# Runs `busload serve` and sends it a signal when the module named first on the command line is about to be imported.
# Shells start what runs in the background with SIGINT ignored, tests among it; a terminal does not.
_SIGNALLED_AT_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module, number = sys.argv.pop(1), int(sys.argv.pop(1))
class Finder:
    def find_spec(name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.parametrize("module", ["busload_runtime.contract", "busload_runtime.server.options", "uvicorn", "jinja2"])
def test_a_signal_during_the_imports_ends_it_and_the_engine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, number: signal.Signals, code: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    flags = ["serve", "--port=0", f"--model={tiny_model}"]
    command = [sys.executable, "-c", _SIGNALLED_AT_IMPORT + START, module, str(int(number)), *flags]
    # Returns when the engine, too, has closed stderr.
    result = subprocess.run(command, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (code, b"")
    assert list(tmp_path.iterdir()) == []
