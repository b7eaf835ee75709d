"""Requests that wait for a place in the batch, and which of them is next. Pure.

Preempted requests come first, in the order in which they first started: they have had their turn. Of those that never
ran it is the turn of the tenant that was served least, in tokens per weight; `line.py` says who of its requests is
next. A tenant is charged its prompt when a request starts and each output token as it is drawn, so nobody's output
length need be guessed. Who comes back to an empty line begins at the least served of those that wait: what was not
asked for is not saved up. This is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024). Its bound: of two tenants that always wait, one is never ahead by more than twice the tokens that a
batch can hold.

One tenant alone: exactly its line.
"""

import math
from bisect import insort

from busload_runtime.contract import Pace
from busload_runtime.engine.account import Account
from busload_runtime.engine.line import Line
from busload_runtime.engine.request import Request

KEPT_ACCOUNTS = 256
"""Of tenants without requests: what they had must still count when they come back in a moment."""


class WaitingQueue:
    """Call with times that never fall."""

    def __init__(self, pace: Pace) -> None:
        self._preempted: list[Request] = []
        self._lines: dict[str, Line] = {}
        """Of the tenants that wait, by name; no line is empty."""
        self._accounts: dict[str, Account] = {}
        self._idle = 0
        """Accounts without requests."""
        self._served = 0.0
        """Of the tenant whose turn was last, before that turn."""
        self._pace = pace
        self._waiting = 0
        self.tokens = 0
        """Tokens of all that wait."""

    def __len__(self) -> int:
        return len(self._preempted) + self._waiting

    def in_order(self) -> list[Request]:
        """All that wait: preempted ones first, then tenant by tenant in the order of its line."""
        return self._preempted + [request for line in self._lines.values() for request in line.in_order()]

    def set_pace(self, pace: Pace) -> None:
        self._pace = pace
        for line in self._lines.values():
            line.set_pace(pace)

    # Who comes and goes.

    def add(self, request: Request) -> None:
        """A request that never ran; later in the order of arrival than all before."""
        account = self._account(request)
        request.account = account
        line = self._lines.get(account.tenant)
        if line is None:
            account.lift(min((self._accounts[tenant].served for tenant in self._lines), default=self._served))
            line = self._lines[account.tenant] = Line(self._pace)
        line.add(request)
        self._waiting += 1
        self.tokens += len(request.tokens)

    def add_preempted(self, request: Request) -> None:
        self.tokens += len(request.tokens)
        insort(self._preempted, request, key=start_order)

    def remove(self, request: Request) -> None:
        """It starts, or has ended."""
        self.tokens -= len(request.tokens)
        if request.started is not None:
            self._preempted.remove(request)
            return
        tenant = request.account.tenant
        line = self._lines[tenant]
        line.remove(request)
        self._waiting -= 1
        if not line:
            del self._lines[tenant]

    @property
    def charges(self) -> bool:
        """Whether output tokens are to be charged: not for a tenant alone, beside whom the next one is put anyway."""
        return len(self._accounts) > 1

    def charge_start(self, request: Request) -> None:
        """It starts for the first time, with its cached tokens known."""
        account = request.account
        self._served = max(self._served, account.served)
        account.tokens += request.prompt_length - request.cached_tokens

    def end(self, request: Request) -> None:
        """It has ended, wherever it was; what of its prompt was not computed is given back."""
        account = request.account
        if request.started is not None:
            account.tokens -= max(0, request.prompt_length - max(request.reached, request.cached_tokens))
        account.live -= 1
        if not account.live:
            self._idle += 1
            if self._idle > KEPT_ACCOUNTS:
                self._forget()

    # Who is next.

    def next(self, now: float) -> Request | None:
        """Who is to start next."""
        if self._preempted:
            return self._preempted[0]
        if not self._lines:
            return None
        return self._lines[self._turn()].next(now)

    @property
    def contested(self) -> bool:
        """Whether the turn may pass from one tenant to another as those that run are served."""
        return len(self._lines) > 1 and not self._preempted

    def next_stays_until(self) -> float:
        """Up to this time `next` gives the same as now, while nobody comes, goes or is served."""
        if self._preempted or not self._lines:
            return math.inf
        return self._lines[self._turn()].next_stays_until()

    def _turn(self) -> str:
        """The tenant served least; of equals the one that has waited longest without a break."""
        if len(self._lines) == 1:
            return next(iter(self._lines))
        return min(self._lines, key=lambda tenant: self._accounts[tenant].served)

    def _account(self, request: Request) -> Account:
        account = self._accounts.get(request.tenant)
        if account is None:
            account = self._accounts[request.tenant] = Account(request.tenant, request.weight)
        else:
            account.reweigh(request.weight)
            self._idle -= not account.live
        account.live += 1
        return account

    def _forget(self) -> None:
        """Half of the accounts without requests: those served least, whom a lift puts where they were or nearly so."""
        idle = sorted((a for a in self._accounts.values() if not a.live), key=lambda account: account.served)
        for account in idle[: len(idle) // 2]:
            del self._accounts[account.tenant]
        self._idle = len(idle) - len(idle) // 2


def start_order(request: Request) -> int:
    return request.start_order
