"""Compiles the kernel variants that serving meets, for GPUs that need not be there, and holds each to its budgets.

    python -m busload_kernels.gpu.gate                the core variants, for every compute capability
    python -m busload_kernels.gpu.gate --all          all variants
    python -m busload_kernels.gpu.gate --match decode those with "decode" in their name

Exit code 1 if any variant spills registers, needs more of them or more shared memory than its budget, lacks an
instruction that it was written for, or does not compile.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from .aot import Code, compile_launch
from .variants import FP8, TENSOR_CORE, WIDE_ASYNC_COPY, WIDE_LOAD, Variant, all_variants

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have, by compute capability (CUDA C++ programming guide, technical specifications)."""
_SHOWN = {"tensor core": TENSOR_CORE, "wide async": WIDE_ASYNC_COPY, "wide load": WIDE_LOAD, "int to float": r"I2F"}


@dataclass(frozen=True, slots=True)
class Verdict:
    kernel: str
    variant: str
    capability: int
    registers: int
    register_budget: int
    spills: int
    shared_memory: int
    found: dict[str, int]
    problems: tuple[str, ...]


def judge(variant: Variant, capability: int, code: Code) -> tuple[str, ...]:
    """What is wrong with the code of a variant."""
    problems = []
    if code.spills:
        problems.append(f"{code.spills} local memory instructions: registers spill")
    if code.registers > variant.registers:
        problems.append(f"{code.registers} registers, budget {variant.registers}")
    if code.shared_memory > SHARED_MEMORY[capability]:
        problems.append(f"{code.shared_memory} bytes of shared memory, sm_{capability} has {SHARED_MEMORY[capability]}")
    needs = variant.needs + (variant.needs_on_sm_90 if capability == 90 else ())
    problems += [f"no instruction like {pattern}" for pattern in needs if not code.count(pattern)]
    return tuple(problems)


def supported(variant: Variant, capability: int) -> bool:
    """fp8 e4m3 conversions exist from sm_89 on; Triton refuses the type below."""
    tensors = variant.launch().arguments.values()
    return capability >= 89 or all(getattr(value, "dtype", None) != FP8 for value in tensors)


def check(variant: Variant, capability: int) -> Verdict:
    """Compiles one variant and judges it."""
    try:
        code = compile_launch(variant.launch(), capability)
        problems = judge(variant, capability, code)
    except Exception as error:  # whatever the compiler throws is this variant's problem, and the others go on
        code = Code(0, 0, 0, {})
        problems = (f"does not compile: {type(error).__name__}: {str(error).strip().splitlines()[-1]}",)
    found = {name: count for name, pattern in _SHOWN.items() if (count := code.count(pattern))}
    return Verdict(
        variant.kernel.strip("_").removesuffix("_kernel"),
        variant.name,
        capability,
        code.registers,
        variant.registers,
        code.spills,
        code.shared_memory,
        found,
        problems,
    )


def row(verdict: Verdict) -> str:
    found = ", ".join(f"{count} {name}" for name, count in verdict.found.items())
    shown = (
        f"{verdict.kernel:<16} {verdict.variant:<42} sm_{verdict.capability:<4} "
        f"{verdict.registers:>3}/{verdict.register_budget:<3} {verdict.spills:>6} {verdict.shared_memory:>7}  {found}"
    )
    return shown + "".join(f"\n    FAILED: {problem}" for problem in verdict.problems)


_variants: list[Variant] = []
"""In the workers, which are forked: a variant holds functions, so its number travels."""


def _check_number(number: int, capability: int) -> Verdict:
    return check(_variants[number], capability)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every variant, not only the core ones")
    parser.add_argument("--match", default="", help="regular expression on 'kernel variant'")
    parser.add_argument("--capability", type=int, nargs="+", choices=list(SHARED_MEMORY), default=list(SHARED_MEMORY))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    _variants[:] = [
        variant
        for variant in all_variants()
        if (chosen.all or variant.core) and re.search(chosen.match, f"{variant.kernel} {variant.name}")
    ]
    work = [
        (number, capability)
        for capability in chosen.capability
        for number, variant in enumerate(_variants)
        if supported(variant, capability)
    ]
    if not work:
        print(f"error: no variant matches {chosen.match!r} (with --all there are more)", file=sys.stderr)
        return 2
    print(f"{'kernel':<16} {'variant':<42} {'for':<7} {'registers':<7} {'spills'} {'shared':>6}  instructions found")
    with ProcessPoolExecutor(chosen.jobs, multiprocessing.get_context("fork")) as pool:
        verdicts = []
        for verdict in pool.map(_check_number, *zip(*work, strict=True)):
            print(row(verdict), flush=True)
            verdicts.append(verdict)
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{len(verdicts)} variants, {failed} failed, Triton {triton.__version__}, {time.monotonic() - began:.0f} s")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
