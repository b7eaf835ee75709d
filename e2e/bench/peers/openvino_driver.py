"""Runs in the peer's own environment, which has no busload: serves one line of work after the other.

openvino_driver.py MODEL.gguf MOST_AT_A_TIME
stdin:  the fields of `e2e.bench.peers.work.Work`, one JSON object per line
stdout: {"began": wall clock, "outcomes": [...]}, in the fields of `busload_runtime.bench.outcome.Outcome`
"""

import json
import sys
import time
from typing import Any

import numpy
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

# What the library itself calls its setting for mixing prompts and decoding in one step, with the size its samples use.
TOKENS_PER_STEP = 256
CACHE_GB = 1


def main() -> None:
    path, most = sys.argv[1], int(sys.argv[2])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = most
    scheduler.cache_size = CACHE_GB
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens = TOKENS_PER_STEP
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU")
    for line in sys.stdin:
        work = json.loads(line)
        run(pipeline, work | {"concurrency": 1, "requests": 1, "seed": work["seed"] + 1})  # warm up
        print(json.dumps(run(pipeline, work)), flush=True)


def run(pipeline: Any, work: dict[str, Any]) -> dict[str, Any]:
    """A closed loop: so many requests at a time, the next one when one has ended."""
    rng = numpy.random.default_rng(work["seed"])
    shape = (work["requests"], 1, work["input_tokens"])
    prompts = [openvino.Tensor(ids) for ids in rng.integers(work["first_id"], work["last_id"], shape)]
    sampling = openvino_genai.GenerationConfig()
    sampling.max_new_tokens = sampling.min_new_tokens = work["output_tokens"]
    sampling.ignore_eos, sampling.do_sample = True, False
    began, zero = time.time(), time.perf_counter()
    outcomes: list[dict[str, Any]] = []
    running: dict[int, Any] = {}
    while running or len(outcomes) < len(prompts):
        while len(running) < work["concurrency"] and len(outcomes) < len(prompts):
            at, number = time.perf_counter() - zero, len(outcomes)
            fixed = {"input_tokens": work["input_tokens"], "output_tokens": 0, "from_usage": True, "status": 200}
            outcomes.append({"intended": at, "sent": at, "end": 0.0, "chunks": [], **fixed})
            running[number] = pipeline.add_request(number, prompts[number], sampling)
        pipeline.step()
        now = time.perf_counter() - zero
        for number, handle in list(running.items()):
            if handle.can_read():
                outcomes[number]["chunks"].append(now)
                outcomes[number]["output_tokens"] += sum(len(out.generated_ids) for out in handle.read().values())
            if outcomes[number]["output_tokens"] >= work["output_tokens"]:
                outcomes[number]["end"] = now
                del running[number]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return {"began": began, "outcomes": outcomes}


if __name__ == "__main__":
    main()
