"""The CPU engine against the reference executor, on every instruction set that this machine runs."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import quantised_llama
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_llama import TinyLlama

from busload_kernels.cpu import library
from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.contract import Executor
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.cpu_threads import usable_threads
from busload_runtime.executors.create import create_executor
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.errors import ModelError
from busload_runtime.model.load import load_weights

GREEDY = SamplingParams(temperature=0)
ISAS = library.usable_isas()
BLOCKS = 128
# Relative logit error of a 3-layer random model against fp32 arithmetic on the weights of the file. Random models with
# sharp softmax are harder than real ones; `quantised_llama` shows that all of it is rounding to 8 bits.
LOGIT_ERROR = 0.15
PRECISIONS = (Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.F16, Type.BF16, Type.F32)


def tiny(**changes: object) -> TinyLlama:
    """Odd in every dimension that the kernels block by: 3 query heads per key head, 5 groups, a ragged vocabulary."""
    shape = {"layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 32, "ffn": 160, "context": 512}
    return TinyLlama(**{**shape, **changes})  # type: ignore[arg-type]


def open_cpu(path: Path | str, isa: str | None = None, threads: int = 2, kv_precision: str = "int8") -> CpuExecutor:
    executor = CpuExecutor(load_weights(str(path)), threads, isa, kv_precision)
    executor.reserve(BLOCKS)
    executor.resize(BLOCKS)
    return executor


def open_reference(path: Path | str) -> ReferenceExecutor:
    executor = ReferenceExecutor(load_weights(str(path)))
    executor.reserve(2 * BLOCKS)
    executor.resize(2 * BLOCKS)
    return executor


def whole(executor: Executor, tokens: Sequence[int], name: int = 1, first_block: int = 0) -> Chunk:
    count = -(-len(tokens) // executor.block_size)
    return Chunk(name, tuple(tokens), 0, tuple(range(first_block, first_block + count)), GREEDY)


def all_logits(executor: CpuExecutor | ReferenceExecutor, tokens: Sequence[int]) -> NDArray[np.float32]:
    return executor.logits([whole(executor, tokens)], range(len(tokens)))


def relative_error(ours: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny(precision=Type.Q4_1).write(path)
    return path


@pytest.fixture(scope="module", params=ISAS)
def executor(request: pytest.FixtureRequest, model: Path) -> CpuExecutor:
    return open_cpu(model, request.param)


TOKENS = np.random.default_rng(3).integers(0, 250, 100).tolist()


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_close_to_the_reference(tmp_path: Path, precision: Type, tied: bool) -> None:
    path = tmp_path / "tiny.gguf"
    tiny(precision=precision, tied=tied).write(path)
    exact = all_logits(open_reference(path), TOKENS)
    for isa in ISAS:
        assert relative_error(all_logits(open_cpu(path, isa), TOKENS), exact) < LOGIT_ERROR


@pytest.mark.parametrize("precision", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(6, 2, 32), (1, 1, 64), (8, 2, 128), (16, 1, 32), (2, 2, 256), (5, 1, 96)])
def test_nothing_but_rounding_differs(tmp_path: Path, precision: Type, shape: tuple[int, int, int]) -> None:
    """To fp32, except after a value that lies so close to a step that it is rounded the other way.

    If that is an early key or value, every later token sees it: then another model is tried.
    """
    heads, kv_heads, head_dim = shape
    path = tmp_path / "tiny.gguf"
    for isa in ISAS:
        medians = []
        for seed in range(4):
            tiny(heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=1, precision=precision, seed=seed).write(
                path
            )
            exact = quantised_llama.logits(load_weights(str(path)), TOKENS, isa)
            ours = all_logits(open_cpu(path, isa), TOKENS)
            errors = np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)
            assert errors.max() < LOGIT_ERROR
            medians.append(np.median(errors))
            if medians[-1] < 1e-5:
                break
        assert min(medians) < 1e-5


def test_linear_rope_scaling_and_theta(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    tiny(theta=500_000.0, metadata=scaling).write(path)
    assert relative_error(all_logits(open_cpu(path), TOKENS), all_logits(open_reference(path), TOKENS)) < LOGIT_ERROR


def test_instruction_sets_agree(model: Path) -> None:
    """They do the same integer arithmetic, but for attention over an int8 cache where products are added in 16 bits.
    The rest differs by rounding, which quantisation can amplify."""
    for kv_precision in ("int8", "fp32"):
        same = [isa for isa in ISAS if kv_precision == "fp32" or isa not in quantised_llama.SUMS_PAIRS]
        first, *others = (all_logits(open_cpu(model, isa, kv_precision=kv_precision), TOKENS) for isa in same)
        for other in others:
            assert relative_error(other, first) < 0.03


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_cutting_and_batch_mates_change_no_bit(executor: CpuExecutor, data: st.DataObject) -> None:
    """Every prompt computed at once and alone; then all of them together, cut at random, on scattered blocks."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=12))
    prompts = [rng.integers(0, 250, length).tolist() for length in lengths]
    alone = [all_logits(executor, prompt)[-1] for prompt in prompts]

    table = iter(rng.permutation(BLOCKS).tolist())
    blocks = [tuple(next(table) for _ in range(-(-length // 32))) for length in lengths]
    done = [0] * len(prompts)
    last: dict[int, NDArray[np.float32]] = {}
    while len(last) < len(prompts):
        chunks = []
        for name in rng.permutation(len(prompts)).tolist():
            left = lengths[name] - done[name]
            size = min(left, int(rng.choice((0, 1, 1, 2, 5, 17, 40))))
            if size:
                tokens = tuple(prompts[name][done[name] : done[name] + size])
                used = blocks[name][: -(-(done[name] + size) // 32)]
                chunks.append(Chunk(name, tokens, done[name], used, GREEDY))
                done[name] += size
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks], dtype=int).tolist()
        finished = [(chunk.request_id, end - 1) for chunk, end in zip(chunks, ends, strict=True)]
        logits = executor.logits(chunks, [row for _, row in finished])
        last |= {name: row for (name, _), row in zip(finished, logits, strict=True) if done[name] == lengths[name]}
    for name, expected in enumerate(alone):
        np.testing.assert_array_equal(last[name], expected)


@pytest.mark.parametrize("isa", ISAS)
def test_threads_change_no_bit(model: Path, isa: str) -> None:
    expected = all_logits(open_cpu(model, isa, threads=1), TOKENS)
    for threads in (2, 3, 8):  # more than there are cores, too
        executor = open_cpu(model, isa, threads)
        for _ in range(5):
            np.testing.assert_array_equal(all_logits(executor, TOKENS), expected)


def test_it_is_an_executor(executor: CpuExecutor) -> None:
    contract: Executor = executor
    assert (contract.block_size, contract.context_length) == (32, 512)
    # Per token and kv head: 2 x 32 bytes and 2 fp32 scales.
    assert contract.bytes_per_block == 3 * 2 * 32 * (2 * 32 + 2 * 4)
    assert contract.vocab_size == len(tiny().tokens)
    parameters = 3 * 192 * (10 * 32 + 192 + 3 * 160) + 288 * 192
    assert contract.weight_bytes == parameters * 20 / 32  # Q4_1: 20 bytes for 32 weights, vocabulary padded to 288
    assert contract.copy_bandwidth > 1e8


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_kv_memory_is_committed_when_written_and_given_back(model: Path) -> None:
    executor = open_cpu(model)
    count = 2**30 // executor.bytes_per_block
    before = resident()
    executor.reserve(4 * count)
    executor.resize(count)
    assert resident() - before < 2**24
    size = 64 * 2**20 // executor.bytes_per_block
    executor.run(Plan(tuple(Chunk(block, (1,), 0, (block,), None) for block in range(size))))
    touched = resident() - before
    assert touched > 2**23
    executor.resize(1)
    assert resident() - before < touched / 4
    executor.resize(4 * count)
    with pytest.raises(ExecutorError, match=rf"to {4 * count + 1} blocks; reserved: {4 * count}"):
        executor.resize(4 * count + 1)
    with pytest.raises(ExecutorError, match="cannot reserve"):
        executor.reserve(2**62 // executor.bytes_per_block)


@pytest.mark.parametrize(("tokens", "samples"), [(1, 1), (32, 32), (300, 1), (512, 8)])
def test_activation_bytes_is_what_a_step_takes(model: Path, tokens: int, samples: int) -> None:
    executor = open_cpu(model)
    rows = min(512, tokens - samples + 1)
    chunks = [Chunk(0, (1,) * rows, 0, tuple(range(16)), GREEDY)]
    chunks += [Chunk(name, (1,), 0, (15 + name,), GREEDY) for name in range(1, samples)]
    mapped = _mapped()
    executor.run(Plan(tuple(chunks)))
    grown = _mapped() - mapped
    assert grown == -(-executor.activation_bytes(tokens, samples) // 4096) * 4096


def _mapped() -> int:
    """Bytes of anonymous maps that ask for huge pages: weights and scratch."""
    text = Path("/proc/self/smaps").read_text()
    areas = re.findall(r"Size: +(\d+) kB.*?VmFlags: ([a-z0-9 ]+)", text, re.DOTALL)
    return sum(1024 * int(size) for size, flags in areas if "hg" in flags.split())


@pytest.mark.parametrize("precision", [Type.Q4_1, Type.Q8_0, Type.F16, Type.F32], ids=lambda kind: kind.name)
def test_weights_that_are_not_finite_are_named(tmp_path: Path, precision: Type) -> None:
    path = tmp_path / "tiny.gguf"
    tiny(precision=precision).write(path)
    file = load_weights(str(path)).file
    begin = file.tensors["blk.1.ffn_down.weight"].offset
    raw = bytearray(path.read_bytes())
    raw[begin : begin + 4] = b"\xff\x7f\xff\x7f"  # not a number in fp16 and in fp32
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_down\.weight holds values that are not finite"):
        open_cpu(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 16}, "attention.key_length is 16; the CPU engine computes a multiple of 32 up to 256"),
        ({"ffn": 100}, "feed_forward_length is 100; the CPU engine computes a multiple of 32"),
        ({"heads": 17, "kv_heads": 1}, "head_count / head_count_kv is 17; the CPU engine computes at most 16"),
    ],
)
def test_models_it_cannot_compute(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    tiny(**changes).write(tmp_path / "tiny.gguf")
    with pytest.raises(ExecutorError, match=re.escape(message)):
        create_executor("cpu", str(tmp_path / "tiny.gguf"))


def test_weights_without_room_are_refused_before_they_are_read(model: Path) -> None:
    needed = CpuExecutor(load_weights(str(model))).weight_bytes
    assert create_executor("cpu", str(model), room=needed)
    for room, left, more in ((needed - 1, needed / 2**20, 1), (-(2**30), 0, 2**10 + -(-needed // 2**20))):
        with pytest.raises(ExecutorError) as caught:
            create_executor("cpu", str(model), room=room)
        assert str(caught.value) == (
            f"{model} takes {needed / 2**20:.0f} MiB in memory and the memory limit leaves {left:.0f} MiB for it "
            f"beside what both processes need; raise the limit by at least {more} MiB and what the KV cache is to "
            "have, or choose a smaller model"
        )


def test_the_environment_chooses_the_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_CPU_ISA", "portable")
    monkeypatch.setenv("BUSLOAD_THREADS", "3")
    chosen = create_executor("cpu", str(model))
    assert isinstance(chosen, CpuExecutor)
    assert (chosen.isa, chosen.threads) == ("portable", 3)
    monkeypatch.setenv("BUSLOAD_CPU_ISA", "mmx")
    with pytest.raises(ExecutorError, match=f"BUSLOAD_CPU_ISA is 'mmx'; this CPU runs {', '.join(ISAS)}"):
        create_executor("cpu", str(model))
    monkeypatch.delenv("BUSLOAD_CPU_ISA")
    for bad in ("0", "two", "-1", "1.5", "100000"):
        monkeypatch.setenv("BUSLOAD_THREADS", bad)
        with pytest.raises(ExecutorError, match=f"BUSLOAD_THREADS is '{bad}'; must be an integer from 1 to 1024"):
            create_executor("cpu", str(model))


@pytest.mark.parametrize(
    ("files", "cpus", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/cpu.max": "200000 100000\n"}, 8, 2),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/pod/cpu.max": "150000 100000\n",
                "sys/pod/box/cpu.max": "max 100000\n",
            },
            8,
            1,
        ),
        ({"proc/self/cgroup": "0::/pod\n", "sys/pod/cpu.max": "50000 100000\n"}, 8, 1),
        ({"proc/self/cgroup": "0::/host/path/unseen\n", "sys/cpu.max": "300000 100000\n"}, 8, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/cpu.max": "max 100000\n"}, 4, 4),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n2:memory:/box\n",
                "sys/cpu/box/cpu.cfs_quota_us": "400000\n",
                "sys/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            8,
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
            8,
        ),
        ({}, 2, 2),
    ],
)
def test_threads_follow_the_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: int, expected: int
) -> None:
    monkeypatch.delenv("BUSLOAD_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_threads(tmp_path / "proc", tmp_path / "sys") == expected


def test_structs_are_as_the_compiler_lays_them_out(tmp_path: Path) -> None:
    """ctypes mirrors abi.h by hand: sizes and the offset of each struct's last field must agree."""
    from busload_kernels.cpu import build

    structs = {
        "BlMatrix": library.Matrix,
        "BlLayer": library.Layer,
        "BlModel": library.Model,
        "BlSampling": library.Sampling,
        "BlStep": library.Step,
    }
    lines = "".join(
        f'printf("{name} %zu %zu\\n", sizeof({name}), offsetof({name}, {struct._fields_[-1][0]}));'
        for name, struct in structs.items()
    )
    source = tmp_path / "sizes.c"
    source.write_text(f'#include <stdio.h>\n#include "abi.h"\nint main(void) {{ {lines} }}\n')
    program = str(tmp_path / "sizes")
    subprocess.run(["cc", f"-I{build.SOURCES}", str(source), "-o", program], check=True, timeout=60)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    expected = [
        f"{name} {ctypes.sizeof(struct)} {getattr(struct, struct._fields_[-1][0]).offset}"
        for name, struct in structs.items()
    ]
    assert printed.splitlines() == expected


def test_it_does_not_import_torch() -> None:
    program = "import sys, busload_runtime.executors.cpu; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
