from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from busload_operator.control.cache import Cache
from busload_operator.control.kinds import PODS, SERVICES, Key


def pod(name: str, version: int, service: str | None = "chat", uid: str = "") -> dict[str, Any]:
    labels = {"busload.dev/inferenceservice": service} if service else {}
    metadata = {
        "namespace": "demo",
        "name": name,
        "uid": uid or name,
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"metadata": metadata}


def test_the_newest_version_wins_whatever_the_order() -> None:
    cache = Cache()
    assert cache.put(PODS, pod("a", 9))
    assert not cache.put(PODS, pod("a", 8))  # "10" > "9" as numbers, not as text
    assert cache.put(PODS, pod("a", 10))
    assert cache.get(PODS, "demo", "a")["metadata"]["resourceVersion"] == "10"  # type: ignore[index]


def test_an_object_that_changes_its_label_moves() -> None:
    cache = Cache()
    cache.put(PODS, pod("a", 1, "chat"))
    cache.put(PODS, pod("a", 2, "other"))
    assert cache.of_service(PODS, Key("demo", "chat")) == []
    assert len(cache.of_service(PODS, Key("demo", "other"))) == 1


def test_a_complete_list_shows_what_vanished() -> None:
    cache = Cache()
    cache.put(PODS, pod("a", 1))
    cache.put(PODS, pod("b", 2))
    assert cache.replace(PODS, [pod("b", 2)], "5") == {Key("demo", "chat")}
    assert cache.get(PODS, "demo", "a") is None


def test_what_was_stored_after_the_list_was_taken_stays() -> None:
    cache = Cache()
    cache.put(PODS, pod("young", 7))
    cache.replace(PODS, [], "5")
    assert cache.get(PODS, "demo", "young")


def test_a_list_of_one_namespace_leaves_the_others() -> None:
    cache = Cache()
    cache.put(PODS, pod("a", 1))
    cache.replace(PODS, [], "5", namespace="elsewhere")
    assert cache.get(PODS, "demo", "a")


def test_an_answer_that_the_deletion_overtook_brings_no_ghost() -> None:
    cache = Cache()
    cache.put(PODS, pod("a", 1, uid="u1"))
    cache.remove(PODS, pod("a", 3, uid="u1"))
    assert not cache.put(PODS, pod("a", 2, uid="u1"))
    assert cache.put(PODS, pod("a", 4, uid="u2"))


def test_the_deletion_of_an_earlier_object_leaves_its_successor() -> None:
    cache = Cache()
    cache.put(PODS, pod("a", 5, uid="new"))
    assert not cache.remove(PODS, pod("a", 4, uid="old"))
    assert cache.get(PODS, "demo", "a")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["chat", "other", None])), max_size=30))
def test_the_index_agrees_with_the_objects(changes: list[tuple[str, str | None]]) -> None:
    cache = Cache()
    for version, (name, service) in enumerate(changes):
        cache.put(PODS, pod(name, version, service))
    latest = dict(changes)
    for service in ("chat", "other"):
        names = [p["metadata"]["name"] for p in cache.of_service(PODS, Key("demo", service))]
        assert names == sorted(name for name, of in latest.items() if of == service)
    assert cache.services() == []
    assert cache.count(SERVICES) == 0
