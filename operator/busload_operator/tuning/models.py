"""What the bundled models need, so that a service of one is planned before any pod exists.

These are the figures that `busload_operator.plan.gguf_facts` reads from the models' files (a test compares them); the
operator's image has no model files.
"""

from busload_operator.tuning.planner import ModelFacts, StepMemory

BUNDLED: dict[str, ModelFacts] = {
    "smollm2-135m-instruct": ModelFacts(
        name="smollm2-135m-instruct",
        weight_bytes=96_436_224,
        step_weight_bytes=96_436_224,
        kv_bytes_per_token=12_240,
        block_tokens=32,
        context_length=8192,
        step_memory=StepMemory(
            fixed=593_664,
            per_thread=428_664,
            per_token=9_352,
            per_token_and_thread=256,
            tokens_at_once=672,
            per_request=198_912,
            per_row_of_tokens=3_696,
            per_row_of_requests=792,
            panel=48,
        ),
        overhead_bytes=217_055_232,
    ),
}


def _smollm2_on_gpu(weight_bytes: int, step_weight_bytes: int) -> ModelFacts:
    return ModelFacts(
        name="smollm2-135m-instruct",
        weight_bytes=weight_bytes,
        step_weight_bytes=step_weight_bytes,
        kv_bytes_per_token=12_240,
        block_tokens=64,
        context_length=8192,
        step_memory=StepMemory(per_token=15_744, per_request=393_216),
        overhead_bytes=1_610_612_736,
    )


BUNDLED_ON_GPU: dict[int, dict[str, ModelFacts]] = {
    8: {"smollm2-135m-instruct": _smollm2_on_gpu(194_089_088, 135_368_832)},
    16: {"smollm2-135m-instruct": _smollm2_on_gpu(271_127_168, 269_030_016)},
}
"""The same on a GPU, by bits of a weight; keys and values of 8 bits."""
