"""Compiles a recorded launch for a GPU that need not be there, and reads what the machine code uses.

`triton.compile` takes a target; the wheel carries `ptxas` and `cuobjdump`. The signature is made from the launch as
Triton's own launcher would: pointers by tensor type and aligned to 16 bytes (`checks.check_tensor` holds them to
that), None and compile-time parameters folded in. Integers are either compile-time or declared `do_not_specialize`;
anything else would compile again in the middle of serving, so it is an error here.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .errors import GpuKernelError
from .launch import Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Code:
    """What a compiled kernel uses."""

    registers: int
    """For each thread; the hardware has 255."""
    spills: int
    """Local memory instructions (LDL, STL): registers that did not fit."""
    shared_memory: int
    """Bytes for each program."""
    instructions: Mapping[str, int]
    """How many of each mnemonic with its modifiers, such as HMMA.16816.F32.BF16."""

    def count(self, pattern: str) -> int:
        """Instructions that the regular expression matches from their beginning."""
        return sum(number for name, number in self.instructions.items() if re.match(pattern, name))


def compile_launch(recorded: Launch, capability: int) -> Code:
    """Machine code of a launch for compute capability `capability` (80, 90, 100)."""
    if triton.knobs.runtime.interpret:
        raise GpuKernelError("TRITON_INTERPRET is set: kernels are interpreted, not compiled. Unset it here")
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(recorded.kernel.params):
        value = recorded.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif isinstance(value, int) and parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        else:
            raise GpuKernelError(
                f"{recorded.kernel.__name__}: argument {parameter.name} is {value!r}; it must be a tensor, a float, "
                "compile-time, or an integer declared do_not_specialize"
            )
    compiled = triton.compile(
        ASTSource(fn=recorded.kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": recorded.tile.num_warps,
            "num_stages": recorded.tile.num_stages,
            "enable_fp_fusion": True,
        },
    )
    return _read(compiled.asm["cubin"], compiled.metadata.shared)


def _read(cubin: bytes, shared_memory: int) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        listing = _cuobjdump("--dump-sass", file.name)
    found = re.search(r"REG:(\d+)", usage)
    if found is None:
        raise GpuKernelError(f"cuobjdump names no registers; it printed: {usage[:200]!r}")
    counts: dict[str, int] = {}
    for name in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing):
        counts[name] = counts.get(name, 0) + 1
    spills = sum(number for name, number in counts.items() if name.split(".")[0] in ("LDL", "STL"))
    return Code(int(found[1]), spills, shared_memory, counts)


def _cuobjdump(what: str, file: str) -> str:
    return subprocess.run(
        [_TOOLS / "cuobjdump", what, file], capture_output=True, text=True, check=True, timeout=120
    ).stdout
