import json
import tomllib
from pathlib import Path

import pytest
import yaml

from e2e.cluster import render
from e2e.cluster.settings import DNS_IP, HERE, Settings

SETTINGS = Settings(Path("/c"), Path("/c/cluster"))
MACHINE = render.Machine(Path("/opt/cni/bin"), "nftables", 1)


def test_containerd_finds_plugins_socket_and_the_pause_image() -> None:
    config = tomllib.loads(render.containerd(SETTINGS, MACHINE))
    assert config["version"] == 2  # the newest that containerd 1.6 reads, the oldest that containerd 2 reads
    assert config["grpc"]["address"] == str(SETTINGS.containerd_socket)
    cri = config["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["sandbox_image"] == render.PAUSE_IMAGE
    assert cri["restrict_oom_score_adj"] is True
    assert cri["cni"] == {"bin_dir": "/opt/cni/bin", "conf_dir": "/c/cluster/cni"}
    assert cri["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is False


@pytest.mark.parametrize(("cgroup", "expected"), [(1, False), (2, None)])
def test_kubelet_accepts_cgroup_version_1_only_where_it_has_to(cgroup: int, expected: bool | None) -> None:
    config = yaml.safe_load(render.kubelet(SETTINGS, render.Machine(Path("/x"), "nftables", cgroup)))
    assert config.get("failCgroupV1") is expected
    assert config["cgroupDriver"] == "cgroupfs"
    assert config["cgroupRoot"] == f"/{SETTINGS.cgroup}"
    assert config["clusterDNS"] == [DNS_IP]
    assert config["authentication"]["anonymous"] == {"enabled": False}


def test_kubelet_keeps_an_amount_of_disk_and_not_a_share_of_it() -> None:
    """One per cent of a large disk is gigabytes: a node with 3 GB free of 252 took no more pods."""
    config = yaml.safe_load(render.kubelet(SETTINGS, MACHINE))
    assert config["evictionHard"] == {
        "memory.available": "100Mi",
        "nodefs.available": "256Mi",
        "imagefs.available": "256Mi",
    }


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_proxy_has_the_mode_that_the_kernel_can_do(mode: str) -> None:
    config = yaml.safe_load(render.proxy(SETTINGS, render.Machine(Path("/x"), mode, 2)))
    assert config["mode"] == mode
    assert config["conntrack"]["maxPerCore"] == 0


def test_cni_hands_out_the_nodes_pod_addresses() -> None:
    bridge = json.loads(render.cni())["plugins"][0]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.244.0.0/24"}]]
    assert bridge["hairpinMode"] is True


def test_coredns_manifest_is_filled_in() -> None:
    text = render.coredns("localhost/busload-coredns:v9")
    documents = list(yaml.safe_load_all(text))
    assert "@" not in text
    by_kind = {document["kind"]: document for document in documents}
    assert by_kind["Service"]["spec"]["clusterIP"] == DNS_IP
    assert by_kind["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] == "localhost/busload-coredns:v9"


def test_audit_policy_keeps_all_writes_and_all_of_the_operators_requests() -> None:
    policy = yaml.safe_load((HERE / "manifests" / "audit-policy.yaml").read_text())
    operator, writes, rest = policy["rules"]
    assert operator == {"level": "Metadata", "userGroups": ["system:serviceaccounts:busload-system"]}
    assert set(writes["verbs"]) == {"create", "update", "patch", "delete", "deletecollection"}
    assert rest == {"level": "None"}


def test_every_file_that_the_nodes_script_reads_is_written() -> None:
    files = render.files(SETTINGS, MACHINE)
    script = (HERE / "node.sh").read_text()
    for name in ("node.env", "containerd.toml", "kubelet.yaml", "proxy.yaml", "audit-policy.yaml"):
        assert f"$state/{name}" in script
        assert SETTINGS.state / name in files
    for line in files[SETTINGS.state / "node.env"].splitlines():
        assert f"${line.split('=')[0]}" in script
