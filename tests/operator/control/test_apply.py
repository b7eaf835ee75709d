import copy
from typing import Any

import pytest
from control_helpers import service
from fake_api import FakeApi

from busload_operator.control.apply import Applier, ForeignObjectError, is_applied, owns, stamp
from busload_operator.control.cache import Cache
from busload_operator.control.client import ApiError, Client
from busload_operator.control.kinds import CHILDREN, CONFIG_MAPS
from busload_operator.control.service import read_service
from busload_operator.resources.build import children
from busload_operator.resources.initial_limits import initial_limits
from busload_operator.resources.settings import RuntimeSettings
from busload_runtime.contract import LimitsDocument


class Ground:
    """A service on a fake API server, its desired children, and an applier with a cache that knows all."""

    def __init__(self, api: FakeApi, client: Client, owner: dict[str, Any]):
        self.api, self.owner, self.cache = api, owner, Cache()
        self.applier = Applier(client, self.cache)
        parsed = read_service(owner).parsed
        document = LimitsDocument(1, initial_limits(parsed.spec))
        self.desired = children(parsed, RuntimeSettings("example.org/runtime:1"), document, 1)

    async def apply(self) -> list[dict[str, Any]]:
        for kind in CHILDREN:
            items = [o for (plural, _, _), o in self.api.objects.items() if plural == kind.plural]
            labelled = [o for o in items if "app.kubernetes.io/managed-by" in (o["metadata"].get("labels") or {})]
            self.cache.replace(kind, copy.deepcopy(labelled), str(10**9))
        self.api.calls.clear()
        return await self.applier.apply(self.owner, self.desired)


@pytest.fixture
async def ground(api: FakeApi, client: Client) -> Ground:
    return Ground(api, client, await api.put("inferenceservices", service()))


async def test_all_children_are_made_and_owned(ground: Ground) -> None:
    live = await ground.apply()
    assert [child["kind"] for child in live] == ["ServiceAccount", "ConfigMap", "Service", "Deployment"]
    assert all(child["metadata"]["ownerReferences"][0]["uid"] == ground.owner["metadata"]["uid"] for child in live)


async def test_a_second_time_nothing_is_written(ground: Ground) -> None:
    await ground.apply()
    await ground.apply()
    assert ground.api.writes() == []
    assert ground.api.calls == []  # nor read


async def test_a_changed_desire_writes_that_child_only(ground: Ground) -> None:
    await ground.apply()
    ground.desired[3]["spec"]["replicas"] = 2
    live = await ground.apply()
    assert [call.path.split("/")[-2] for call in ground.api.writes()] == ["deployments"]
    assert live[3]["spec"]["replicas"] == 2


@pytest.mark.parametrize("where", ["replicas", "image", "label"])
async def test_drift_is_repaired_and_foreign_fields_stay(ground: Ground, where: str) -> None:
    live = copy.deepcopy((await ground.apply())[3])
    wanted = copy.deepcopy(live)
    match where:
        case "replicas":
            live["spec"]["replicas"] = 7
        case "image":
            live["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
        case "label":
            del live["metadata"]["labels"]["app.kubernetes.io/name"]
    live["metadata"]["annotations"]["someone.example/note"] = "kept"
    await ground.api.put("deployments", live)
    after = (await ground.apply())[3]
    assert len(ground.api.writes()) == 1
    assert after["spec"] == wanted["spec"]
    assert after["metadata"]["labels"] == wanted["metadata"]["labels"]
    assert after["metadata"]["annotations"]["someone.example/note"] == "kept"
    await ground.apply()
    assert ground.api.writes() == []


async def test_a_field_that_is_no_longer_desired_goes(ground: Ground) -> None:
    await ground.apply()
    del ground.desired[3]["spec"]["progressDeadlineSeconds"]
    assert "progressDeadlineSeconds" not in (await ground.apply())[3]["spec"]


@pytest.mark.parametrize(
    ("extra", "who"),
    [
        ({}, "was not made by busload"),
        ({"ownerReferences": [{"uid": "x", "kind": "Widget", "name": "w", "controller": True}]}, "belongs to Widget w"),
        ({"labels": {"app.kubernetes.io/managed-by": "busload"}}, "was not made by busload"),
    ],
)
async def test_somebody_elses_object_is_never_touched(ground: Ground, extra: dict[str, Any], who: str) -> None:
    theirs = {"metadata": {"namespace": "demo", "name": "chat", **extra}, "spec": {"ports": []}}
    before = copy.deepcopy(await ground.api.put("services", theirs))
    with pytest.raises(ForeignObjectError, match=f"Service demo/chat exists already and {who}; delete or rename it"):
        await ground.apply()
    assert ground.api.writes() == []  # not even the children that come before it
    assert ground.api.get("services", "demo", "chat") == before


async def test_children_of_an_earlier_service_of_this_name_are_not_adopted(ground: Ground) -> None:
    await ground.apply()
    ground.owner = {**ground.owner, "metadata": {**ground.owner["metadata"], "uid": "another"}}
    with pytest.raises(ForeignObjectError):
        await ground.apply()


async def test_a_child_that_is_no_longer_desired_is_deleted(ground: Ground) -> None:
    await ground.apply()
    surplus = ground.desired.pop(1)
    await ground.apply()
    assert [call.verb for call in ground.api.writes()] == ["DELETE"]
    assert ground.api.get(CONFIG_MAPS.plural, "demo", surplus["metadata"]["name"]) is None


async def test_a_child_recreated_by_others_meanwhile_is_not_overwritten(ground: Ground) -> None:
    await ground.apply()
    ground.desired[3]["spec"]["replicas"] = 2
    stale, ground.api.objects = dict(ground.api.objects), dict(ground.api.objects)
    key = ("deployments", "demo", "chat")
    ground.cache.replace(CONFIG_MAPS, [], "0")
    theirs = copy.deepcopy(stale[key])
    theirs["metadata"]["uid"] = "theirs"
    ground.api.objects[key] = theirs
    with pytest.raises(ApiError) as caught:
        await ground.applier.apply(ground.owner, ground.desired)
    assert caught.value.status == 409


def test_ownership_of_fields_as_the_api_server_spells_it() -> None:
    fields = {
        "f:spec": {
            "f:ports": {
                ".": {},
                'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:port": {}, "f:targetPort": {}},
            },
            "f:selector": {},
            "f:args": {},
            "f:set": {'v:"a"': {}},
        }
    }
    spec = {"ports": [{"port": 80, "targetPort": "http"}], "selector": {"a": "b"}, "args": ["x", "y"], "set": ["a"]}
    assert owns({"spec": spec}, fields)
    assert not owns({"spec": {**spec, "ports": [{"port": 81, "targetPort": "http"}]}}, fields)
    assert not owns({"spec": {**spec, "ports": [{"port": 80, "name": "http"}]}}, fields)
    assert not owns({"spec": {**spec, "set": ["a", "b"]}}, fields)
    assert not owns({"spec": {**spec, "replicas": 1}}, fields)


def test_a_child_whose_managed_fields_are_gone_is_written_again() -> None:
    body = stamp(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "n"}, "data": {"a": "1"}}
    )
    live = copy.deepcopy(body)
    assert not is_applied(live, body)
    owned = {"f:data": {"f:a": {}}, "f:metadata": {"f:annotations": {"f:busload.dev/desired-hash": {}}}}
    live["metadata"]["managedFields"] = [{"manager": "busload", "operation": "Apply", "fieldsV1": owned}]
    assert is_applied(live, body)
    live["metadata"]["managedFields"][0]["operation"] = "Update"
    assert not is_applied(live, body)
