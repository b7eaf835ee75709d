"""Cases of the check for GPUs (e2e/gpu), run here in the interpreter: they pass what is right and not what is wrong.

The interpreter has no bf16, so fp16 stands for it.
"""

import pytest
import torch

from e2e.gpu import cases
from e2e.gpu.place import FP16, INT8, Place

CASES = {
    "norm": lambda place: cases.norm(576, FP16, INT8, place),
    "rope_write": lambda place: cases.rope_write(64, 3, FP16, INT8, False, place),
    "decode_attention": lambda place: cases.decode((1, 64, 130, 0), 2, 64, 3, FP16, INT8, place),
    "prefill_attention": lambda place: cases.prefill(((1, 40), (17, 90)), 2, 64, 3, FP16, INT8, place),
    "linear": lambda place: cases.layer("w16a16 fp16", 17, 192, 128, True, place),
    "sampling": lambda place: cases.draw(1000, False, place),
}


@pytest.mark.parametrize("name", CASES)
def test_a_right_result_passes_and_a_wrong_one_does_not(name: str) -> None:
    work = CASES[name](Place("cpu"))
    found = work.call()
    assert work.error(found) <= (0.02 if name in ("norm", "rope_write") else 2e-3)
    if name == "sampling":
        assert work.error((found + 1) % 1000) > 0.5
    else:
        assert work.error(found.float() * 1.2) > 0.1
        found[-1 if name != "decode_attention" else 0] = 0 if found.dtype == torch.int8 else torch.nan
        assert not work.error(found) <= 0.02
