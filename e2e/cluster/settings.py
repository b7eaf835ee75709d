"""Where the cluster keeps its things and which addresses it has. Everything else is derived from these."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .shell import Failure

HERE = Path(__file__).resolve().parent

NODE = "node-1"
# All of these live inside the node's own network namespace: they cannot clash with the machine's networks.
NODE_IP = "10.250.0.10"
SERVICE_CIDR = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
DNS_IP = "10.96.0.10"
POD_CIDR = "10.244.0.0/16"
NODE_POD_CIDR = "10.244.0.0/24"

DEFAULT_API_PORT = 16443
# Raised when a state directory written before can no longer be used.
STATE_FORMAT = "1"
# With less of the disk free than this, the node takes no more pods and begins to evict.
DISK_LEFT_MIB = 256

# Hidden or replaced inside the node's mount namespace (node.sh), so the state cannot live below them.
COVERED = ("/run", "/var/run", "/proc", "/sys", "/var/log", "/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni")
# A Unix socket's path holds at most 107 bytes; the longest one below the state is "containerd.sock.ttrpc".
LONGEST_STATE_PATH = 107 - len("/containerd.sock.ttrpc")


@dataclass(frozen=True)
class Settings:
    """cache: programs and images, kept and shared. state: this cluster's data, gone with `down --wipe`."""

    cache: Path
    state: Path
    api_port: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Reads BUSLOAD_CACHE, BUSLOAD_CLUSTER_STATE and BUSLOAD_API_PORT. Raises Failure for wrong values."""
        cache = Path(environment.get("BUSLOAD_CACHE") or Path.home() / ".cache" / "busload").expanduser().absolute()
        state = Path(environment.get("BUSLOAD_CLUSTER_STATE") or cache / "cluster").expanduser().absolute()
        if len(bytes(state)) > LONGEST_STATE_PATH:
            raise Failure(
                f"the cluster's state path {state} has {len(bytes(state))} bytes; Unix sockets below it allow "
                f"{LONGEST_STATE_PATH}: set BUSLOAD_CLUSTER_STATE to a shorter one"
            )
        covered = next((top for top in COVERED if state.is_relative_to(top)), None)
        if covered:
            raise Failure(
                f"the cluster's state path {state} lies below {covered}, which the node covers with its own: "
                "set BUSLOAD_CLUSTER_STATE to another place"
            )
        return cls(cache, state, cls._port(environment.get("BUSLOAD_API_PORT", "")))

    @staticmethod
    def _port(text: str) -> int | None:
        if not text:
            return None
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
            raise Failure(f"BUSLOAD_API_PORT={text!r} is no port: use a number from 1 to 65535, or leave it unset")
        return int(text)

    @property
    def bin(self) -> Path:
        """Finished programs, by version key."""
        return self.cache / "bin"

    @property
    def archives(self) -> Path:
        """Finished images, as docker-archive files."""
        return self.cache / "images"

    @property
    def node_bin(self) -> Path:
        """Links by plain name (kubectl, kubelet ...) to the versions this cluster runs."""
        return self.state / "bin"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def kubeconfig(self) -> Path:
        """For processes of this machine; pki/node-admin.kubeconfig is for those inside the node's network."""
        return self.state / "admin.kubeconfig"

    @property
    def node_kubeconfig(self) -> Path:
        return self.pki / "node-admin.kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def api_socket(self) -> Path:
        return self.state / "api.sock"

    @property
    def audit_log(self) -> Path:
        return self.state / "audit.log"

    @property
    def cgroup(self) -> str:
        """The cgroup that holds this cluster's pods. Its own, because a kubelet removes the cgroups of pods that it
        does not know: two kubelets on one machine must not share the default one."""
        return "busload-" + hashlib.sha256(bytes(self.state)).hexdigest()[:8]
