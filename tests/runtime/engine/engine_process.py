"""The real engine process with a scripted executor, for faults and timings a real model cannot give on demand.

Run as `python engine_process.py FAULT FLAGS...` with the flags of the engine process; FAULT is none, load, memory, step
or slow.
"""

import sys
import time
from collections.abc import Sequence

from hashing_executor import HashingExecutor

from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.process import main
from busload_runtime.model.errors import ModelError


class ScriptedExecutor(HashingExecutor):
    fault = "none"
    requests = 0
    """Steps of real requests."""

    def run(self, plan: Plan) -> Sequence[Sampled]:
        # Steps that the engine tries before it is ready compute token 0 only.
        self.requests += any(any(chunk.tokens) for chunk in plan.chunks)
        if self.fault == "step" and self.requests >= 3:
            raise FloatingPointError("scripted\nfault")
        if self.fault == "slow":
            time.sleep(0.02)
        return super().run(plan)


def load(name: str, source: str) -> ScriptedExecutor:
    if ScriptedExecutor.fault == "load":
        raise ModelError(f"{source}: scripted model error")
    if ScriptedExecutor.fault == "memory":
        raise MemoryError
    return ScriptedExecutor(block_size=16, context_length=4096)


if __name__ == "__main__":
    ScriptedExecutor.fault = sys.argv[1]
    sys.exit(main(sys.argv[2:], load))
