"""The cluster's certificates, keys and kubeconfig files, made by openssl once per state directory."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from . import settings as s
from .settings import Settings
from .shell import run, write

DAYS = "3650"


@dataclass(frozen=True)
class Identity:
    """A certificate: its file name, its subject (CN is the user, O the group, for the API server), its other names."""

    name: str
    subject: str
    names: str = ""
    authority: str = "ca"


API_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
IDENTITIES = (
    Identity(
        "apiserver",
        "/CN=kube-apiserver",
        ",".join(
            [f"IP:{address}" for address in ("127.0.0.1", s.NODE_IP, s.API_SERVICE_IP)]
            + [f"DNS:{name}" for name in (*API_NAMES, "kubernetes.default.svc.cluster.local")]
        ),
    ),
    Identity("apiserver-kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client"),
    Identity("front-proxy-client", "/CN=front-proxy-client", authority="front-proxy-ca"),
    Identity("kubelet", f"/O=system:nodes/CN=system:node:{s.NODE}", f"IP:{s.NODE_IP},IP:127.0.0.1,DNS:{s.NODE}"),
    Identity("admin", "/O=system:masters/CN=admin"),
    Identity("controller-manager", "/CN=system:kube-controller-manager"),
    Identity("scheduler", "/CN=system:kube-scheduler"),
    Identity("proxy", "/CN=system:kube-proxy"),
)
# Who talks to the API server with a kubeconfig from inside the node's network.
NODE_CLIENTS = ("controller-manager", "scheduler", "proxy", "kubelet")


def _key(folder: Path, name: str) -> None:
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", folder / f"{name}.key"])


def _authority(folder: Path, name: str) -> None:
    _key(folder, name)
    usage = "keyUsage=critical,keyCertSign,cRLSign"
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    argv: list[str | Path] = [
        "openssl",
        "req",
        "-x509",
        "-new",
        "-key",
        key,
        "-subj",
        f"/CN={name}",
        "-days",
        DAYS,
        "-addext",
        usage,
    ]
    run([*argv, "-out", certificate])


def _certificate(folder: Path, identity: Identity) -> None:
    name, extensions = identity.name, folder / f"{identity.name}.ext"
    _key(folder, name)
    lines = ["keyUsage=critical,digitalSignature", "extendedKeyUsage=clientAuth,serverAuth"]
    lines += [f"subjectAltName={identity.names}"] if identity.names else []
    write(extensions, "\n".join(lines) + "\n")
    request = run(["openssl", "req", "-new", "-key", folder / f"{name}.key", "-subj", identity.subject]).stdout
    signer: list[str | Path] = [
        "-CA",
        folder / f"{identity.authority}.crt",
        "-CAkey",
        folder / f"{identity.authority}.key",
    ]
    argv: list[str | Path] = [
        "openssl",
        "x509",
        "-req",
        *signer,
        "-CAcreateserial",
        "-days",
        DAYS,
        "-extfile",
        extensions,
    ]
    run([*argv, "-out", folder / f"{name}.crt"], stdin=request)
    extensions.unlink()


def kubeconfig(server: str, authority: bytes, certificate: bytes, key: bytes) -> str:
    """A kubeconfig file with one cluster, one user and one context, all named busload; certificates and key in PEM."""
    data = {
        name: base64.b64encode(value).decode()
        for name, value in [("ca", authority), ("crt", certificate), ("key", key)]
    }
    return f"""\
apiVersion: v1
kind: Config
clusters:
- name: busload
  cluster: {{server: "{server}", certificate-authority-data: {data["ca"]}}}
users:
- name: busload
  user: {{client-certificate-data: {data["crt"]}, client-key-data: {data["key"]}}}
contexts:
- name: busload
  context: {{cluster: busload, user: busload}}
current-context: busload
"""


def _write_kubeconfig(folder: Path, identity: str, server: str, target: Path) -> None:
    parts = [(folder / name).read_bytes() for name in ("ca.crt", f"{identity}.crt", f"{identity}.key")]
    write(target, kubeconfig(server, *parts), mode=0o600)


def make(settings: Settings) -> None:
    """Makes all of it below settings.pki, unless a run before did (`complete` is written last)."""
    folder = settings.pki
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for authority in ("ca", "front-proxy-ca"):
        _authority(folder, authority)
    for identity in IDENTITIES:
        _certificate(folder, identity)
    run(["openssl", "genrsa", "-out", folder / "sa.key", "2048"])
    run(["openssl", "rsa", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub"])
    for client in NODE_CLIENTS:
        _write_kubeconfig(folder, client, f"https://{s.NODE_IP}:6443", folder / f"{client}.kubeconfig")
    _write_kubeconfig(folder, "admin", "https://127.0.0.1:6443", settings.node_kubeconfig)
    write(folder / "complete", "")


def write_admin_kubeconfig(settings: Settings, port: int) -> None:
    """The kubeconfig for processes of this machine. Never the user's own ~/.kube/config."""
    _write_kubeconfig(settings.pki, "admin", f"https://127.0.0.1:{port}", settings.kubeconfig)
