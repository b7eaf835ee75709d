"""Any order of arrivals, refusals, first tokens and ends: the books balance, and one tenant leaves room for another."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from busload_runtime.contract import Limits
from busload_runtime.server.admission import Admission
from busload_runtime.server.errors import ApiError
from busload_runtime.server.tenants import ANYBODY, Tenant

TENANTS = [ANYBODY, Tenant("a", "a", 1.0, True), Tenant("b", "b", 3.0, True)]
STRANGER = Tenant("stranger", "stranger", 1.0, True)
BATCH, QUEUE, TOKENS = 3, 8, 100


@dataclass
class Sequence:
    tenant: Tenant
    tokens: int | None = None
    """Of its prompt, once it is submitted."""
    waits: bool = True


class AnyTraffic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(Limits(2048, BATCH, 90, 512, QUEUE, TOKENS), lambda: 0.0)
        self.live: list[Sequence] = []

    @rule(tenant=st.sampled_from(TENANTS), count=st.integers(1, 4))
    def arrive(self, tenant: Tenant, count: int) -> None:
        before = len(self.live)
        try:
            self.admission.take(count, tenant=tenant)
        except ApiError:
            assert self.admission.live == before
            return
        self.live += [Sequence(tenant) for _ in range(count)]
        assert len(self.live) <= BATCH + QUEUE

    @precondition(lambda self: any(s.tokens is None for s in self.live))
    @rule(data=st.data(), tokens=st.integers(1, 120))
    def submit(self, data: st.DataObject, tokens: int) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if s.tokens is None]))
        before = self.admission.waiting_tokens
        try:
            self.admission.queue_tokens(tokens, sequence.tenant)
        except ApiError:
            assert before, "alone in the queue any prompt may enter"
            self.admission.leave(1, sequence.tenant, waiting=1)
            self.live.remove(sequence)
            return
        assert not before or before + tokens <= TOKENS
        sequence.tokens = tokens

    @precondition(lambda self: any(s.tokens is not None and s.waits for s in self.live))
    @rule(data=st.data(), ends=st.booleans())
    def first_token(self, data: st.DataObject, ends: bool) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if s.tokens is not None and s.waits]))
        assert sequence.tokens is not None
        self.admission.unqueue(sequence.tokens, sequence.tenant)
        sequence.waits = False
        if ends:
            self.end(sequence)

    @precondition(lambda self: any(not s.waits for s in self.live))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from([s for s in self.live if not s.waits])))

    def end(self, sequence: Sequence) -> None:
        self.admission.leave(tenant=sequence.tenant)
        self.live.remove(sequence)

    @invariant()
    def the_books_balance(self) -> None:
        held = self.admission.all
        assert (held.live, held.waiting) == (len(self.live), sum(s.waits for s in self.live))
        assert held.tokens == sum(s.tokens or 0 for s in self.live if s.waits)
        assert self.admission.tenants == len({s.tenant.name for s in self.live})

    @invariant()
    def one_tenant_alone_leaves_room_for_another(self) -> None:
        # A single prompt beyond the share enters an empty queue, and fills it by itself.
        longest = max((s.tokens or 0 for s in self.live if s.waits), default=0)
        if {s.tenant.name for s in self.live} in ({"a"}, {"b"}) and longest <= TOKENS // 2:
            self.admission.check(1, tenant=STRANGER)


TestAnyAdmission = AnyTraffic.TestCase
TestAnyAdmission.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
