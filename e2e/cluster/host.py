"""What the machine must have: Linux, root, a few packages; and the facts about it that configuration depends on."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .shell import Failure, Progress, downloading, exclusive, run

CGROUPS = Path("/sys/fs/cgroup")
# Where administrators' programs are; a plain user's PATH may lack these.
SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
CNI_PLUGINS = ("bridge", "host-local", "loopback", "portmap")


def which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATHS}")


def cni_folder(folders: Iterable[Path] = CNI_FOLDERS) -> Path | None:
    """The first folder that has every network plugin which the node uses."""
    return next((folder for folder in folders if all((folder / name).exists() for name in CNI_PLUGINS)), None)


def has_ensurepip() -> bool:
    """Debian leaves this out of python3; `python3 -m venv` needs it."""
    return importlib.util.find_spec("ensurepip") is not None


def has_static_libc() -> bool:
    return any(Path("/usr/lib").glob("*-linux-gnu*/libc.a"))


@dataclass(frozen=True)
class Need:
    """A Debian/Ubuntu package, by what it is for and how to see that it (or another package's equal) is here.

    Programs are looked for rather than package names: a machine with Docker's own containerd.io has containerd too, and
    Debian's package of that name would throw it out.
    """

    package: str
    purpose: str
    programs: tuple[str, ...] = ()
    present: Callable[[], bool] = lambda: True
    images: bool = False  # needed for building images too, not only for a node

    def met(self) -> bool:
        return all(which(program) for program in self.programs) and self.present()


NEEDS = (
    Need("containerd", "runs the containers", ("containerd", "ctr", "containerd-shim-runc-v2")),
    Need("runc", "starts each container", ("runc",)),
    Need("containernetworking-plugins", "connects pods to the node's bridge", present=lambda: cni_folder() is not None),
    Need("nftables", "carries Services (kube-proxy)", ("nft",)),
    Need("iptables", "host ports of pods, kubelet's rules", ("iptables",)),
    Need("iproute2", "makes the node's network", ("ip",)),
    Need("util-linux", "makes and enters namespaces", ("unshare", "nsenter", "mount")),
    Need("socat", "carries the API server's port out of the node", ("socat",)),
    Need("openssl", "makes the certificates", ("openssl",)),
    Need("busybox-static", "shell in the images, DNS look-ups in checks", ("busybox",)),
    Need("buildah", "builds the images", ("buildah",), images=True),
    Need("python3-venv", "makes the virtual environment", present=has_ensurepip, images=True),
    Need("gcc", "compiles the pods' pause program", ("gcc",)),
    Need("g++", "compiles the CPU engine", ("g++",), images=True),
    Need("libc6-dev", "for the same", present=has_static_libc),
)


def missing(*, images_only: bool = False) -> list[Need]:
    return [need for need in NEEDS if (need.images or not images_only) and not need.met()]


def os_release(text: str | None = None) -> dict[str, str]:
    """The fields of /etc/os-release; empty where there is none."""
    if text is None:
        file = Path("/etc/os-release")
        text = file.read_text() if file.exists() else ""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {name: value.strip("\"'") for name, value in pairs}


def is_debian_like(release: dict[str, str]) -> bool:
    return bool({"debian", "ubuntu"} & {release.get("ID", ""), *release.get("ID_LIKE", "").split()})


def require_linux() -> None:
    if sys.platform != "linux":
        raise Failure(
            f"the cluster needs Linux (this is {sys.platform}): use a Debian or Ubuntu machine, real or virtual"
        )


def require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise Failure(
            f"{what} needs root (namespaces, mounts, a network of its own): run it as root, for example by\n"
            f'  sudo env PATH="$PATH" HOME="$HOME" python3 -m e2e.cluster ...'
        )


def free_space(folder: Path) -> int:
    """Bytes that may still be written to the file system of `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, gib: float, what: str, free: Callable[[Path], int] = free_space) -> None:
    """Refuses at once what would otherwise end in a full disk, or in a node that takes no more pods."""
    left = free(folder) / 2**30
    if left < gib:
        raise Failure(
            f"{what} needs {gib:g} GiB of disk, and {left:.1f} GiB are free where {folder} is: make room there"
        )


def install_packages(lock: Path, progress: Progress, *, images_only: bool = False) -> None:
    """Installs what is missing by apt-get. Raises Failure where that cannot work, with the list of what is missing."""
    require_linux()
    wanted = missing(images_only=images_only)
    if not wanted:
        return
    listing = "\n".join(f"  {need.package:28} {need.purpose}" for need in wanted)
    release = os_release()
    if not is_debian_like(release) or not which("apt-get"):
        raise Failure(
            f"this machine ({release.get('PRETTY_NAME', 'unknown system')}) is not Debian or Ubuntu, so these have to "
            f"be installed by hand (names as in Debian):\n{listing}"
        )
    progress.note(f"{len(wanted)} system packages are missing and will be installed by apt-get:\n{listing}")
    require_root("installing packages")
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with exclusive(lock), progress.step(f"{len(wanted)} system packages installed"):
        packages = [need.package for need in wanted]
        downloading(lambda: run([*apt, "update"], env=environment), progress.note)
        install = [*apt, "install", "-y", "--no-install-recommends", *packages]
        downloading(lambda: run(install, env=environment), progress.note)
    still = [need.package for need in missing(images_only=images_only)]
    if still:
        raise Failure(f"apt-get reported success, yet this is still missing: {', '.join(still)}")


def proxy_mode(kernel: str) -> str:
    """kube-proxy's mode for a kernel release ("6.8.0-40-generic"): its nftables mode needs 5.13 or newer."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", kernel)[:2])
    return "nftables" if numbers >= (5, 13) else "iptables"


def kernel_release() -> str:
    return platform.release()


def cgroup_version(root: Path = CGROUPS) -> int:
    """2 where /sys/fs/cgroup is the unified hierarchy, else 1 (hybrid counts as 1: its controllers are on v1)."""
    return 2 if (root / "cgroup.controllers").exists() else 1


def load_kernel_modules() -> None:
    """Asks for the modules that the network needs. Where they are built in, or modprobe is not there, nothing happens;
    the node itself then fails with a clear line if one is really missing."""
    modprobe = which("modprobe")
    if modprobe:
        for module in (
            "overlay",
            "br_netfilter",
            "nf_conntrack",
            "nf_tables",
            "nft_masq",
            "nft_numgen",
            "nft_fib_inet",
        ):
            run([modprobe, "-q", module], check=False)


def port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def choose_port(explicit: int | None, preferred: int, free: Callable[[int], bool] = port_is_free) -> int:
    """The port of 127.0.0.1 for the API server: `explicit` or nothing; else `preferred` or one of the next hundred."""
    if explicit is not None:
        if not free(explicit):
            raise Failure(f"BUSLOAD_API_PORT={explicit} is taken on 127.0.0.1: choose another, or leave it unset")
        return explicit
    for port in range(preferred, preferred + 100):
        if free(port):
            return port
    raise Failure(f"no port from {preferred} to {preferred + 99} is free on 127.0.0.1: set BUSLOAD_API_PORT")


def enter_network(pid: int, argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Becomes a command in the network namespace of process `pid`: signals reach it, its exit status is ours."""
    os.execvpe("nsenter", ["nsenter", "-t", str(pid), "-n", "--", *argv], environment)
