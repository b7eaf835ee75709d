"""How fast the model could run on this machine: bytes and operations per token against measured limits.

    python -m e2e.bench.roofline [--model M] [--batches 1,8,32] [--contexts 256,4096]

A step reads all weights once, and keys and values of each request's context. It does one multiply-add per weight and
row, and per token of context one for each element of each query head, for keys and for values. It cannot take less
than the larger of bytes over read bandwidth and multiply-adds over the 8-bit peak, both measured here with all threads
(Williams, Waterman and Patterson, "Roofline", CACM 2009).
"""

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.model.load import load_weights
from e2e.bench import machine

_PEAK = Path(__file__).with_name("peak.c")
_ROUNDS = 20_000_000


@dataclass(frozen=True)
class Model:
    """Bytes and multiply-adds of one step."""

    weight_bytes: float
    kv_bytes_per_token: float
    body: int
    """Multiply-adds per row in the layers."""
    head: int
    """Multiply-adds per sampled row: hidden size times vocabulary."""
    attention: int
    """Multiply-adds per row and token of context."""

    def step_bytes(self, batch: int, context: int) -> float:
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def step_operations(self, batch: int, context: int) -> float:
        return batch * (self.body + self.head + context * self.attention)

    def prefill_operations(self, tokens: int) -> float:
        """A prompt alone: every token attends to half of the prompt on average, one row is sampled."""
        return tokens * (self.body + tokens / 2 * self.attention) + self.head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--contexts", type=_numbers, default=[256, 4096])
    parser.add_argument("--prefill", type=_numbers, default=[128, 2048])
    options = parser.parse_args()
    weights = load_weights(options.model)
    config = weights.config
    executor = CpuExecutor(weights)
    rows = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    model = Model(
        weight_bytes=executor.weight_bytes,
        kv_bytes_per_token=executor.bytes_per_block / executor.block_size,
        body=config.num_layers * (rows + 3 * config.hidden_size * config.ffn_size),
        head=config.hidden_size * config.vocab_size,
        attention=config.num_layers * 2 * config.num_heads * config.head_dim,
    )
    read = max(executor.measure_bandwidth(copy=False) for _ in range(3))
    name, peak = peak_operations(executor.threads)
    print(f"{machine.describe()}\n{executor.isa}, {executor.threads} threads")
    print(f"read bandwidth {read / 1e9:.1f} GB/s; {name}: {peak / 1e9:,.0f} billion 8-bit multiply-adds/s")
    print(
        f"a step reads {model.weight_bytes / 1e6:.1f} MB of weights and {model.kv_bytes_per_token / 1e3:.2f} kB per "
        f"token of context; multiply-adds per row: {model.body / 1e6:.1f} M in the layers, {model.head / 1e6:.1f} M in "
        f"the head, {model.attention / 1e3:.1f} k per token of context"
    )
    print(f"{'':>20} {'MB read':>9} {'M madd':>9} {'by bytes':>10} {'by madd':>10} {'limit':>13}")
    for context in options.contexts:
        for batch in options.batches:
            moved, operations = model.step_bytes(batch, context), model.step_operations(batch, context)
            _line(f"decode {batch} at {context}", batch, moved, operations, read, peak)
    for tokens in options.prefill:
        _line(f"prefill {tokens}", tokens, model.weight_bytes, model.prefill_operations(tokens), read, peak)


def _line(name: str, tokens: int, moved: float, operations: float, read: float, peak: float) -> None:
    by_bytes, by_operations = moved / read, operations / peak
    print(
        f"{name:>20} {moved / 1e6:9.1f} {operations / 1e6:9.0f} {by_bytes * 1e3:7.2f} ms {by_operations * 1e3:7.2f} ms "
        f"{tokens / max(by_bytes, by_operations):7.0f} tok/s"
    )


def peak_operations(threads: int) -> tuple[str, float]:
    """Name of the instructions and 8-bit multiply-adds per second of `threads` threads; the best of three.

    Per second of CPU time, so that others on the machine do not lower it.
    """
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "peak.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-march=native", "-shared", "-fPIC", "-o", built, _PEAK], check=True)
        library = ctypes.CDLL(str(built))
    library.peak_run.argtypes, library.peak_run.restype = [ctypes.c_int64], ctypes.c_int64
    library.peak_instructions.restype = ctypes.c_char_p
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            begin = time.process_time()
            done = sum(pool.map(library.peak_run, [_ROUNDS] * threads))  # ctypes lets go of the interpreter's lock
            best = max(best, done / (time.process_time() - begin) * threads)
    return library.peak_instructions().decode(), best


def _numbers(text: str) -> Sequence[int]:
    return [int(word) for word in text.split(",") if word]


if __name__ == "__main__":
    main()
