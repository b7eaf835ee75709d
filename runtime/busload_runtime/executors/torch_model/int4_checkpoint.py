"""Matrices of GPTQ (Frantar et al. 2022) and AWQ (Lin et al. 2023) checkpoints, unpacked.

Both pack eight 4-bit numbers in an int32 and store matrices [inputs, outputs] with a scale and a zero for each group of
inputs and output: value = (number - zero) * scale. GPTQ packs along the inputs, and stores zero - 1 (format `gptq`; not
`gptq_v2`); AWQ packs along the outputs, in the order `_AWQ_ORDER`.

Our 4-bit kernels have no zeros: a matrix whose zeros are all 8 keeps its 4 bits, another becomes floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from busload_runtime.executors.torch_model.loading import Int4, Matrix
from busload_runtime.executors.torch_model.ops import Tensor
from busload_runtime.model.errors import ModelError

_PACKED = 8
"""Numbers in an int32."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where output 0, 1, ... of eight lies."""
_KERNEL_GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """How the matrices of a checkpoint are packed."""

    method: str
    group: int
    """Inputs that share a scale; -1: all."""
    zero_offset: int
    """What is added to stored zeros."""

    @property
    def parts(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales", *(("g_idx",) if self.method == "gptq" else ()))

    def shapes(self, where: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Of the parts of a matrix that must be there."""
        group = inputs if self.group == -1 else self.group
        if inputs % group or inputs % _PACKED or outputs % _PACKED:
            raise ModelError(f"{where} is [{outputs}, {inputs}]; 4-bit matrices have whole groups of {group} and of 8")
        packed = (inputs // _PACKED, outputs) if self.method == "gptq" else (inputs, outputs // _PACKED)
        return {
            "qweight": packed,
            "qzeros": (inputs // group, outputs // _PACKED),
            "scales": (inputs // group, outputs),
        }

    def unpack(self, where: str, parts: Mapping[str, Tensor]) -> Matrix:
        """[outputs, inputs], as `Int4` where the kernels can compute with it."""
        along_inputs = self.method == "gptq"
        numbers = _unpack(parts["qweight"], along_inputs, _order(self.method))
        zeros = _unpack(parts["qzeros"], False, _order(self.method)) + self.zero_offset
        scales = parts["scales"]
        group = len(numbers) // len(scales)
        place = torch.arange(len(numbers)) // group
        if "g_idx" in parts and not torch.equal(parts["g_idx"].long(), place):
            raise ModelError(
                f"{where} is quantised in another order of inputs (desc_act with g_idx), which is not computed; choose "
                "a checkpoint without"
            )
        if (zeros == _PACKED).all() and group in _KERNEL_GROUPS:
            return Int4((numbers - _PACKED).to(torch.int8).t().contiguous(), scales.t().contiguous())
        return ((numbers - zeros[place]).float() * scales.float()[place]).t().contiguous()


def packing_of(file: str, config: Mapping[str, Any] | None, allow_int4: bool) -> PackedInt4 | None:
    """What `quantization_config` of `file` says. Raises `ModelError` for what is not read, and for 4 bits that nobody
    asked for."""
    if config is None:
        return None
    method, bits, group = config.get("quant_method"), config.get("bits"), config.get("group_size", -1)
    if method not in ("gptq", "awq"):
        raise ModelError(
            f"{file}: quant_method is {method!r:.80}; supported: gptq, awq; or take the unquantised model, which "
            "--weight-precision rounds at load"
        )
    if bits != 4:
        raise ModelError(f"{file}: bits is {bits!r:.80}; {method} is read with 4")
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
        raise ModelError(f"{file}: group_size is {group!r:.80}; must be a number above 0, or -1")
    if method == "awq" and config.get("version", "gemm") != "gemm":
        raise ModelError(f"{file}: version is {config['version']!r:.80}; awq is read in version gemm")
    if not allow_int4:
        raise ModelError(
            f"{file}: the weights are INT4 ({method}, groups of {group}). 4 bits change answers in ways that show in "
            "no metric, so they are served only where an evaluation passed: give --allow-int4 if it did, or take the "
            "unquantised model, which is served in INT8"
        )
    return PackedInt4(method, group, 1 if method == "gptq" and config.get("checkpoint_format") != "gptq_v2" else 0)


def _order(method: str) -> tuple[int, ...]:
    return _AWQ_ORDER if method == "awq" else tuple(range(_PACKED))


def _unpack(packed: Tensor, along_rows: bool, order: tuple[int, ...]) -> Tensor:
    """Numbers 0 to 15 [rows, columns] int16, of which eight in a row (or column) share an int32."""
    shifts = 4 * torch.tensor(order, dtype=torch.int32)
    numbers = (packed.to(torch.int32)[..., None] >> shifts & 15).to(torch.int16)
    if along_rows:
        return numbers.transpose(1, 2).flatten(0, 1)
    return numbers.flatten(1)
