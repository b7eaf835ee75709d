"""Leader election by a Lease: one of the operator's processes acts, the others wait.

Expiry is judged by when this process last *saw* the lease change, on its own monotonic clock, never by comparing wall
clocks of two machines. The holder gives up `renew` seconds after its last good renewal, before the others may take over
(`duration`), so two never act at once.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from busload_operator.control.client import ApiError, Client
from busload_operator.control.kinds import LEASES, Object

log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Leadership ended: the process must stop acting at once."""


class Lease:
    """One contender for one Lease. Durations in seconds."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        duration: float = 15.0,
        renew: float = 10.0,
        retry: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._client, self._namespace, self._name, self.identity = client, namespace, name, identity
        self._duration, self._renew, self._retry = duration, renew, retry
        self._clock, self._sleep = clock, sleep
        self._object: Object | None = None
        self._seen_version = ""
        self._seen_at = 0.0
        self._good_at = 0.0

    @property
    def holder(self) -> str:
        """Who held the lease when it was last read; empty: nobody."""
        return str(self._object["spec"].get("holderIdentity") or "") if self._object else ""

    async def acquire(self) -> None:
        """Waits until this process is the leader."""
        told = ""
        while True:
            try:
                if await self._try():
                    return
                if self.holder != told:
                    told = self.holder
                    log.info("lease is held by %s; waiting", told)
            except ApiError as error:
                log.warning("cannot acquire lease: %s", error)
            await self._sleep(self._retry * random.uniform(0.8, 1.2))

    async def hold(self) -> None:
        """Renews until it cannot. Raises `LeaseLost`; never returns."""
        while True:
            await self._sleep(self._retry)
            started = self._clock()
            left = self._good_at + self._renew - started
            try:
                if left <= 0:
                    raise LeaseLost(f"not renewed for {self._renew:g} s")
                if await self._renew_by(min(left, max(1.0, self._retry))):
                    self._good_at = started
                    continue
                await self._read()
                if self.holder != self.identity:
                    raise LeaseLost(f"{self.holder or 'nobody'} holds the lease now")
            except ApiError as error:
                log.warning("cannot renew lease: %s", error)

    async def release(self) -> None:
        """Lets the next contender in at once. Without effect when this process is not the holder."""
        if self._object and self.holder == self.identity:
            try:
                await self._put("", deadline=1.0)
            except ApiError as error:
                log.warning("lease not released, it will expire: %s", error)

    async def _try(self) -> bool:
        started = self._clock()
        found = await self._read()
        if self.holder not in ("", self.identity) and self._clock() - self._seen_at < self._held_seconds():
            return False  # also when somebody deleted it: its holder may act still
        if not found:
            won = await self._create()
        else:
            won = await self._put(self.identity, deadline=self._retry)
        if won:
            self._good_at = started
        return won

    def _held_seconds(self) -> float:
        assert self._object is not None
        return float(self._object["spec"].get("leaseDurationSeconds") or self._duration)

    async def _renew_by(self, deadline: float) -> bool:
        try:
            return await self._put(self.identity, deadline)
        except ApiError as error:
            if error.status != 404:
                raise
        return await self._create()  # somebody deleted it; nobody else may hold it before ours would have expired

    async def _read(self) -> bool:
        found = await self._client.get(LEASES, self._namespace, self._name)
        if found is not None:
            self._observe(found)
        return found is not None

    def _observe(self, found: Object) -> None:
        self._object = found
        found["spec"] = found.get("spec") or {}
        if found["metadata"]["resourceVersion"] != self._seen_version:
            self._seen_version, self._seen_at = found["metadata"]["resourceVersion"], self._clock()

    async def _create(self) -> bool:
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.name,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec(self.identity),
        }
        return await self._write("POST", LEASES.path(self._namespace), body, self._retry)

    async def _put(self, holder: str, deadline: float) -> bool:
        """Writes on top of what was read; False when another wrote in between."""
        body = {**(self._object or {}), "spec": self._spec(holder)}
        return await self._write("PUT", LEASES.path(self._namespace, self._name), body, deadline)

    async def _write(self, verb: str, path: str, body: Object, deadline: float) -> bool:
        try:
            self._observe(await self._client.one(verb, path, body, deadline=deadline))
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        return True

    def _spec(self, holder: str) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = self._object["spec"] if self._object else {}
        same = old.get("holderIdentity") == self.identity
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._duration)) if holder else 1,
            "renewTime": now,
            "acquireTime": old.get("acquireTime", now) if same else now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if same else 1),
        }
