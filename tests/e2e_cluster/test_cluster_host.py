from pathlib import Path

import pytest

from e2e.cluster import cgroups, host
from e2e.cluster.shell import Failure, Progress, write

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_CODENAME=bookworm\n'
MINT = 'NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"\n'
FEDORA = "NAME='Fedora Linux'\nID=fedora\n# a comment=1\n"


def test_os_release() -> None:
    assert host.os_release(DEBIAN)["VERSION_CODENAME"] == "bookworm"
    assert host.os_release(FEDORA) == {"NAME": "Fedora Linux", "ID": "fedora"}
    assert [host.is_debian_like(host.os_release(text)) for text in (DEBIAN, MINT, FEDORA, "")] == [
        True,
        True,
        False,
        False,
    ]


def test_another_system_is_told_what_to_install_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "missing", lambda **_: [host.NEEDS[0]])
    monkeypatch.setattr(host, "os_release", lambda: {"ID": "fedora", "PRETTY_NAME": "Fedora Linux 42"})
    with pytest.raises(Failure, match=r"Fedora Linux 42.*by hand(.|\n)*containerd +runs the containers"):
        host.install_packages(tmp_path / "lock", Progress())


def test_without_root_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "missing", lambda **_: [host.NEEDS[0]])
    monkeypatch.setattr(host, "os_release", lambda: {"ID": "debian"})
    monkeypatch.setattr(host, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr("e2e.cluster.host.os.geteuid", lambda: 1000)
    with pytest.raises(Failure, match="installing packages needs root"):
        host.install_packages(tmp_path / "lock", Progress())


def test_a_program_from_another_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    need = host.Need("containerd", "", ("containerd", "ctr"))
    monkeypatch.setattr(host, "which", lambda program: f"/usr/bin/{program}")
    assert need.met()
    monkeypatch.setattr(host, "which", lambda program: None if program == "ctr" else f"/usr/bin/{program}")
    assert not need.met()


def test_images_need_fewer_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.Need, "met", lambda _: False)
    assert {need.package for need in host.missing(images_only=True)} == {"buildah", "g++", "python3-venv"}
    assert len(host.missing()) == len(host.NEEDS)


def test_cni_folder_has_all_plugins(tmp_path: Path) -> None:
    half, whole = tmp_path / "half", tmp_path / "whole"
    write(half / "bridge", "")
    for plugin in host.CNI_PLUGINS:
        write(whole / plugin, "")
    assert host.cni_folder([tmp_path / "none", half, whole]) == whole
    assert host.cni_folder([half]) is None


@pytest.mark.parametrize(
    ("kernel", "mode"),
    [("5.10.0-30-amd64", "iptables"), ("5.13.0", "nftables"), ("6.8.0-40-generic", "nftables"), ("4.19.0", "iptables")],
)
def test_proxy_mode(kernel: str, mode: str) -> None:
    assert host.proxy_mode(kernel) == mode


def test_port() -> None:
    assert host.choose_port(None, 16443, lambda port: port == 16445) == 16445
    assert host.choose_port(7000, 16443, lambda port: port == 7000) == 7000
    with pytest.raises(Failure, match="BUSLOAD_API_PORT=7000 is taken"):
        host.choose_port(7000, 16443, lambda port: port == 16443)
    with pytest.raises(Failure, match="no port from 16443 to 16542 is free"):
        host.choose_port(None, 16443, lambda _: False)


def version_1(root: Path) -> Path:
    for controller in ("cpuset", "memory"):
        write(root / controller / "tasks", "")
    write(root / "cpuset" / "cpuset.cpus", "0-1\n")
    write(root / "cpuset" / "cpuset.mems", "0\n")
    (root / "unified").mkdir()
    (root / "cpu").symlink_to("memory")
    return root


def test_cgroup_version_1_has_one_in_every_tree_and_an_initial_cpuset(tmp_path: Path) -> None:
    root = version_1(tmp_path)
    assert host.cgroup_version(root) == 1
    assert [tree.name for tree in cgroups.trees(root)] == ["cpuset", "memory"]
    for file in ("cpuset.cpus", "cpuset.mems"):  # the kernel makes these, empty
        write(root / "cpuset" / "busload-x" / file, "\n")
    cgroups.make("busload-x", root)
    assert (root / "memory" / "busload-x").is_dir()
    assert (root / "cpuset" / "busload-x" / "cpuset.cpus").read_text() == "0-1\n"


def test_cgroup_version_2_hands_controllers_down_twice(tmp_path: Path) -> None:
    write(tmp_path / "cgroup.controllers", "cpuset cpu io memory pids\n")
    write(tmp_path / "cgroup.subtree_control", "cpuset cpu memory\n")
    write(tmp_path / "busload-x" / "cgroup.controllers", "cpuset cpu memory pids\n")
    write(tmp_path / "busload-x" / "cgroup.subtree_control", "\n")
    assert host.cgroup_version(tmp_path) == 2
    cgroups.make("busload-x", tmp_path)
    # A plain file keeps the last write only: the one controller that was missing above, the last one below.
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+pids"
    assert (tmp_path / "busload-x" / "cgroup.subtree_control").read_text() == "+pids"


def test_cgroups_are_removed_deepest_first_and_only_ours(tmp_path: Path) -> None:
    for root in ("busload-x/kubepods/pod1/c1", "busload-x/kubepods/pod2", "kubepods/pod3", "busload-y"):
        (tmp_path / "memory" / root).mkdir(parents=True)
    write(tmp_path / "memory" / "tasks", "")
    cgroups.remove("busload-x", tmp_path)
    left = sorted(str(folder.relative_to(tmp_path / "memory")) for folder in (tmp_path / "memory").rglob("*"))
    assert left == ["busload-y", "kubepods", "kubepods/pod3", "tasks"]
    cgroups.remove("busload-x", tmp_path)  # nothing left to do is no failure


def test_too_little_disk_is_told_before_anything_is_built(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert host.free_space(folder) == host.free_space(tmp_path) > 0
    host.require_space(folder, 3, "a node", free=lambda _: 3 * 2**30)
    with pytest.raises(
        Failure, match=rf"a node needs 3 GiB of disk, and 1\.5 GiB are free where {folder} is: make room"
    ):
        host.require_space(folder, 3, "a node", free=lambda _: 3 * 2**29)
