"""The images that need no registry: FROM scratch, out of the distribution's packages and of what is built here.

pause and CoreDNS run the cluster; busload-python is the base of the runtime's and the operator's image on machines
without a registry. Its Python is the distribution's, so its version follows the machine (3.11 on Debian 12, 3.12 on
Ubuntu 24.04).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.host import os_release
from e2e.cluster.render import PAUSE_IMAGE
from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress, downloading, run, write

from .store import Store, digest

HERE = Path(__file__).resolve().parent
COREDNS_IMAGE = f"localhost/busload-coredns:{programs.PROGRAMS['coredns'].version}"
USER = 65532  # what distroless images call nonroot

# python3 brings what its standard library links to (ssl, ffi, sqlite3 ...). The two after it are for numpy's wheels.
PYTHON_PACKAGES = ("python3", "libstdc++6", "libgomp1", "busybox-static", "ca-certificates", "tzdata")
# Triton compiles its way into the driver when it starts: a C compiler, Python's headers, and ldconfig to find libcuda.
COMPILER_PACKAGES = ("gcc", "libc6-dev", "libpython3-dev", "libc-bin")
# Dependencies for installing packages, which nobody does in these images. The file of certificates is made below.
UNWANTED = (
    "dpkg",
    "debconf",
    "perl-base",
    "tar",
    "openssl",
    "libselinux1",
    "libpcre2-8-0",
    "libacl1",
    "libmd0",
    # Of a compiler: what checks programs while they run.
    "libasan8",
    "liblsan0",
    "libtsan2",
    "libubsan1",
    "libgprofng0",
)
NOT_IN_IMAGES = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/bug",
    "usr/share/info",
)


def build_pause(store: Store, progress: Progress) -> Path:
    source = HERE / "pause.c"
    key = digest(source)
    if not store.is_current(PAUSE_IMAGE, key):
        with progress.step(f"{PAUSE_IMAGE} built"):
            context = _fresh(store, "pause")
            run(["gcc", "-static", "-Os", "-s", "-o", context / "pause", source])
            dockerfile = 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n'
            write(context / "Dockerfile", dockerfile)
            store.build(PAUSE_IMAGE, context, context / "Dockerfile")
            store.export(PAUSE_IMAGE, key)
    return store.archive(PAUSE_IMAGE)


def build_coredns(store: Store, progress: Progress) -> Path:
    program = programs.path(store.settings, "coredns")
    key = digest(program.name)
    if not store.is_current(COREDNS_IMAGE, key):
        with progress.step(f"{COREDNS_IMAGE} built"):
            context = _fresh(store, "coredns")
            shutil.copy2(program, context / "coredns")
            write(context / "Dockerfile", 'FROM scratch\nCOPY coredns /coredns\nENTRYPOINT ["/coredns"]\n')
            store.build(COREDNS_IMAGE, context, context / "Dockerfile")
            store.export(COREDNS_IMAGE, key)
    return store.archive(COREDNS_IMAGE)


def build_system(store: Store, progress: Progress) -> list[Path]:
    """The images without which no node starts."""
    return [build_pause(store, progress), build_coredns(store, progress)]


@dataclass(frozen=True)
class Package:
    """A Debian package: its name and the file that apt-get keeps it in, which has its version in its name."""

    name: str
    file: str


def parse_simulation(text: str) -> list[Package]:
    """What `apt-get --simulate install` would do: lines such as `Inst zlib1g (1:1.2.13 Debian:12/stable [amd64])`."""
    found = re.findall(r"^Inst ([^\s:]+)\S* \((\S+) [^\[]*\[(\w+)\]", text, flags=re.MULTILINE)
    return [Package(name, f"{name}_{version.replace(':', '%3a')}_{machine}.deb") for name, version, machine in found]


def _apt(settings: Settings, packages: tuple[str, ...], *arguments: str) -> str:
    """apt-get as if nothing were installed on the machine: it names or fetches all that the packages need, and nothing
    else (ForceEssential: not the base system either)."""
    folder = settings.cache / "debs"
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    write(folder / "status", "")
    options = {
        "Dir::State::status": folder / "status",
        "Dir::Cache::Archives": folder,
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "root",
        "Acquire::Retries": "3",
        "pkgCacheGen::ForceEssential": ",",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return run(["apt-get", *words, "-y", *arguments, "install", *packages]).stdout


def _packages(settings: Settings, wanted: tuple[str, ...]) -> list[Package]:
    """Asked of apt again only when its lists have changed: that takes a second or two."""
    lists = [f"{file.name} {file.stat().st_mtime_ns}" for file in sorted(Path("/var/lib/apt/lists").glob("*Packages*"))]
    answer = settings.cache / "debs" / f"simulation-{digest(*wanted, *lists)[:12]}.txt"
    if not answer.exists():
        simulation = _apt(settings, wanted, "--simulate")
        python_version(parse_simulation(simulation))
        write(answer, simulation)
    return [package for package in parse_simulation(answer.read_text()) if package.name not in UNWANTED]


def python_version(packages: list[Package]) -> str:
    """The minor version of Python among packages, for example 3.11. Raises Failure unless there is exactly one."""
    names = [found[1] for package in packages if (found := re.fullmatch(r"python(3\.\d+)-minimal", package.name))]
    if len(names) != 1:
        raise Failure(f"expected one version of Python among the base image's packages, found {names or 'none'}")
    return names[0]


def _rootfs(settings: Settings, wanted: tuple[str, ...], packages: list[Package], root: Path) -> None:
    """Unpacks the packages, without running their scripts, and adds the few files that those would have made."""
    _apt(settings, wanted, "--download-only")
    for folder in (
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "etc/ssl/certs",
        "tmp",
        "var/tmp",
        "root",
        "proc",
        "sys",
        "dev",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("tmp", "var/tmp"):
        (root / folder).chmod(0o1777)
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    for package in packages:
        excluded = [f"--exclude=./{folder}" for folder in NOT_IN_IMAGES]
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", settings.cache / "debs" / package.file], stdout=subprocess.PIPE
        ) as unpack:
            extract = ["tar", "-x", "-C", str(root), "--keep-directory-symlink", *excluded]
            unpacked = subprocess.run(extract, stdin=unpack.stdout, capture_output=True, text=True)
        if unpack.returncode != 0 or unpacked.returncode != 0:
            raise Failure(f"unpacking {package.file} failed: {unpacked.stderr}")
    # The list of applets names busybox itself: a link of that name would replace the program by a link to itself.
    for applet in run([root / "usr/bin/busybox", "--list"]).stdout.split():
        if applet != "busybox" and not (root / "usr/bin" / applet).exists():
            (root / "usr/bin" / applet).symlink_to("busybox")
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    write(root / "etc/ssl/certs/ca-certificates.crt", "".join(file.read_text() for file in certificates))
    write(root / "etc/passwd", f"root:x:0:0::/root:/bin/sh\nnonroot:x:{USER}:{USER}::/:/bin/false\n")
    write(root / "etc/group", f"root:x:0:\nnonroot:x:{USER}:\n")
    write(root / "etc/nsswitch.conf", "hosts: files dns\n")
    # Hash-based, never checked again: the same bytes each time, and no stale ones when a layer changes times.
    argv: list[str | Path] = [
        "chroot",
        root,
        "python3",
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode",
        "unchecked-hash",
        "/usr/lib",
    ]
    run(argv, check=False)  # some of the library's own test data does not compile, on purpose


PYTHON_DOCKERFILE = """\
FROM scratch
COPY rootfs/ /
ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
CMD ["python3"]
"""


@dataclass(frozen=True)
class Base:
    """A base image: its name, the Python version in it ("3.11"), a key that changes with its content."""

    reference: str
    python: str
    key: str


def build_python(store: Store, progress: Progress, *, compiler: bool = False) -> Base:
    """The base image localhost/busload-python, in buildah's store and as an archive (tests run it as a plain pod).

    `compiler`: localhost/busload-python-compiler, which has one for C besides.
    """
    try:
        return _build_python(store, progress, compiler)
    except Failure as error:
        progress.note(f"{error}\nthe machine's package lists may be missing or old: updating them, then once more")
        downloading(lambda: run(["apt-get", "-qq", "-o", "Acquire::Retries=3", "update"]), progress.note)
        return _build_python(store, progress, compiler)


def _build_python(store: Store, progress: Progress, compiler: bool) -> Base:
    name = "busload-python-compiler" if compiler else "busload-python"
    wanted = (*PYTHON_PACKAGES, *COMPILER_PACKAGES) if compiler else PYTHON_PACKAGES
    packages = _packages(store.settings, wanted)
    version, codename = python_version(packages), os_release().get("VERSION_CODENAME", "unknown")
    key = digest(Path(__file__), PYTHON_DOCKERFILE, *(package.file for package in packages))
    reference = f"localhost/{name}:{version}-{codename}"
    if not (store.is_current(reference, key) and store.has(reference)):
        with progress.step(f"{reference} built"):
            context = _fresh(store, "python")
            (context / "rootfs").mkdir()
            _rootfs(store.settings, wanted, packages, context / "rootfs")
            write(context / "Dockerfile", PYTHON_DOCKERFILE)
            store.build(reference, context, context / "Dockerfile")
            store.export(reference, key)
            shutil.rmtree(context)
    return Base(reference, version, key)


def _fresh(store: Store, name: str) -> Path:
    """An empty folder for one build."""
    folder = store.settings.cache / "build" / f"image-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
