"""Decode steps in padded buckets: which bucket, what padding does, and that nobody notices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generating import GREEDY, generate, next_chunks, sized
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TinyModel

from busload_runtime.engine.plan import Chunk, Plan
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
from busload_runtime.executors.torch_model.graphs import LARGEST, CalledAgain, DecodeGraphs, bucket_for, buckets, padded
from busload_runtime.executors.torch_model.loading import GgufCheckpoint
from busload_runtime.executors.torch_model.step import arrange, step_of
from busload_runtime.model.load import load_weights


@pytest.fixture
def executor(tmp_path: Path) -> CudaExecutor:
    TinyModel("llama", layers=2).write(tmp_path / "tiny.gguf")
    made = CudaExecutor(GgufCheckpoint(load_weights(str(tmp_path / "tiny.gguf"))), CudaOptions("cpu"))
    sized(made, 64)
    return made


@given(st.integers(1, 2 * LARGEST))
def test_the_smallest_bucket_that_holds_a_batch(batch: int) -> None:
    bucket = bucket_for(batch)
    if batch > LARGEST:
        assert bucket is None
        return
    assert bucket is not None
    assert batch <= bucket
    assert all(other < batch for other in buckets() if other < bucket)
    assert bucket <= 1.25 * batch or bucket - batch < 8


@given(st.lists(st.integers(0, 200), min_size=1, max_size=9), st.integers(0, 5))
def test_padding_adds_rows_that_do_nothing(starts: list[int], more: int) -> None:
    chunks = [Chunk(i, (i,), start, tuple(range(start // 64 + 1)), GREEDY) for i, start in enumerate(starts)]
    rows = len(chunks)
    arrays = arrange(chunks, range(rows), 64)
    wide = padded(arrays, rows + more, 8)
    for name in ("tokens", "positions", "slots", "decode_lengths"):
        assert wide[name].dtype == arrays[name].dtype
        assert np.array_equal(wide[name][:rows], arrays[name])
    assert (wide["slots"][rows:] == -1).all()
    assert not wide["decode_lengths"][rows:].any()
    assert wide["decode_tables"].shape == (rows + more, 8)
    step = step_of({name: torch.from_numpy(array) for name, array in wide.items()})
    assert step.num_decodes == rows + more
    assert len(step.piece_lengths) == 0


def test_texts_are_those_without_buckets(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 6, 7 + number] for number in range(11)]
    met: list[int] = []
    run = executor._graphs.run

    def watched(bucket: int, arrays: Any) -> Any:
        met.append(bucket)
        return run(bucket, arrays)

    monkeypatch.setattr(executor._graphs, "run", watched)
    together = generate(executor, prompts, 6)
    assert met == [16] * 5  # the first step has prompts
    monkeypatch.setattr(executor._graphs, "run", lambda bucket, arrays: None)
    assert generate(executor, prompts, 6) == together


def test_buffers_are_made_once_and_filled_anew(executor: CudaExecutor) -> None:
    """What a larger step left in a bucket's buffers must not reach a smaller one."""
    prompts = [[1, 2, 3], [4, 5], [6]]
    alone = [generate(executor, [prompt], 4)[0] for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for chosen in ([0, 1, 2], [0, 1, 2], [1, 2], [0], [0, 1, 2], [0, 2]):
        chunks = [chunk for chunk in next_chunks(executor, prompts, outputs) if chunk.request_id in chosen]
        for sampled in executor.run(Plan(tuple(chunks))):
            outputs[sampled.request_id].append(sampled.token)
    for output, expected in zip(outputs, alone, strict=True):
        count = min(len(output), 4)
        assert output[:count] == expected[:count]
    assert len(executor._graphs._buckets) <= 3


def test_a_list_of_work_that_is_too_long_goes_without_a_graph() -> None:
    def compute(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (tensors["work"].sum(),)

    graphs = DecodeGraphs(compute, CalledAgain, torch.device("cpu"), lambda bucket: {"work": 2 * bucket})
    ones = np.ones(3, np.int32)
    found = graphs.run(2, {"work": ones, "tokens": np.zeros(2, np.int32)})
    assert found is not None
    assert found[1]["work"].shape == (4,)
    assert int(found[0][0]) == 3
    assert graphs.run(2, {"work": np.ones(5, np.int32), "tokens": np.zeros(2, np.int32)}) is None
