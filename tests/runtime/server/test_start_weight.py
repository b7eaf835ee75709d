"""What the start and the memory of `busload serve` hang on, without a clock: who imports what, and when."""

import subprocess
import sys
from pathlib import Path

import pytest
from live_server import running

from busload_runtime.engine.memory import private_bytes

# Imported by the HTTP process, or only for what a request asks for.
_NOT_IN_THE_ENGINE = (
    *("fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "typer", "prometheus_client", "asyncio", "jinja2"),
    *("tokenizers", "sentencepiece", "llguidance", "opentelemetry", "gguf", "torch", "yaml"),
)


def modules_after(code: str, *arguments: str) -> set[str]:
    """Names of the packages that are imported behind `code`."""
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-P", "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_an_engine_that_has_loaded_holds_no_library_of_texts_or_http(tiny_model: Path, executor: str) -> None:
    code = (
        "from busload_runtime.engine import process\n"
        "from busload_runtime.executors.create import create_executor\n"
        "executor = create_executor(sys.argv[1], sys.argv[2])"
    )
    assert not modules_after(code, executor, str(tiny_model)).intersection(_NOT_IN_THE_ENGINE)


def test_the_engine_starts_before_any_library_is_imported() -> None:
    from_elsewhere = modules_after("from busload_runtime.server import start") - modules_after("pass")
    assert {name for name in from_elsewhere if name not in sys.stdlib_module_names} == {"busload_runtime"}


def test_the_http_process_holds_no_numbers(tiny_model: Path) -> None:
    code = (
        "from busload_runtime.server import lifecycle\n"
        "from busload_runtime.model.text import load_text_model\n"
        "load_text_model(sys.argv[1])\n"
        "from busload_runtime.server.metrics import Metrics\n"
        "lifecycle.build_app(lifecycle.Service('m', Metrics('m'), None, None))\n"
        "assert 'pydantic.v1' not in sys.modules"
    )
    found = modules_after(code, str(tiny_model))
    assert {"fastapi", "tokenizers", "jinja2"} <= found
    assert not found.intersection(("numpy", "gguf", "llguidance", "torch"))


def test_both_processes_take_little_beside_weights_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_THREADS", "2")  # each has scratch memory of its own
    with running(tmp_path) as server:
        metrics = server.metrics()
        weights = metrics["busload_weight_bytes"]
        # The steps that are tried before the start write 256 tokens, and then the ends of 32 sequences.
        written = (256 + 32 * 32) * metrics["busload_kv_bytes_per_token"]
        http, engine = private_bytes(server.process.pid), private_bytes(server.engine_pid())
    taken = (http + engine - weights - written) / 1e6
    assert taken < 110, f"{http / 1e6:.0f} MB in the HTTP process, {engine / 1e6:.0f} MB in the engine"
