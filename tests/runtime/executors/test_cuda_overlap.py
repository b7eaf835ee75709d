"""Steps of the torch model that overlap: the texts are those without, token for token (sgl-project/sglang-jax#1487)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from generating import GREEDY, generate, sized
from tiny_models import VOCABULARY, TinyModel

from busload_runtime.contract import Limits
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, MemoryPlan
from busload_runtime.engine.messages import Submit, TokenOut
from busload_runtime.engine.plan import PENDING, Chunk, Plan
from busload_runtime.executors import cuda
from busload_runtime.executors.contract import Overlapping
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.torch_model.loading import GgufCheckpoint
from busload_runtime.executors.torch_model.step import Staging
from busload_runtime.model.load import load_weights

Tensors = tuple[torch.Tensor, ...]


class Graphs:
    """Records as the device does: what is recorded is computed once more before, its results lie in the same place each
    time, and a replay leaves nothing of the results of the others."""

    def __init__(self) -> None:
        self.all: list[Graph] = []

    def record(self, compute: Callable[[], Tensors]) -> "Graph":
        self.all.append(Graph(self, compute))
        return self.all[-1]


class Graph:
    """Implements `Recorded`."""

    def __init__(self, graphs: Graphs, compute: Callable[[], Tensors]) -> None:
        self._graphs, self._compute = graphs, compute
        self.outputs = tuple(torch.zeros_like(tensor) for tensor in compute())

    def replay(self) -> None:
        results = self._compute()
        for graph in self._graphs.all:
            for output in graph.outputs:
                output.fill_(7)
        for output, result in zip(self.outputs, results, strict=True):
            output.copy_(result)


class AtOnce:
    """An executor without its `launch`."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        if name == "launch":
            raise AttributeError(name)
        return getattr(self._executor, name)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaExecutor]:
    path = tmp_path_factory.mktemp("overlap") / "tiny.gguf"
    TinyModel("llama", layers=2).write(path)
    with pytest.MonkeyPatch.context() as patch:
        graphs = Graphs()
        patch.setattr(cuda, "recorder", lambda device: graphs.record)
        made = CudaExecutor(GgufCheckpoint(load_weights(str(path))), CudaOptions("cpu"))
        sized(made, 64)
        yield made


def engine_of(executor: Any, blocks: int) -> Engine:
    limits = Limits(200, 6, 100, 48, 0, 0)
    needed = executor.weight_bytes + executor.activation_bytes(48, 6) + blocks * executor.bytes_per_block
    memory = MemoryPlan(
        budget=Budget(needed, "test"),
        weights=executor.weight_bytes,
        overhead=0,
        block_size=executor.block_size,
        bytes_per_block=executor.bytes_per_block,
        context_length=executor.context_length,
        activations=executor.activation_bytes,
    )
    return Engine(executor, memory, limits)


def traffic(count: int, **wishes: Any) -> Iterator[Submit]:
    """Prompts of all lengths, some equal, with ends by length and, by chance, by a stop id."""
    rng = np.random.default_rng(57)
    shared = rng.integers(0, len(VOCABULARY), 70).tolist()
    for request_id in range(count):
        own = rng.integers(0, len(VOCABULARY), int(rng.integers(1, 60))).tolist()
        prompt = shared + own if request_id % 3 == 0 else own
        stops = rng.integers(0, len(VOCABULARY), 2).tolist()
        yield Submit(request_id, prompt, int(rng.integers(1, 110)), stop_token_ids=stops, seed=request_id, **wishes)


def texts(engine: Engine, messages: list[Submit], abort: tuple[int, ...] = ()) -> dict[int, list[TokenOut]]:
    """What each request got; a new one comes every other step, and some are aborted four steps after they came."""
    found: dict[int, list[TokenOut]] = {message.request_id: [] for message in messages}
    step = 0
    while messages[step // 2 :] or engine.has_work:
        if step % 2 == 0 and step // 2 < len(messages):
            assert engine.submit(messages[step // 2]) == []
        if step % 2 == 0 and step // 2 - 2 in abort:
            engine.abort(step // 2 - 2)
        for output in engine.step() if engine.has_work else ():
            found[output.request_id].append(replace_times(output))
        step += 1
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks
    return found


def replace_times(output: TokenOut) -> TokenOut:
    # How much of a prompt is cached depends on the step in which a request starts.
    return TokenOut(output.request_id, output.token, output.finish_reason, 0, 0.0, output.error, output.logprobs)


@pytest.mark.parametrize(
    ("blocks", "wishes"),
    [
        (48, {"temperature": 0.0}),
        (5, {"temperature": 0.0}),
        (48, {"temperature": 1.0, "top_p": 0.9}),
        (48, {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -2.0}}),
        (48, {"temperature": 0.0, "frequency_penalty": 0.5}),
    ],
    ids=str,
)
def test_texts_are_those_without_overlap(executor: CudaExecutor, blocks: int, wishes: dict[str, Any]) -> None:
    messages = list(traffic(12, **wishes))
    plain = texts(engine_of(AtOnce(executor), blocks), messages)
    engine = engine_of(executor, blocks)
    assert texts(engine, messages) == plain
    assert {output[-1].finish_reason for output in plain.values()} == {"stop", "length"}
    assert (engine.stats().preemptions > 0) == (blocks == 5)


def test_log_probabilities_are_those_of_their_own_step(executor: CudaExecutor) -> None:
    messages = list(traffic(10, temperature=0.0, logprobs=3))
    plain = texts(engine_of(AtOnce(executor), 48), messages)
    ahead = texts(engine_of(executor, 48), messages)
    for request_id, outputs in plain.items():
        assert [output.token for output in ahead[request_id]] == [output.token for output in outputs]
        for ours, theirs in zip(ahead[request_id], outputs, strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert [token for token, _ in ours.logprobs.top] == [token for token, _ in theirs.logprobs.top]
            assert ours.logprobs.drawn == pytest.approx(theirs.logprobs.drawn, abs=1e-4)


def test_aborted_requests_leave_the_others_alone(executor: CudaExecutor) -> None:
    messages = list(traffic(12, temperature=0.0))
    plain = texts(engine_of(AtOnce(executor), 48), messages)
    ahead = texts(engine_of(executor, 5), messages, abort=(1, 4, 5, 9))
    for request_id, outputs in plain.items():
        tokens = [output.token for output in ahead[request_id]]
        if request_id not in (1, 4, 5, 9):
            assert ahead[request_id] == outputs
        assert tokens == [output.token for output in outputs][: len(tokens)]


def test_only_cuda_overlaps(executor: CudaExecutor) -> None:
    assert isinstance(executor, Overlapping)
    assert not isinstance(AtOnce(executor), Overlapping)


def test_a_pending_token_is_what_the_step_before_drew(executor: CudaExecutor) -> None:
    """Requests change places from step to step, also between steps with a graph and without."""
    sized(executor, 64)
    prompts = [[5, 6, 7], [8, 9], [10]]
    expected = generate(executor, prompts, 3)
    first = executor.launch(Plan(tuple(Chunk(i, tuple(p), 0, (i,), GREEDY) for i, p in enumerate(prompts))))
    second = executor.launch(Plan(tuple(Chunk(i, (PENDING,), len(prompts[i]), (i,), GREEDY, 1) for i in (2, 0, 1))))
    assert {one.request_id: one.token for one in first.result()} == {i: text[0] for i, text in enumerate(expected)}
    third = executor.launch(
        Plan(
            (
                Chunk(1, (PENDING,), 3, (1,), GREEDY, 2),
                Chunk(7, (1, 2, 3), 0, (7,), None),
                Chunk(0, (PENDING,), 4, (0,), GREEDY, 2),
            )
        )
    )
    assert {one.request_id: one.token for one in second.result()} == {i: text[1] for i, text in enumerate(expected)}
    assert {one.request_id: one.token for one in third.result()} == {i: expected[i][2] for i in (0, 1)}


def test_a_pending_token_that_nobody_draws_is_refused(executor: CudaExecutor) -> None:
    sized(executor, 64)
    chunk = Chunk(1, (PENDING,), 3, (0,), GREEDY, 1)
    with pytest.raises(ExecutorError, match="names a token or a KV block that does not exist"):
        executor.launch(Plan((chunk,)))
    executor.run(Plan((Chunk(1, (1, 2, 3), 0, (0,), GREEDY),)))
    with pytest.raises(ExecutorError, match="names a token or a KV block that does not exist"):
        executor.launch(Plan((replace(chunk, request_id=2),)))
    with pytest.raises(ExecutorError, match="names a token or a KV block that does not exist"):
        executor.launch(Plan((replace(chunk, tokens=(1, PENDING)),)))
    assert len(executor.launch(Plan((chunk,))).result()) == 1


def test_the_host_side_is_written_again_only_when_its_copy_has_left() -> None:
    seen: list[tuple[str, int]] = []

    class Event:
        def synchronize(self) -> None:
            seen.append(("wait", int(staging.host["x"][0])))

        def record(self) -> None:
            seen.append(("copied", int(staging.device["x"][0])))

    staging = Staging({"x": ((2,), np.int32)}, torch.device("cpu"))
    staging._copied = Event()
    for value in (1, 2):
        staging.fill({"x": np.array([value], np.int32)})
    assert seen == [("wait", 0), ("copied", 1), ("wait", 1), ("copied", 2)]
