"""RMSNorm against torch's, with residual and quantised output, and what it says about bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import EIGHT_BIT_LIMIT, TOLERANCE, check_quantised, poisoned, relative_error

from busload_kernels.gpu.errors import GpuKernelError
from busload_kernels.gpu.norm import rms_norm

EPS = 1e-5


def tensors(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn((rows, hidden), generator=generator).to(dtype) for _ in range(2))
    return x, residual, (1 + torch.randn(hidden, generator=generator) / 4).to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), (x.shape[1],), weight.double(), EPS)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), hidden=st.integers(1, 700), dtype=st.sampled_from(list(TOLERANCE)), seed=st.integers(0))
def test_norm_is_that_of_torch(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    x, _, weight = tensors(rows, hidden, dtype, seed % 2**31)
    out = rms_norm(x, weight, EPS, poisoned(rows, hidden, dtype=dtype))
    assert relative_error(out, reference(x, weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_residual_is_added_and_written_back(dtype: torch.dtype) -> None:
    x, residual, weight = tensors(3, 96, dtype, 1)
    total = x + residual
    out = rms_norm(x, weight, EPS, poisoned(3, 96, dtype=dtype), residual=residual)
    assert torch.equal(residual, total)
    assert relative_error(out, reference(total, weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("quantised", EIGHT_BIT_LIMIT)
def test_quantised_output_uses_the_whole_range(quantised: torch.dtype) -> None:
    x, _, weight = tensors(4, 576, torch.float32, 2)
    x[2] = 0
    scales = torch.full((4,), torch.nan)
    out = rms_norm(x, weight, EPS, poisoned(4, 576, dtype=quantised), scales=scales)
    assert not out[2].float().any()
    rows = [0, 1, 3]
    check_quantised(out[rows], scales[rows], reference(x, weight)[rows])
    assert out[rows].float().abs().amax(1).tolist() == [EIGHT_BIT_LIMIT[quantised]] * 3


def test_no_rows_launch_nothing() -> None:
    x, _, weight = tensors(1, 64, torch.float32, 3)
    assert rms_norm(x[:0], weight, EPS, x[:0].clone()).shape == (0, 64)


def test_messages_name_the_tensor_and_what_is_allowed() -> None:
    x, residual, weight = tensors(2, 64, torch.float16, 4)
    out = torch.empty_like(x)
    with pytest.raises(GpuKernelError, match=r"weight has shape \[32\]; it must be \[64\]"):
        rms_norm(x, weight[:32].clone(), EPS, out)
    with pytest.raises(GpuKernelError, match="x is int32; allowed: float32, float16, bfloat16"):
        rms_norm(x.int(), weight, EPS, out)
    with pytest.raises(GpuKernelError, match="residual is float32; allowed: float16"):
        rms_norm(x, weight, EPS, out, residual=residual.float())
    with pytest.raises(GpuKernelError, match=r"scales are missing: int8 values need fp32 scales \[2\]"):
        rms_norm(x, weight, EPS, out.to(torch.int8))
    with pytest.raises(GpuKernelError, match="scales are given for float16 values"):
        rms_norm(x, weight, EPS, out, scales=torch.empty(2))
    with pytest.raises(GpuKernelError, match=r"x has strides \[1, 2\] for shape \[2, 64\]; it must be contiguous"):
        rms_norm(x.T.contiguous().T, weight, EPS, out)
    with pytest.raises(GpuKernelError, match="x starts 2 bytes past a multiple of 16"):
        rms_norm(torch.empty(129, dtype=torch.float16)[1:].view(2, 64), weight, EPS, out)
    with pytest.raises(GpuKernelError, match="rows of 65536; a row may have 1 to 32768 values"):
        rms_norm(torch.empty(1, 65536), torch.empty(65536), EPS, torch.empty(1, 65536))
