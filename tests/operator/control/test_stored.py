"""A stored status that this version did not write: from a newer version, by hand, or garbage."""

import copy
from typing import Any

from control_helpers import condition, quiet, roll_out, service, until
from fake_api import FakeApi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_controller import Running, limits_of, settled, status_of

from busload_operator.api.status import Status
from busload_operator.control.service import read_service
from busload_operator.control.stored import stored_status
from busload_operator.control.tuner import Tuner

DECISION = {
    "id": 4, "time": "2026-01-01T00:00:00Z", "knob": "batchSize", "from": "4", "to": "8", "reason": "X", "message": "m",
    "outcome": {"verdict": "Pending"},
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
FIELDS = ("conditions", "decisions", "observed", "tuned", "law", "bottleneck", "replicas", "selector", "new")


def live(status: Any) -> dict[str, Any]:
    obj = service()
    obj["metadata"] |= {"uid": "u1", "generation": 3, "resourceVersion": "7"}
    return obj | {"status": status}


def test_what_is_known_stays_and_the_rest_goes() -> None:
    newer = {**DECISION, "knob": "speculation", "certainty": 1, "outcome": {"verdict": "Splendid", "how": 1}}
    status = {
        "decisions": [newer, {**DECISION, "id": "3"}, {"id": 2}, 7, None, DECISION],
        "law": {"a": 1.5, "b": "3", "e": "9"},
        "observed": [1],
        "tuned": {"generation": "3", "batchSize": 4},
        "conditions": [
            {"type": "Ready"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "x", "reason": "A", "message": ""},
        ],
        "future": {"x": 1},
    }
    assert stored_status(live(status)) == {
        "decisions": [{**DECISION, "knob": "speculation", "outcome": {"verdict": "Splendid"}}, DECISION],
        "law": {"b": "3"},
        "tuned": {"batchSize": 4},
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "x", "reason": "A", "message": ""}],
    }


def test_too_many_decisions_are_cut_to_the_newest() -> None:
    status = {"decisions": [{**DECISION, "id": number} for number in range(30, 0, -1)]}
    assert [entry["id"] for entry in stored_status(live(status))["decisions"]] == list(range(30, 20, -1))


def test_no_status_at_all() -> None:
    assert [stored_status(live(status)) for status in (None, [], "x", 3)] == [{}] * 4
    assert stored_status(service()) == {}


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw loads a lot
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5))
def test_no_garbage_gets_through_or_stops_a_tuner(status: dict[str, Any]) -> None:
    before = copy.deepcopy(status)
    found = stored_status(live(status))
    Status.model_validate(found)
    assert str(status) == str(before)  # (NaN is not equal to itself)
    Tuner.recover(read_service(live(status)), None, None)


async def test_garbage_in_a_status_is_replaced(api: FakeApi, running: Running) -> None:
    garbage = {"decisions": [{"id": "x"}, 5], "tuned": {"batchSize": "many"}, "conditions": [{"type": 3}], "law": 1}
    written = {
        "manager": "busload-status", "operation": "Apply", "subresource": "status",
        "fieldsV1": {"f:status": {"f:decisions": {}, "f:tuned": {"f:batchSize": {}}, "f:law": {}, "f:conditions": {}}},
    }  # fmt: skip
    obj = service()
    obj["metadata"]["managedFields"] = [written]
    await api.put("inferenceservices", {**obj, "status": garbage})
    async with running():
        await settled(api)
        assert limits_of(api)["default"]["batchSize"] == 8
        assert not status_of(api).keys() & {"decisions", "law"}
        await quiet(api)


async def test_children_of_an_earlier_service_of_this_name_tell_nothing(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service(bounds={"batchSize": {"initial": 40}}))
        await settled(api)
    config_map = api.get("configmaps", "demo", "chat-limits")
    assert config_map
    await api.remove("inferenceservices", "demo", "chat")
    await api.put("inferenceservices", service())
    async with running(BUSLOAD_RESYNC_SECONDS="1"):
        await until(lambda: condition(api, "Stalled").get("reason") == "ForeignObject")
        assert status_of(api)["tuned"]["batchSize"] == 8
        for plural, name in (("serviceaccounts", "chat"), ("configmaps", "chat-limits"), ("services", "chat")):
            await api.remove(plural, "demo", name)
        await api.remove("deployments", "demo", "chat")
        await until(lambda: api.get("deployments", "demo", "chat"))
        await roll_out(api)
        assert limits_of(api)["default"]["batchSize"] == 8


async def test_limits_edited_by_hand_while_nobody_watched_are_put_back(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
    config_map = copy.deepcopy(api.get("configmaps", "demo", "chat-limits"))
    assert config_map
    text = config_map["data"]["limits.json"]
    edited = text.replace('"generation": 1', f'"generation": {2**53}').replace(
        '"maxQueuedRequests": 256', '"maxQueuedRequests": 0'
    )
    assert edited.count("9007199254740992") == edited.count('"maxQueuedRequests": 0') == 1
    config_map["data"]["limits.json"] = edited
    await api.put("configmaps", config_map)
    async with running():
        await until(lambda: limits_of(api)["default"]["maxQueuedRequests"] == 256)
        assert limits_of(api)["generation"] == 2
        await until(lambda: status_of(api)["tuned"]["generation"] == 2)
