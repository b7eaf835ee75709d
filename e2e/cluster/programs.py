"""Builds the cluster's programs from Go modules, each once per version, into the cache.

A program's file name is its version key: it changes with the version, with our own main.go and with the way it is
built, so a key that exists is the program, whole, and nothing else needs to be asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from . import host
from .settings import HERE, Settings
from .shell import HEARTBEAT_SECONDS, Failure, Progress, downloading, exclusive, last_lines, run, write

RECIPE = "1"  # raised when build() changes what it makes
BUILD_FLAGS = ("-mod=mod", "-trimpath", "-buildvcs=false")
FROM_THE_NETWORK = re.compile(
    r"dial tcp|timeout|connection re|EOF|TLS handshake|no such host|bad gateway|50[0-9] ", re.I
)
"""In the words of a build whose modules could not be fetched, which may go well the next time."""


@dataclass(frozen=True)
class Program:
    """A Go program. package: the import path of its main package, or "." for our own main.go in go/NAME.

    links: the names it is called by. version_variables: the string variables that its linker sets.
    gib: disk for modules' sources and for Go's own cache of what it compiled.
    """

    name: str
    module: str
    version: str
    package: str
    links: tuple[str, ...]
    takes: str
    version_variables: tuple[tuple[str, str], ...] = ()
    gib: float = 2

    @property
    def source(self) -> Path | None:
        return HERE / "go" / self.name / "main.go" if self.package == "." else None

    @property
    def key(self) -> str:
        """Names the built file, for example kubeone-v1.34.4-1a2b3c4d."""
        parts = [RECIPE, self.module, self.version, self.package, *BUILD_FLAGS, self.linker_flags]
        parts += [self.source.read_text()] if self.source else []
        return f"{self.name}-{self.version}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:8]}"

    @property
    def linker_flags(self) -> str:
        return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in self.version_variables)])


KUBERNETES = "v1.34.4"


def kubernetes_version_variables(version: str) -> tuple[tuple[str, str], ...]:
    """Without these the programs call themselves v0.0.0-master, and clients that ask for the version are misled."""
    major, minor = version.removeprefix("v").split(".")[:2]
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return tuple((f"{package}.{name}", value) for package in packages for name, value in values.items())


KUBEONE_LINKS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
PROGRAMS = {
    program.name: program
    for program in (
        Program(
            name="kubeone",
            module="k8s.io/kubernetes",
            version=KUBERNETES,
            package=".",
            links=KUBEONE_LINKS,
            takes="about 5 minutes on 2 cores",
            gib=6,
            version_variables=kubernetes_version_variables(KUBERNETES),
        ),
        Program("coredns", "github.com/coredns/coredns", "v1.14.7", ".", ("coredns",), "about 1 minute"),
        Program(
            name="helm",
            module="helm.sh/helm/v3",
            version="v3.22.0",
            package="helm.sh/helm/v3/cmd/helm",
            links=("helm",),
            takes="about 1.5 minutes",
            version_variables=(("helm.sh/helm/v3/internal/version.version", "v3.22.0"),),
        ),
    )
}
# What `up` cannot do without.
NEEDED = ("kubeone", "coredns")


def path(settings: Settings, name: str) -> Path:
    return settings.bin / PROGRAMS[name].key


def go_command() -> str:
    """The Go tool's path. Also looks where the official archive goes, because sudo drops that from PATH."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if not found:
        raise Failure(
            "Go is not installed, and the cluster's programs are built with it: install it from https://go.dev/dl/ "
            "(to /usr/local/go), or by `apt-get install golang-go` where that is 1.24 or newer"
        )
    return found


def go_environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}


def check_go_version(wanted: str, found: str, toolchain: str, who: str) -> None:
    """Raises Failure when this Go can neither build nor fetch a newer toolchain by itself.

    wanted: the go directive of a go.mod ("1.24.0"). found: `go env GOVERSION` ("go1.26.8"). toolchain: GOTOOLCHAIN.
    """
    have = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    need = tuple(int(number) for number in wanted.split(".")[:2])
    fetches_newer = have >= (1, 21) and not toolchain.startswith("local")
    if have < need and not fetches_newer:
        raise Failure(
            f"{who} needs Go {wanted} or newer; this machine has {found} (GOTOOLCHAIN={toolchain or 'unknown'}): "
            "install a newer one from https://go.dev/dl/"
        )


def module_file(upstream: str, program: Program) -> str:
    """A go.mod with every version that upstream's go.mod chose, and the upstream module itself.

    Kubernetes replaces its staging modules by folders of its repository; whoever depends on it must name their released
    versions instead: v0.X.Y for Kubernetes v1.X.Y. `go mod tidy` would do more, but fetches the whole world's tests.
    """
    text = re.sub(r"^module .*$", f"module busload.dev/{program.name}", upstream, count=1, flags=re.MULTILINE)
    staging = re.sub(r"^v1\.", "v0.", program.version)
    text = re.sub(r"=> \./staging/src/(\S+)$", rf"=> \1 {staging}", text, flags=re.MULTILINE)
    left = re.search(r"=> \.{1,2}/.*$", text, flags=re.MULTILINE)
    if left:
        raise Failure(f"go.mod of {program.module} {program.version} replaces a module by a folder: {left[0]}")
    return f"{text.rstrip()}\n\nrequire {program.module} {program.version}\n"


def prepare(program: Program, folder: Path, progress: Progress) -> None:
    """Writes go.mod, go.sum and main.go into `folder`; downloads the upstream module, which Go checks by its sums."""
    go, environment = go_command(), go_environment()
    write(folder / "go.mod", f"module busload.dev/{program.name}\n")
    name = f"{program.module}@{program.version}"
    fetch = [go, "mod", "download", "-json", name]
    found = json.loads(downloading(lambda: run(fetch, env=environment, cwd=folder), progress.note).stdout)
    upstream = (Path(found["Dir"]) / "go.mod").read_text()
    wanted = re.search(r"^go (\S+)$", upstream, flags=re.MULTILINE)
    version, toolchain = run([go, "env", "GOVERSION", "GOTOOLCHAIN"], env=environment).stdout.split("\n")[:2]
    check_go_version(wanted[1] if wanted else "1.21", version, toolchain, name)
    write(folder / "go.mod", module_file(upstream, program))
    module = f"{program.module} {program.version}"
    own_sums = f"{module} {found['Sum']}\n{module}/go.mod {found['GoModSum']}\n"
    write(folder / "go.sum", (Path(found["Dir"]) / "go.sum").read_text() + own_sums)
    if program.source:
        write(folder / "main.go", program.source.read_text())


def compile_program(program: Program, folder: Path, output: Path, progress: Progress) -> None:
    """Runs `go build`, and says every 20 seconds how far it is: minutes of silence look like a hang."""
    argv = [
        go_command(),
        "build",
        "-v",
        *BUILD_FLAGS,
        "-ldflags",
        program.linker_flags,
        "-o",
        str(output),
        program.package,
    ]
    words: list[str] = []
    with subprocess.Popen(argv, cwd=folder, env=go_environment(), stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr is not None
        reader = threading.Thread(target=lambda stream: words.extend(stream), args=[build.stderr], daemon=True)
        reader.start()
        began = time.monotonic()
        while build.poll() is None:
            try:
                build.wait(HEARTBEAT_SECONDS)
            except subprocess.TimeoutExpired:
                compiled = sum(1 for line in words if not line.startswith("go:"))
                progress.note(
                    f"  {program.name}: {time.monotonic() - began:.0f} s, {compiled} packages compiled so far"
                )
        reader.join(10)
    if build.returncode != 0:
        errors = [line for line in words if not re.fullmatch(r"(go: downloading .*|\S+)\n", line)]
        raise Failure(
            f"building {program.name} {program.version} ended with {build.returncode}:\n{last_lines(''.join(errors))}"
        )


def build(settings: Settings, name: str, progress: Progress) -> Path:
    """The program's file in the cache, built first if it is not there. Raises Failure when it cannot be built."""
    program, output = PROGRAMS[name], path(settings, name)
    if output.exists():
        return output
    go_command()
    settings.bin.mkdir(parents=True, exist_ok=True)
    lock = settings.cache / "locks" / "go-build"
    with exclusive(lock, lambda: progress.note(f"another build holds {lock}: waiting for it")):
        if output.exists():
            return output
        host.require_space(output, program.gib, f"building {name}")
        progress.note(f"building {name} {program.version} from its Go module; the first time takes {program.takes}")
        folder, new = settings.cache / "build" / name, settings.bin / f".{program.key}.new"
        shutil.rmtree(folder, ignore_errors=True)
        with progress.step(f"{name} {program.version} built", heartbeat=False):
            prepare(program, folder, progress)
            try:
                compile_program(program, folder, new, progress)
            except Failure as error:
                if not FROM_THE_NETWORK.search(str(error)):
                    raise
                progress.note(f"{error}\na module could not be fetched; what was built is kept")
                downloading(lambda: compile_program(program, folder, new, progress), progress.note)
            new.replace(output)
        shutil.rmtree(folder, ignore_errors=True)
    return output


def link(settings: Settings) -> None:
    """Puts links by plain name into the cluster's bin folder, to all programs that are built for this checkout."""
    settings.node_bin.mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS.values():
        if path(settings, program.name).exists():
            for plain in program.links:
                new = settings.node_bin / f".{plain}.new"
                new.unlink(missing_ok=True)
                new.symlink_to(path(settings, program.name))
                new.replace(settings.node_bin / plain)
