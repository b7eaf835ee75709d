"""The node's configuration files, as text. Pure: settings and facts about the machine in, files out."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from . import settings as s
from .settings import HERE, Settings

PAUSE_IMAGE = "localhost/busload-pause:1"


@dataclass(frozen=True)
class Machine:
    """What the files depend on, found out by host.py. proxy_mode: nftables or iptables. cgroup: version 1 or 2."""

    cni_folder: Path
    proxy_mode: str
    cgroup: int


def node_environment() -> str:
    """Shell variables that node.sh reads."""
    values = {
        "NODE": s.NODE,
        "NODE_IP": s.NODE_IP,
        "SERVICE_CIDR": s.SERVICE_CIDR,
        "POD_CIDR": s.POD_CIDR,
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def containerd(settings: Settings, machine: Machine) -> str:
    """Version 2 of the format: containerd 1.6 knows no newer one, and containerd 2 migrates it when it reads it.

    restrict_oom_score_adj: without CAP_SYS_RESOURCE nobody can lower a score, and runc then fails for every pod with
    "can't get final child's PID from pipe: EOF".
    """
    cri = '[plugins."io.containerd.grpc.v1.cri"'
    unused = ", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in ("btrfs", "zfs", "devmapper", "aufs"))
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [{unused}]
[grpc]
  address = "{settings.containerd_socket}"
{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  {cri}.cni]
    bin_dir = "{machine.cni_folder}"
    conf_dir = "{settings.state}/cni"
  {cri}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    {cri}.containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def cni() -> str:
    """Pods on one bridge, with the node as their gateway; hairpin, so that a pod reaches itself through its Service."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": s.NODE_POD_CIDR}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]}, indent=2) + "\n"


def kubelet(settings: Settings, machine: Machine) -> str:
    """cgroupfs as driver: nothing here talks to systemd. Images are never collected: no registry has them.

    Too little disk is an amount, not a share: one per cent of a large disk is gigabytes, and below it no pod starts.
    """
    version_1 = "failCgroupV1: false\n" if machine.cgroup == 1 else ""
    return f"""\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://{settings.containerd_socket}
cgroupDriver: cgroupfs
cgroupRoot: /{settings.cgroup}
{version_1}failSwapOn: false
clusterDomain: cluster.local
clusterDNS: [{s.DNS_IP}]
resolvConf: {settings.state}/resolv.conf
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: true}}
  x509: {{clientCAFile: {settings.pki}/ca.crt}}
authorization: {{mode: Webhook}}
tlsCertFile: {settings.pki}/kubelet.crt
tlsPrivateKeyFile: {settings.pki}/kubelet.key
evictionHard: {{memory.available: 100Mi, nodefs.available: {s.DISK_LEFT_MIB}Mi, imagefs.available: {s.DISK_LEFT_MIB}Mi}}
imageGCHighThresholdPercent: 100
serializeImagePulls: false
eventRecordQPS: 0
shutdownGracePeriod: 0s
oomScoreAdj: 0
"""


def proxy(settings: Settings, machine: Machine) -> str:
    """conntrack: all left alone, because its sysctls cannot be written from a child network namespace."""
    return f"""\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: {machine.proxy_mode}
clientConnection: {{kubeconfig: {settings.pki}/proxy.kubeconfig}}
clusterCIDR: {s.POD_CIDR}
oomScoreAdj: 0
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
nftables: {{minSyncPeriod: 0s}}
iptables: {{minSyncPeriod: 0s}}
"""


def coredns(image: str) -> str:
    template = (HERE / "manifests" / "coredns.yaml").read_text()
    body = "".join(line for line in template.splitlines(keepends=True) if not line.startswith("#"))
    return body.replace("@DNS_IP@", s.DNS_IP).replace("@IMAGE@", image)


def files(settings: Settings, machine: Machine) -> dict[Path, str]:
    """Every file that node.sh and its programs read, by path. resolv.conf is empty: pods cannot leave the node."""
    state = settings.state
    return {
        state / "node.env": node_environment(),
        state / "containerd.toml": containerd(settings, machine),
        state / "cni" / "10-bridge.conflist": cni(),
        state / "kubelet.yaml": kubelet(settings, machine),
        state / "proxy.yaml": proxy(settings, machine),
        state / "resolv.conf": "",
        state / "audit-policy.yaml": (HERE / "manifests" / "audit-policy.yaml").read_text(),
    }
