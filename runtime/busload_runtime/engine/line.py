"""The requests of one tenant that never ran, and which of them is next. Pure; O(log n) per request and change.

With a time to first token objective and a step law known: those that can still make it, in order of arrival, and
behind them those that cannot, in order of arrival too (late-last). Serving a lost request first makes the next ones
miss as well, so under a burst first come, first served loses nearly all. Nobody starves: who has waited ten objectives
(and 45 s at least) goes before everybody else again. Without objective or law: in order of arrival.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush

from busload_runtime.contract import Pace
from busload_runtime.engine.request import Request

PATIENCE_OBJECTIVES = 10
PATIENCE_SECONDS = 45.0
"""Long enough that more replicas may be there by then, as who is served late takes the place of one in time; and short
of the 60 s after which proxies in front of a service commonly give up (nginx `proxy_read_timeout`, AWS load balancers).
"""


class Line:
    """Call with times that never fall: who was found late stays late."""

    def __init__(self, pace: Pace) -> None:
        self._timely: OrderedDict[int, Request] = OrderedDict()
        """In order of arrival."""
        self._late: list[Request] = []
        """In order of arrival."""
        self._lost_at: list[tuple[float, int, int]] = []
        """Heap of (when it turns late, order, id); some are no longer here."""
        self._pace = pace

    def __len__(self) -> int:
        return len(self._timely) + len(self._late)

    def in_order(self) -> list[Request]:
        """All, in the order they would be taken if time stood still and nobody ran out of patience."""
        return [*self._timely.values(), *self._late]

    def set_pace(self, pace: Pace) -> None:
        """Under another objective or law everybody is judged anew, at the next `next`."""
        self._pace = pace
        waiting = sorted(self.in_order(), key=_arrival)
        self._timely = OrderedDict((request.request_id, request) for request in waiting)
        self._late.clear()
        self._lost_at.clear()
        if self._sorts:
            self._lost_at = [(self._turns_late(request), request.order, request.request_id) for request in waiting]
            heapify(self._lost_at)

    def add(self, request: Request) -> None:
        """Later in the order of arrival than all before."""
        self._timely[request.request_id] = request
        if self._sorts:
            heappush(self._lost_at, (self._turns_late(request), request.order, request.request_id))

    def remove(self, request: Request) -> None:
        if self._timely.pop(request.request_id, None) is None:
            del self._late[bisect_left(self._late, request.order, key=_arrival)]

    def next(self, now: float) -> Request:
        """Who is to start next; there must be somebody."""
        while self._lost_at and self._lost_at[0][0] < now:
            request = self._timely.pop(heappop(self._lost_at)[2], None)
            if request is not None:
                insort(self._late, request, key=_arrival)
        if self._late and (not self._timely or self._loses_patience(self._late[0]) < now):
            return self._late[0]
        return next(iter(self._timely.values()))

    def next_stays_until(self) -> float:
        """Up to this time `next` gives the same as now, while nobody comes or goes."""
        if not (self._timely and self._sorts):
            return math.inf
        patience = self._loses_patience(self._late[0]) if self._late else math.inf
        return min(self._lost_at[0][0], patience)

    @property
    def _sorts(self) -> bool:
        return self._pace.time_to_first_token is not None and self._pace.law is not None

    def _turns_late(self, request: Request) -> float:
        """When its first token can no longer come in time: two steps, in which its prompt is computed, are predicted
        beside nothing else, so that nobody is given up who could still make it."""
        objective, law = self._pace.time_to_first_token, self._pace.law
        assert objective is not None
        assert law is not None
        return request.arrived + objective - 2 * law.a - law.d * request.prompt_length

    def _loses_patience(self, request: Request) -> float:
        objective = self._pace.time_to_first_token
        assert objective is not None
        return request.arrived + max(PATIENCE_OBJECTIVES * objective, PATIENCE_SECONDS)


def _arrival(request: Request) -> int:
    return request.order
