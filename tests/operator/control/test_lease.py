import asyncio
import contextlib

import pytest
from control_helpers import until
from fake_api import FakeApi

from busload_operator.control.client import Client
from busload_operator.control.lease import Lease, LeaseLost

FAST = {"duration": 2.2, "renew": 1.5, "retry": 0.1}
"""Seconds: long beside the pauses of a busy machine."""


def contender(client: Client, name: str, **durations: float) -> Lease:
    return Lease(client, "ops", "leader", name, **{**FAST, **durations})


def holder(api: FakeApi) -> str:
    return (api.get("leases", "ops", "leader") or {"spec": {}})["spec"].get("holderIdentity", "")


async def test_only_one_of_two_holds_it(api: FakeApi, client: Client) -> None:
    first, second = contender(client, "a"), contender(client, "b")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second.acquire(), 3.5)
    assert holder(api) == "a"
    holding.cancel()


async def test_a_released_lease_changes_hands_before_it_would_expire(api: FakeApi, client: Client) -> None:
    first, second = contender(client, "a", duration=60), contender(client, "b", duration=60)
    await first.acquire()
    taking = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.2)
    await first.release()
    await asyncio.wait_for(taking, 60)
    assert holder(api) == "b"
    assert api.get("leases", "ops", "leader")["spec"]["leaseTransitions"] >= 2  # type: ignore[index]


async def test_a_dead_holder_is_followed_after_the_duration_only(api: FakeApi, client: Client) -> None:
    loop = asyncio.get_running_loop()
    await contender(client, "a").acquire()
    second, started = contender(client, "b"), loop.time()
    await asyncio.wait_for(second.acquire(), 60)
    assert loop.time() - started >= 1.9  # the lease says 2 s (whole seconds)
    assert holder(api) == "b"


async def test_losing_it_to_another_ends_the_hold(api: FakeApi, client: Client) -> None:
    lease = contender(client, "a")
    await lease.acquire()
    live = api.get("leases", "ops", "leader")
    assert live
    await api.put("leases", {**live, "spec": {**live["spec"], "holderIdentity": "b"}})
    with pytest.raises(LeaseLost, match="b holds the lease"):
        await asyncio.wait_for(lease.hold(), 60)


async def test_a_holder_that_is_cut_off_gives_up_before_others_may_start(api: FakeApi, client: Client) -> None:
    lease = contender(client, "a")
    await lease.acquire()
    api.hanging.add("/leases")
    with pytest.raises(LeaseLost, match="not renewed"):
        await asyncio.wait_for(lease.hold(), 60)


async def test_passing_errors_do_not_cost_the_lease(api: FakeApi, client: Client) -> None:
    lease = contender(client, "a", renew=5)
    await lease.acquire()
    api.fail("PUT", "/leases", 500, "etcd is slow", times=3)
    holding = asyncio.create_task(lease.hold())
    await until(lambda: [c.status for c in api.calls if c.verb == "PUT"][-1:] == [200] and len(api.calls) > 6)
    assert not holding.done()
    holding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await holding


async def test_release_by_a_loser_changes_nothing(api: FakeApi, client: Client) -> None:
    first, second = contender(client, "a", duration=60), contender(client, "b", duration=60)
    await first.acquire()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second.acquire(), 0.3)
    await second.release()
    assert holder(api) == "a"


async def test_a_deleted_lease_goes_to_nobody_else_while_its_holder_lives(api: FakeApi, client: Client) -> None:
    first, second = contender(client, "a"), contender(client, "b")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    taking = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.3)
    for _ in range(3):
        await api.remove("leases", "ops", "leader")
        await until(lambda: holder(api))
        assert holder(api) == "a"
    assert not taking.done()
    assert not holding.done()
    holding.cancel()
    await asyncio.wait_for(taking, 60)
    assert holder(api) == "b"


async def test_a_deleted_lease_of_a_dead_holder_is_taken_after_the_duration(api: FakeApi, client: Client) -> None:
    first, second = contender(client, "a", duration=4), contender(client, "b", duration=4)
    await first.acquire()
    taking = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.3)
    await api.remove("leases", "ops", "leader")
    await asyncio.sleep(0.4)
    assert not holder(api)
    await asyncio.wait_for(taking, 60)
    assert holder(api) == "b"


@pytest.mark.parametrize("answer", ["<html>proxy</html>", "[]", "{}"])
async def test_an_answer_that_is_no_lease_does_not_end_the_process(api: FakeApi, client: Client, answer: str) -> None:
    lease = contender(client, "a", renew=5)
    api.fail("GET", "/leases", 200, answer)
    await lease.acquire()
    api.fail("PUT", "/leases", 200, answer, times=2)
    holding = asyncio.create_task(lease.hold())
    await until(lambda: [c for c in api.calls if c.verb == "PUT"][3:])
    assert not holding.done()
    assert holder(api) == "a"
    holding.cancel()
