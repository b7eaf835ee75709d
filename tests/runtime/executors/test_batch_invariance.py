"""How often a greedy prompt has another text among 31 others than alone. The CPU engine: never, by construction."""

import numpy as np
import pytest
import requantised
from generating import AnyExecutor, generate, sized

from busload_kernels.cpu import library
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.load import load_weights

BATCH, ALONE, NEW_TOKENS = 32, 6, 10


def divergences(executor: AnyExecutor) -> int:
    """Of `ALONE` prompts with random tokens, whose texts are hard to predict and full of near ties."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(100, 49_000, int(rng.integers(1, 24))).tolist() for _ in range(BATCH)]
    together = generate(sized(executor, 128), prompts, NEW_TOKENS)
    return sum(generate(executor, [prompts[i]], NEW_TOKENS)[0] != together[i] for i in range(ALONE))


def test_a_greedy_text_does_not_depend_on_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_weights(requantised.SOURCE)
    isas = library.usable_isas()[:-1] or library.usable_isas()  # portable is slow, and conformance tests have it
    executors: dict[str, AnyExecutor] = {f"cpu-{isa}": CpuExecutor(weights, isa=isa) for isa in isas}
    # For comparison: fp32 sums in an order that BLAS chooses by the shape of the product.
    executors["reference"] = ReferenceExecutor(weights)
    for name, executor in executors.items():
        diverged = divergences(executor)
        with capsys.disabled():
            print(f"\n{name}: {diverged} of {ALONE} greedy texts diverge among {BATCH - 1} others", end="")
        assert diverged == 0 or name == "reference"
