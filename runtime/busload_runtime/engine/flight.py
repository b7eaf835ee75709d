"""A step between its plan and its commit.

Where steps overlap, the next one is planned while one is in flight, on what is known of its end: how long each request
will be, but not by which token. These rules keep that safe:
- A row whose token is pending counts as one longer. The chunk that reads the token carries `plan.PENDING` in its place,
  and the executor puts in what its step before drew for the request.
- A request that must end by its length has no row in the next step. One that ends otherwise (a stop id, an abort) may
  have one, at most: what that draws is thrown away, and nobody else gets the request's blocks before its commit.
- Nothing is preempted or resized while a step is in flight (`Scheduler.needs_results`), so no placeholder is ever left
  in a request that waits.
- A block is published with the commit of the step that filled it, when all of its tokens are known.
"""

from dataclasses import dataclass, field

from busload_runtime.engine.block_pool import Block
from busload_runtime.engine.plan import Plan
from busload_runtime.engine.request import Request


@dataclass(slots=True)
class Flight:
    plan: Plan
    assumed: bool = False
    """Whether its requests are as its end will leave them already, because the next step was planned."""
    ended: dict[int, Request] = field(default_factory=dict)
    """By id, requests with a row in it that ended after it was planned. Another request may have the id by now."""
    held: list[list[Block]] = field(default_factory=list)
    """Their blocks: it may write them."""

    def end(self, request: Request) -> bool:
        """Notes that a request has ended; whether it has a row here."""
        request_id = request.request_id
        if request_id in self.ended:
            return False  # that was another request
        for chunk in self.plan.chunks:
            if chunk.request_id == request_id:
                self.ended[request_id] = request
                request.reached = max(request.reached, chunk.length_after)  # it is computed in any case, and charged
                return True
        return False
