"""A histogram that is filled once per token."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from busload_runtime.contract import Metric


class Histogram(Collector):
    """Counts of values at most as large as each bound, for one thread and without labels.

    The client library's own takes two locks for each value and looks for the bucket in Python: as much work as all
    else that is done for a token.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._bounds = (*metric.buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Family]:
        totals = accumulate(self._counts)
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, totals, strict=True))
        yield HistogramMetricFamily(self._metric.name, self._metric.help, buckets=buckets, sum_value=self._sum)
