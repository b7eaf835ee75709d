"""What the tests measured of each kernel, for the table that they print at their end. Typed in nowhere."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.uint8: "int4",
}


@dataclass
class Measured:
    """Relative errors by (kernel, types): how many, and the largest. `subject` is what is tested now."""

    subject: tuple[str, str] = ("", "")
    found: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def begin(self, module: str, parameters: Iterable[object]) -> None:
        """A test of `tests/kernels/gpu/test_gpu_KERNEL.py`; types are those among its parameters."""
        types = [SHORT[one] for one in parameters if isinstance(one, torch.dtype) and one in SHORT]
        self.subject = module.removeprefix("test_gpu_"), " x ".join(types) or "any"

    def note(self, error: float) -> None:
        self.found.setdefault(self.subject, []).append(error)

    def table(self) -> list[str]:
        """A line for each kernel and types, the largest error last."""
        lines = [f"{'kernel':<20} {'types':<14} {'compared':>8}  largest relative error in the interpreter"]
        for (kernel, types), errors in sorted(self.found.items()):
            lines.append(f"{kernel:<20} {types:<14} {len(errors):>8}  {max(errors):.1e}")
        return lines


MEASURED = Measured()
