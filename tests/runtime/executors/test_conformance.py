"""What every executor must do, by the contract alone. Speed, rounding and memory of each are in its own tests."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from generating import GREEDY, AnyExecutor, generate, sized
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_llama import TinyLlama
from transformers import RepetitionPenaltyLogitsProcessor
from warped import probabilities

from busload_kernels.cpu import library
from busload_runtime.engine.plan import (
    NO_TOKEN,
    Chunk,
    Logprobs,
    Plan,
    Sampled,
    SamplingParams,
    Scoring,
    Shaping,
    mask_bytes,
)
from busload_runtime.executors.contract import Executor
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.executors.sampling import logprobs_of, sample
from busload_runtime.executors.torch_model.loading import GgufCheckpoint
from busload_runtime.model.load import load_weights

BLOCKS = 128
VOCABULARY = 262
EXECUTORS: dict[str, Callable[[str], AnyExecutor]] = {
    "reference": lambda path: ReferenceExecutor(load_weights(path), num_threads=2),
    **{
        f"cpu-{isa}": lambda path, isa=isa: CpuExecutor(load_weights(path), threads=2, isa=isa)
        for isa in library.usable_isas()
    },
    "cpu-fp32-cache": lambda path: CpuExecutor(load_weights(path), threads=2, kv_precision="fp32"),
    "cuda-on-cpu": lambda path: on_cpu(path, None, None),
    "cuda-on-cpu-int8": lambda path: on_cpu(path, "int8", "int8"),
}
# Largest difference between a logit computed alone and in any batch, relative to the largest logit. Where a product has
# any shape BLAS sums in any order; in an 8-bit cache that decides which way a number is rounded.
TOLERANCE = {"reference": 1e-5, "cuda-on-cpu": 1e-5, "cuda-on-cpu-int8": 3e-2}


def on_cpu(path: str, weights: str | None, kv: str | None) -> CudaExecutor:
    """The GPU executor's model on torch operations."""
    return CudaExecutor(GgufCheckpoint(load_weights(path)), CudaOptions("cpu", weights, kv))


def tiny(**changes: object) -> TinyLlama:
    shape = {"layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 32, "ffn": 160, "context": 512}
    return TinyLlama(**{**shape, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=EXECUTORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def executor(name: str, tmp_path_factory: pytest.TempPathFactory) -> AnyExecutor:
    return make(name, tmp_path_factory.mktemp("model"), tiny())


def make(name: str, folder: Path, model: TinyLlama) -> AnyExecutor:
    model.write(folder / "tiny.gguf")
    return sized(EXECUTORS[name](str(folder / "tiny.gguf")), BLOCKS)


def blocks_for(executor: Executor, length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first - (-length // executor.block_size)))


def random_tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist())


def last_logits(executor: AnyExecutor, tokens: Sequence[int]) -> NDArray[np.float32]:
    chunk = Chunk(1, tuple(tokens), 0, blocks_for(executor, len(tokens)), None)
    return executor.logits([chunk], [len(tokens) - 1])[0]


def test_it_says_what_it_is(executor: AnyExecutor) -> None:
    contract: Executor = executor
    assert contract.vocab_size == len(tiny().tokens) == VOCABULARY
    assert contract.context_length == 512
    assert contract.block_size >= 1
    assert contract.bytes_per_block % contract.block_size == 0
    assert contract.weight_bytes > 192 * VOCABULARY
    assert contract.copy_bandwidth > 1e8
    assert contract.activation_bytes(64, 8) > 0


# Batches.


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_neither_cuts_nor_batch_mates_nor_places_change_the_result(
    name: str, executor: AnyExecutor, data: st.DataObject
) -> None:
    """Each prompt alone and whole; then all together, cut at random, in random order, on scattered blocks."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=10))
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
    alone = [last_logits(executor, prompt) for prompt in prompts]

    table = iter(rng.permutation(BLOCKS).tolist())
    blocks = [tuple(next(table) for _ in blocks_for(executor, length)) for length in lengths]
    done = [0] * len(prompts)
    while done != lengths:
        chunks = []
        for request in rng.permutation(len(prompts)).tolist():
            size = min(lengths[request] - done[request], int(rng.choice((0, 1, 1, 2, 5, 17, 40))))
            if size:
                tokens = tuple(prompts[request][done[request] : done[request] + size])
                used = blocks[request][: len(blocks_for(executor, done[request] + size))]
                chunks.append(Chunk(request, tokens, done[request], used, None))
                done[request] += size
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks], dtype=int).tolist()
        finished = [
            (chunk.request_id, end - 1)
            for chunk, end in zip(chunks, ends, strict=True)
            if chunk.length_after == lengths[chunk.request_id]
        ]
        # The reference wants decodes first in `logits`; `run` sorts them itself.
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].tokens) > 1)
        moved = np.cumsum([0] + [len(chunks[i].tokens) for i in order]).tolist()
        rows = {chunks[i].request_id: moved[place + 1] - 1 for place, i in enumerate(order)}
        logits = executor.logits([chunks[i] for i in order], [rows[request] for request, _ in finished])
        for (request, _), row in zip(finished, logits, strict=True):
            bound = TOLERANCE.get(name, 0.0) * np.abs(alone[request]).max()
            np.testing.assert_allclose(row, alone[request], atol=bound, rtol=0)


def test_tokens_come_in_the_order_of_the_plan_from_chunks_that_draw(executor: AnyExecutor) -> None:
    silent = Chunk(1, random_tokens(3), 0, (0,), None)
    prompt = Chunk(2, random_tokens(9, 1), 0, (1,), GREEDY)
    decode = Chunk(3, random_tokens(1, 2), 0, (2,), GREEDY)
    assert executor.run(Plan(())) == []
    assert executor.run(Plan((silent,))) == []
    alone = {chunk.request_id: executor.run(Plan((chunk,)))[0] for chunk in (prompt, decode)}
    assert executor.run(Plan((silent, prompt, decode))) == [alone[2], alone[3]]
    assert executor.run(Plan((decode, silent, prompt))) == [alone[3], alone[2]]


def test_texts_do_not_depend_on_the_pool_size(executor: AnyExecutor) -> None:
    """Blocks that stay keep their content when others go and come back."""
    prompts = [random_tokens(20, seed) for seed in range(3)]
    expected = generate(executor, prompts, 8)
    first = [
        executor.run(Plan((Chunk(i, p, 0, blocks_for(executor, 20, 4 * i), GREEDY),))) for i, p in enumerate(prompts)
    ]
    executor.resize(12)
    executor.resize(BLOCKS)
    second = tuple(
        Chunk(i, (drawn.token,), 20, blocks_for(executor, 21, 4 * i), GREEDY, 1) for i, (drawn,) in enumerate(first)
    )
    assert [drawn.token for drawn in executor.run(Plan(second))] == [text[1] for text in expected]


def test_the_pool_has_bounds(executor: AnyExecutor) -> None:
    inside, outside = (Chunk(1, (1,), 0, (block,), GREEDY) for block in (9, 10))
    executor.resize(10)
    try:
        assert len(executor.run(Plan((inside,)))) == 1
        with pytest.raises(ExecutorError, match=r"does not exist \(blocks: 10\)"):
            executor.run(Plan((outside,)))
        for wrong in (BLOCKS + 1, -1):
            with pytest.raises(
                ExecutorError, match=f"cannot resize the KV cache to {wrong} blocks; reserved: {BLOCKS}"
            ):
                executor.resize(wrong)
        assert len(executor.run(Plan((inside,)))) == 1
    finally:
        executor.resize(BLOCKS)


BIASED = Shaping(logit_bias=((VOCABULARY, 1.0),))


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1, (1,), 0, (BLOCKS,), GREEDY),
        Chunk(1, (1,), 0, (-1,), GREEDY),
        Chunk(1, (1,), 0, (), GREEDY),
        Chunk(1, (1,) * 129, 0, (0, 1), GREEDY),
        Chunk(1, (1,), 128, (0, 1), None),
        Chunk(1, (1,), -1, (0,), GREEDY),
        Chunk(1, (), 0, (0,), None),
        Chunk(1, (VOCABULARY,), 0, (0,), GREEDY),
        Chunk(1, (-1,), 0, (0,), None),
        Chunk(1, (1,), 0, (0,), SamplingParams(shaping=BIASED)),
        Chunk(1, (1,), 0, (0,), SamplingParams(shaping=Shaping(frequency_penalty=1)), history=array("i", [-1])),
    ],
    ids=repr,
)
def test_plans_that_break_their_promises_are_refused(executor: AnyExecutor, chunk: Chunk) -> None:
    good = Chunk(2, (1, 2), 0, (5,), GREEDY)
    for chunks in ((chunk,), (good, chunk), (chunk, good)):
        with pytest.raises(ExecutorError, match=rf"^the plan has .* does not exist \(blocks: {BLOCKS}\)$"):
            executor.run(Plan(chunks))
    assert len(executor.run(Plan((good,)))) == 1


@pytest.mark.parametrize("history", [None, array("i"), array("i", [1, 2]), array("i", [1] * 4)])
def test_penalties_without_the_tokens_so_far_are_refused(executor: AnyExecutor, history: "array[int] | None") -> None:
    params = SamplingParams(shaping=Shaping(presence_penalty=1))
    chunk = Chunk(7, (1, 2, 3), 0, (0,), params, history=history)
    with pytest.raises(ExecutorError, match=r"^request 7: the plan asks for penalties .* all 3 tokens so far$"):
        executor.run(Plan((chunk,)))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(shaping=Shaping(logit_bias=((3, -100.0),)))]
)
def test_output_that_is_not_a_number_is_an_error(tmp_path: Path, name: str, params: SamplingParams) -> None:
    model = tiny(seed=1)
    model.write(tmp_path / "good.gguf")
    raw = (tmp_path / "good.gguf").read_bytes()
    # The last tensor of the file is the final norm. Finite weights, so the file loads; their products overflow.
    (tmp_path / "bad.gguf").write_bytes(raw[: -4 * model.hidden] + b"\xff\xff\x7f\x7f" * model.hidden)
    executor = sized(EXECUTORS[name](str(tmp_path / "bad.gguf")), 1)
    with pytest.raises(ExecutorError, match=r"request 5: the model's output is not a number at position 2;"):
        executor.run(Plan((Chunk(5, (1, 2), 0, (0,), params),)))


# Drawing.


def draw(executor: AnyExecutor, tokens: Sequence[int], params: SamplingParams, index: int = 0) -> int:
    """The token after `tokens`, the last `index` of which count as drawn."""
    history = array("i", tokens)
    chunk = Chunk(4, tuple(tokens), 0, blocks_for(executor, len(tokens)), params, index, history)
    (sampled,) = executor.run(Plan((chunk,)))
    assert sampled.request_id == 4
    return sampled.token


@pytest.mark.parametrize("pieces", [(20,), (7, 1, 12), (1,) * 20])
def test_a_prompt_is_scored_by_the_logits_of_its_rows(executor: AnyExecutor, pieces: tuple[int, ...]) -> None:
    """In one piece or several, beside a request that draws; the last row draws, and scores nothing."""
    tokens, other = random_tokens(20, 7), random_tokens(5, 8)
    oracle = executor.logits([Chunk(1, tokens, 0, blocks_for(executor, 20), None)], range(20))
    found, start = list[Logprobs](), 0
    for size in pieces:
        end = start + size
        targets = tokens[start + 1 : end + 1]
        chunk = Chunk(1, tokens[start:end], start, blocks_for(executor, end), GREEDY if end == 20 else None)
        chunk.scoring = Scoring(0, targets, 3) if targets else None
        beside = Chunk(2, other, 0, blocks_for(executor, 5, 40), GREEDY)
        answers = executor.run(Plan((chunk, beside)))
        scored = [answer for answer in answers if answer.request_id == 1]
        assert [answer.token == NO_TOKEN for answer in scored] == ([end < 20] if scored else [])
        assert [answer.request_id for answer in answers if answer.token != NO_TOKEN][-1] == 2
        found += [values for answer in scored for values in answer.prompt]
        start = end
    assert len(found) == 19
    size_of = np.abs(oracle).max()
    for row, values in enumerate(found):
        expected = logprobs_of(oracle[row], tokens[row + 1], 3)
        assert values.drawn == pytest.approx(expected.drawn, abs=0.05 * float(size_of))
        assert [value for _, value in values.top] == pytest.approx(
            [value for _, value in expected.top], abs=0.05 * float(size_of)
        )


def test_greedy_takes_the_first_of_equals(tmp_path: Path, name: str) -> None:
    """Three output rows are one vector and three its opposite, so that three of the six share the highest logit."""
    rows = np.zeros((VOCABULARY, 192), np.float32)
    rows[[9, 40, 200]] = np.random.default_rng(0).standard_normal(192, np.float32)
    rows[[17, 41, 250]] = -rows[9]
    executor = make(name, tmp_path, tiny(extra_tensors={"output.weight": rows}))
    firsts = set()
    for seed in range(12):
        tokens = random_tokens(5, seed)
        winner = draw(executor, tokens, GREEDY)
        firsts.add(winner)
        # Not the model but the executor chose among them: without the first the next one wins.
        banned = greedy_without(winner)
        assert draw(executor, tokens, banned) == {9: 40, 17: 41}[winner]
    assert firsts == {9, 17}


def greedy_without(*tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, shaping=Shaping(logit_bias=tuple((token, -100.0) for token in tokens)))


shapings = st.builds(
    Shaping,
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=20).map(
        lambda biases: tuple(biases.items())
    ),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.5, 100.0, 0.01)),
    frequency_penalty=st.sampled_from((0.0, 0.7, 2.0, -2.0)),
    presence_penalty=st.sampled_from((0.0, 0.4, 2.0, -2.0)),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    top_p=st.sampled_from((1.0, 0.9, 0.3, 1e-6)),
    top_k=st.sampled_from((0, 1, 3, 20, VOCABULARY, 10_000)),
    seed=st.integers(-(2**63), 2**64 - 1),
    min_p=st.sampled_from((0.0, 0.05, 0.5, 1.0)),
    shaping=st.none() | shapings,
)


@settings(max_examples=60, deadline=None)
@given(params=samplings, index=st.integers(0, 30), data=st.integers(0, 1000))
def test_a_draw_is_that_of_the_definition(executor: AnyExecutor, params: SamplingParams, index: int, data: int) -> None:
    """`sample` is the definition (tested against transformers by itself); bias and penalties are spelt out here."""
    tokens = random_tokens(40, data)
    tokens = (*tokens[:30], *tokens[:10])  # some come twice
    logits = last_logits(executor, tokens)
    if params.shaping is not None:
        logits = shaped_by_others(logits, params.shaping, tokens, index)
    assert draw(executor, tokens, params, index) == sample(logits, params, index)


def shaped_by_others(
    logits: NDArray[np.float32], shaping: Shaping, tokens: Sequence[int], num_drawn: int
) -> NDArray[np.float32]:
    """transformers' repetition penalty; frequency and presence penalty by the formula of the OpenAI API reference:
    mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""
    scores = torch.tensor(logits, dtype=torch.float64)
    for token, bias in shaping.logit_bias:
        scores[token] += bias
    scores = scores.float().double()
    if shaping.repetition_penalty != 1:
        penalise = RepetitionPenaltyLogitsProcessor(shaping.repetition_penalty)
        scores = penalise(torch.tensor([list(tokens)]), scores[None])[0]
    for token, count in Counter(tokens[len(tokens) - num_drawn :]).items():
        scores[token] = scores[token] - (
            shaping.frequency_penalty * count + shaping.presence_penalty * float(count > 0)
        )
    return scores.float().numpy()


def test_a_draw_depends_on_seed_and_index_and_not_on_the_batch(executor: AnyExecutor) -> None:
    params = [
        SamplingParams(seed=seed, top_k=50, shaping=Shaping(presence_penalty=0.5) if seed % 2 else None)
        for seed in range(12)
    ]
    chunks = []
    for place, one in enumerate(params):
        tokens = random_tokens(1 if place % 3 else 20, place)
        blocks = blocks_for(executor, len(tokens), 2 * place)
        chunks.append(Chunk(place, tokens, 0, blocks, one, 1, array("i", tokens) if one.shaping else None))
    together = executor.run(Plan(tuple(chunks)))
    backwards = executor.run(Plan(tuple(reversed(chunks))))
    alone = [executor.run(Plan((chunk,)))[0] for chunk in chunks]
    assert together == alone == list(reversed(backwards))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (2.0, 12, 1.0, 0.0),
        (1.5, 0, 0.8, 0.0),
        (2.0, 0, 1.0, 0.1),
        (2.0, 40, 0.9, 0.02),
    ],
)
def test_frequencies_are_the_probabilities(
    executor: AnyExecutor, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Pearson's chi-square on 2,048 draws with one seed, against transformers' warpers. Tokens that transformers leaves
    out must not come at all; those expected fewer than five times count as one."""
    tokens, draws = random_tokens(1, 5), 2048
    logits = last_logits(executor, tokens)
    params = SamplingParams(temperature, top_p, top_k, seed=7, min_p=min_p)
    seen: Counter[int] = Counter()
    for first in range(0, draws, BLOCKS):
        chunks = (Chunk(i, tokens, 0, (i,), params, first + i) for i in range(BLOCKS))
        seen.update(sampled.token for sampled in executor.run(Plan(tuple(chunks))))
    expected = draws * probabilities(logits, temperature, top_k, top_p, min_p)
    counts = np.array([seen[token] for token in range(VOCABULARY)])
    assert not counts[expected == 0].any()
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert len(wanted) > 3
    statistic = float((np.square(observed - wanted) / wanted).sum())
    degrees = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
    assert 0.001 < p_value < 0.999


def test_shaping_steers_a_text(executor: AnyExecutor) -> None:
    prompt = random_tokens(6)

    def text(shaping: Shaping | None, count: int = 12) -> list[int]:
        tokens = array("i", prompt)
        for index in range(count):
            tokens.append(draw(executor, tokens, SamplingParams(temperature=0, shaping=shaping), index))
        return tokens[len(prompt) :].tolist()

    plain = text(None)
    assert text(Shaping(logit_bias=((60, 100.0),))) == [60] * 12
    without = text(Shaping(logit_bias=tuple((token, -100.0) for token in set(plain))))
    assert not set(without) & set(plain)
    # Two tokens far above all others: the penalty counts each draw, so they take turns once it has eaten the lead.
    lead = Shaping(logit_bias=((60, 100.0), (61, 90.0)), frequency_penalty=2.0)
    assert Counter(text(lead, 40)).keys() == {60, 61}
    assert abs(Counter(text(lead, 40))[60] - Counter(text(lead, 40))[61]) < 12
    # A presence penalty comes off once, whatever the count.
    assert set(text(Shaping(logit_bias=((60, 100.0), (61, 90.0)), presence_penalty=2.0))) == {60}
    # A repetition penalty sees the prompt as well.
    forced = Shaping(logit_bias=((prompt[0], 100.0), (61, 20.0)), repetition_penalty=100.0)
    assert text(forced, 1) == [61]


def test_sampled_names_the_request(executor: AnyExecutor) -> None:
    assert executor.run(Plan((Chunk(2**40, (1,), 0, (0,), greedy_without(*range(1, VOCABULARY))),))) == [
        Sampled(2**40, 0)
    ]


def test_memory_that_cannot_be_had_is_said(executor: AnyExecutor, tmp_path: Path, name: str) -> None:
    another = make(name, tmp_path, tiny(layers=1))
    with pytest.raises(
        ExecutorError, match=re.escape("cannot reserve") + r" \d+ KV blocks \(\d+ bytes of address space\)"
    ):
        another.reserve(2**62 // another.bytes_per_block)


# Log-probabilities.


@settings(max_examples=60, deadline=None)
@given(
    params=samplings, index=st.integers(0, 30), data=st.integers(0, 1000), num_top=st.sampled_from((0, 1, 5, 20, 400))
)
def test_logprobs_are_the_log_softmax_of_the_models_own_logits(
    executor: AnyExecutor, params: SamplingParams, index: int, data: int, num_top: int
) -> None:
    """Whatever bias, penalties and temperature make of the draw, which asking for them does not change."""
    tokens = random_tokens(40, data)
    expected = torch.log_softmax(torch.tensor(last_logits(executor, tokens), dtype=torch.float64), 0).numpy()
    history = array("i", tokens)
    asked = Chunk(4, tokens, 0, blocks_for(executor, 40), replace(params, logprobs=num_top), index, history)
    silent = replace(asked, request_id=5, blocks=blocks_for(executor, 40, 60), sampling=params)
    with_logprobs, without = executor.run(Plan((asked, silent)))
    assert without == Sampled(5, with_logprobs.token)
    found = with_logprobs.logprobs
    assert found is not None
    assert found.drawn == pytest.approx(expected[with_logprobs.token], abs=2e-5)
    assert len(found.top) == min(num_top, VOCABULARY)
    ranked = sorted(range(VOCABULARY), key=lambda token: (-expected[token], token))
    np.testing.assert_allclose([value for _, value in found.top], expected[ranked[:num_top]], atol=2e-5)
    np.testing.assert_allclose([expected[token] for token, _ in found.top], expected[ranked[:num_top]], atol=2e-5)


def mask_of(tokens: Iterable[int]) -> bytes:
    bits = np.zeros(mask_bytes(VOCABULARY) * 8, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@given(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from((0.0, 0.05, 1.0, 2.0)),
        top_p=st.sampled_from((1.0, 0.5, 1e-6)),
        top_k=st.sampled_from((0, 1, 5, 200)),
        min_p=st.sampled_from((0.0, 0.2)),
        seed=st.integers(0, 2**64 - 1),
        shaping=st.sampled_from((None, Shaping(logit_bias=((3, 50.0), (7, -50.0)), repetition_penalty=1.2))),
    ),
    st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=VOCABULARY),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_masked_request_draws_from_its_mask_alone_and_others_draw_as_ever(
    executor: AnyExecutor, params: SamplingParams, allowed: set[int], data: int
) -> None:
    tokens = random_tokens(12, data)
    history = array("i", tokens)
    masked = Chunk(4, tokens, 0, blocks_for(executor, 12), replace(params, logprobs=2), 0, history)
    other = replace(masked, request_id=5, blocks=blocks_for(executor, 12, 60))
    chunks = (masked, other)
    drawn, free = executor.run(Plan(chunks, {4: mask_of(allowed)}))
    assert drawn.token in allowed
    assert free == executor.run(Plan(chunks))[1]
    assert drawn.logprobs is not None
    assert free.logprobs is not None
    assert drawn.logprobs.top == free.logprobs.top  # of the model's own logits
    assert executor.run(Plan(chunks, {4: mask_of(range(VOCABULARY))}))[0].token == free.token


def test_masked_draws_have_the_probabilities_of_what_is_left(executor: AnyExecutor) -> None:
    tokens, allowed = random_tokens(20), list(range(0, VOCABULARY, 5))
    logits = np.full(VOCABULARY, -np.inf, np.float32)
    logits[allowed] = last_logits(executor, tokens)[allowed]
    expected = probabilities(logits, 0.7, 20, 0.9)
    chunk = Chunk(1, tokens, 0, blocks_for(executor, 20), SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=3))
    masks = {1: mask_of(allowed)}
    seen = Counter(executor.run(Plan((replace(chunk, sample_index=i),), masks))[0].token for i in range(600))
    assert set(seen) <= set(np.flatnonzero(expected).tolist())
    frequencies = np.array([seen[token] for token in range(VOCABULARY)]) / 600
    np.testing.assert_array_less(np.abs(frequencies - expected), 4.5 * np.sqrt(expected / 600) + 1e-9)


def test_a_mask_of_the_wrong_length_is_refused(executor: AnyExecutor) -> None:
    chunk = Chunk(1, random_tokens(5), 0, (0,), SamplingParams())
    with pytest.raises(ExecutorError, match=r"a mask of 3 bytes; a vocabulary of 262 tokens needs 36"):
        executor.run(Plan((chunk,), {1: b"abc"}))


def test_a_greedy_token_is_the_most_likely_one_also_among_equals(tmp_path: Path, name: str) -> None:
    rows = np.zeros((VOCABULARY, 192), np.float32)
    rows[[9, 40, 200]] = np.random.default_rng(0).standard_normal(192, np.float32)
    rows[[17, 41, 250]] = -rows[9]
    executor = make(name, tmp_path, tiny(extra_tensors={"output.weight": rows}))
    chunk = Chunk(1, random_tokens(5), 0, (0,), SamplingParams(temperature=0, logprobs=4))
    (sampled,) = executor.run(Plan((chunk,)))
    assert sampled.logprobs is not None
    tokens = [token for token, _ in sampled.logprobs.top]
    assert tokens[:3] == sorted(tokens[:3])
    assert set(tokens[:3]) in ({9, 40, 200}, {17, 41, 250})
    assert tokens[3] == 0  # the first of all that are left, which are equal
    assert (sampled.token, sampled.logprobs.drawn) == sampled.logprobs.top[0]
