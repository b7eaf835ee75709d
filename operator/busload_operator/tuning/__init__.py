"""The pure tuning core: from counters to at most one change, with its reason, prediction and outcome."""

from busload_operator.tuning.counters import SAMPLES, Counters, CountersError, counters_from_samples
from busload_operator.tuning.state import State
from busload_operator.tuning.step import step
from busload_operator.tuning.types import (
    Bottleneck,
    Bounds,
    Decision,
    Inputs,
    Knob,
    Law,
    Mode,
    Objectives,
    Observed,
    Outcome,
    PodSample,
    Prediction,
    Range,
    Reason,
    Result,
    Scaling,
    Trial,
    Verdict,
)

__all__ = [
    "SAMPLES",
    "Bottleneck",
    "Bounds",
    "Counters",
    "CountersError",
    "Decision",
    "Inputs",
    "Knob",
    "Law",
    "Mode",
    "Objectives",
    "Observed",
    "Outcome",
    "PodSample",
    "Prediction",
    "Range",
    "Reason",
    "Result",
    "Scaling",
    "State",
    "Trial",
    "Verdict",
    "counters_from_samples",
    "step",
]
