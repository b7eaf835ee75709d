from pathlib import Path

import pytest

from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure


def test_state_lies_below_the_cache_unless_said_otherwise() -> None:
    assert Settings.from_environment({"BUSLOAD_CACHE": "/c"}).state == Path("/c/cluster")
    chosen = Settings.from_environment({"BUSLOAD_CACHE": "/c", "BUSLOAD_CLUSTER_STATE": "/s"})
    assert (chosen.cache, chosen.state, chosen.api_port) == (Path("/c"), Path("/s"), None)
    assert chosen.kubeconfig == Path("/s/admin.kubeconfig")


@pytest.mark.parametrize("state", ["/run/busload", "/var/log/busload", "/var/lib/kubelet", "/sys/x"])
def test_state_where_the_node_covers_it_is_refused(state: str) -> None:
    with pytest.raises(Failure, match="BUSLOAD_CLUSTER_STATE to another place"):
        Settings.from_environment({"BUSLOAD_CLUSTER_STATE": state})


def test_state_too_long_for_unix_sockets_is_refused_with_the_limit() -> None:
    longest = "/" + "x" * 84
    assert Settings.from_environment({"BUSLOAD_CLUSTER_STATE": longest}).state == Path(longest)
    with pytest.raises(Failure, match="has 86 bytes; Unix sockets below it allow 85"):
        Settings.from_environment({"BUSLOAD_CLUSTER_STATE": longest + "x"})


def test_port() -> None:
    assert Settings.from_environment({"BUSLOAD_API_PORT": "7443"}).api_port == 7443
    assert Settings.from_environment({"BUSLOAD_API_PORT": ""}).api_port is None
    for wrong in ("0", "65536", "abc", "-1", "1.5", "²"):
        with pytest.raises(Failure, match=r"is no port: use a number from 1 to 65535"):
            Settings.from_environment({"BUSLOAD_API_PORT": wrong})


def test_two_clusters_have_two_cgroups() -> None:
    names = {Settings(Path("/c"), Path(state)).cgroup for state in ("/a", "/b")}
    assert len(names) == 2
    assert all(name.startswith("busload-") for name in names)
