"""`busload plan` as a user meets it: exit codes, the numbers, and what is said about wrong input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from busload_operator.cli import build_app

MODEL = ("--model", "bundled:smollm2-135m-instruct")
SERVICE = """
apiVersion: busload.dev/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {source: %s}
  objectives: {interTokenLatency: 50ms}
  bounds: {maxSequenceLength: {min: 1024, max: 8192}}
  resources: {requests: {cpu: "1", memory: %s}, limits: {memory: %s}}
"""


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["plan", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def manifest(folder: Path, memory: str, source: str = "{bundled: smollm2-135m-instruct}") -> str:
    path = folder / "service.yaml"
    path.write_text(SERVICE % (source, memory, memory), encoding="utf-8")
    return str(path)


def test_it_fits() -> None:
    code, text = plan(*MODEL, "--memory", "768Mi", "--bandwidth", "10")
    assert code == 0
    tokens = json.loads(plan(*MODEL, "--memory", "768Mi", "--bandwidth", "10", "--json")[1])["memory"]["kvCacheTokens"]
    for part in ("92.0 MiB", f"{tokens:,} tokens", "It fits.", "at least             9.6ms", "8 requests at once"):
        assert part in text


def test_numbers_as_json() -> None:
    code, text = plan(*MODEL, "--memory", "768Mi", "--bandwidth", "10", "--json", "--batch-size", "16")
    found = json.loads(text)
    memory = found["memory"]
    assert code == 0
    assert memory["leftBytes"] == memory["budgetBytes"] - sum(
        memory[name] for name in ("weightBytes", "activationBytes", "overheadBytes")
    )
    assert found["speed"]["leastInterTokenSeconds"] == pytest.approx(96_436_224 / 10e9)
    assert found["whatFits"]["longestSequenceAtBatchSize"] * 16 <= memory["kvCacheTokens"]


def test_what_would_fit_when_it_does_not() -> None:
    code, text = plan(*MODEL, "--memory", "320Mi", "--bandwidth", "10")
    assert code == 1
    line = text.strip().splitlines()[-1]
    assert "SequenceDoesNotFit" in line
    enough = int(line.partition("raise the memory limit to at least ")[2].partition("Mi")[0])
    assert 320 < enough < 500
    assert plan(*MODEL, "--memory", f"{enough}Mi", "--bandwidth", "10")[0] == 0
    assert plan(*MODEL, "--memory", f"{enough - 1}Mi", "--bandwidth", "10")[0] == 1


def test_an_objective_below_the_floor() -> None:
    code, text = plan(*MODEL, "--memory", "2Gi", "--bandwidth", "10", "--inter-token-latency", "5ms")
    assert code == 1
    assert "ObjectiveBelowBandwidthFloor" in text


def test_bandwidth_is_measured_when_it_is_not_given() -> None:
    code, text = plan(*MODEL, "--memory", "2Gi", "--json", "--threads", "1")
    speed = json.loads(text)["speed"]
    assert code == 0
    assert speed["bandwidthSource"] == "measured here, 1 thread"
    assert 1e8 < speed["bandwidthBytesPerSecond"] < 1e13


def test_a_manifest(tmp_path: Path) -> None:
    code, text = plan("-f", manifest(tmp_path, "400Mi"), "--bandwidth", "10")
    assert code == 0
    assert "It fits up to a maxSequenceLength of " in text
    assert "The operator starts it with maxSequenceLength " in text
    assert "objective 50ms" in text
    code, text = plan("-f", manifest(tmp_path, "310Mi"), "--bandwidth", "10")
    assert code == 1
    assert "No request of maxSequenceLength 1024 fits" in text


def test_a_manifest_with_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    service = yaml.safe_load(Path(manifest(tmp_path, "8Gi")).read_text(encoding="utf-8"))
    service["spec"]["resources"]["limits"]["nvidia.com/gpu"] = 1
    path.write_text(json.dumps(service), encoding="utf-8")
    code, text = plan("-f", str(path), "--bandwidth", "4300")
    assert (code, text.strip()) == (
        2,
        "the service does not say how much memory its GPU has: give spec.resources.gpuMemory, or --memory",
    )
    assert plan("-f", str(path), "--bandwidth", "4300", "--memory", "24Gi")[0] == 0
    service["spec"]["resources"]["gpuMemory"] = "24Gi"
    path.write_text(json.dumps(service), encoding="utf-8")
    code, text = plan("-f", str(path), "--bandwidth", "4300")
    assert code == 0
    assert "smollm2-135m-instruct on a GPU" in text
    assert "The operator starts it with maxSequenceLength 8,192" in text
    assert "a step reads                   129 MiB" in text
    service["spec"]["model"]["weightPrecision"] = "FP16"
    path.write_text(json.dumps(service), encoding="utf-8")
    assert "a step reads                   257 MiB" in plan("-f", str(path), "--bandwidth", "4300")[1]
    service["spec"]["resources"]["gpuMemory"] = "1Gi"
    path.write_text(json.dumps(service), encoding="utf-8")
    code, text = plan("-f", str(path), "--bandwidth", "4300")
    assert code == 1
    assert "raise gpuMemory to at least " in text


def test_elements_of_a_gpu() -> None:
    def memory(*options: str) -> dict[str, int]:
        found = json.loads(plan(*MODEL, "--memory", "24Gi", "--device", "gpu", "--json", *options)[1])["memory"]
        return {name: found[name] for name in ("weightBytes", "kvBytesPerToken")}

    default, half = memory(), memory("--weight-bits", "16", "--kv-bits", "16")
    # The embedding has 16 bits in both; in the first it is beside an output head of 8 bits.
    assert 1.3 < half["weightBytes"] / default["weightBytes"] < 1.5
    assert 1.8 < half["kvBytesPerToken"] / default["kvBytesPerToken"] < 2


def test_a_claim_needs_the_file(tmp_path: Path) -> None:
    path = manifest(tmp_path, "2Gi", "{persistentVolumeClaim: {claimName: models, path: chat.gguf}}")
    code, text = plan("-f", path)
    assert code == 2
    assert "chat.gguf on the claim models, which is not read here; give a copy: --model FILE.gguf" in text
    assert plan("-f", path, *MODEL, "--bandwidth", "10")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "give -f SERVICE.yaml, or --model"),
        (MODEL, "--memory is missing"),
        ((*MODEL, "--memory", "lots"), "--memory 'lots' is not a memory quantity"),
        (("--model", "bundled:none", "--memory", "1Gi"), "bundled:none: no such bundled model"),
        (("--model", "/no/such.gguf", "--memory", "1Gi"), "/no/such.gguf: no such file"),
        ((*MODEL, "--memory", "1Gi", "--bandwidth", "-1"), "--bandwidth -1 must be GB/s above 0"),
        ((*MODEL, "--memory", "1Gi", "--inter-token-latency", "soon"), "--inter-token-latency 'soon'"),
        ((*MODEL, "--memory", "1Gi", "--device", "tpu"), "--device 'tpu' must be cpu or gpu"),
        (("-f", "/no/such.yaml"), "-f /no/such.yaml cannot be read"),
    ],
)
def test_wrong_input(arguments: tuple[str, ...], hint: str) -> None:
    code, text = plan(*arguments)
    assert code == 2
    assert hint in text
    assert len(text.strip().splitlines()) == 1


def test_it_needs_neither_kubernetes_nor_numpy() -> None:
    """In a process that cannot import them: the operator's image has no numpy, the runtime's no Kubernetes client."""
    code = (
        "import sys\n"
        "for name in ('kubernetes', 'kopf', 'aiohttp', 'fastapi', 'numpy', 'gguf', 'tokenizers', 'msgspec'):\n"
        "    sys.modules[name] = None\n"
        "from busload_operator.cli import main\n"
        "sys.argv = ['busload', 'plan', '--model', sys.argv[1], '--memory', '2Gi', '--bandwidth', '10', '--device',"
        " sys.argv[2]]\n"
        "main()\n"
    )
    for device in ("cpu", "gpu"):
        command = [sys.executable, "-c", code, "bundled:smollm2-135m-instruct", device]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stderr
        assert "It fits." in found.stdout
