import io
import json
import tarfile
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

import pytest

from e2e.cluster import containers
from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress, write
from e2e.images import app, base, deliver, wheels
from e2e.images.install import compile_new
from e2e.images.store import Store, digest

LOCK = """\
# made by a tool
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:aa
    # via click
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:bb \\
    --hash=sha256:cc
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:dd
uvloop==0.23.0 ; platform_python_implementation == 'CPython' \\
    --hash=sha256:ee
click==8.5.1 \\
    --hash=sha256:ff
    # via
    #   typer
"""


def requirements(text: str) -> dict[str, int]:
    """Requirement -> number of hashes, as pip would read it: lines continued by backslashes."""
    lines = text.replace("\\\n", " ").splitlines()
    return {line.split()[0]: line.count("--hash=") for line in lines}


def test_lock_for_one_python() -> None:
    old, new = wheels.for_python(LOCK, "3.11"), wheels.for_python(LOCK, "3.13")
    assert requirements(old) == {"numpy==2.4.6": 2, "uvloop==0.23.0": 1, "click==8.5.1": 1}
    assert requirements(new) == {"numpy==2.5.5": 1, "uvloop==0.23.0": 1, "click==8.5.1": 1}
    assert ";" not in old


@pytest.mark.parametrize("lock", [*wheels.LOCKS.values(), wheels.MODEL_LOCK, wheels.TOOLS_LOCK])
def test_locks_have_hashes_and_no_addresses(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    for python in ("3.11", "3.12", "3.13"):
        found = requirements(wheels.for_python(text, python))
        assert found
        assert all(found.values())


PYPROJECT = """\
[project]
dependencies = ["click>=8"]
optional-dependencies.runtime = ["numpy>=2,<3", "uvloop>=0.22; platform_python_implementation == 'CPython'"]
"""


def test_a_lock_that_pyproject_has_left_behind_is_noticed() -> None:
    assert wheels.outdated(PYPROJECT, ("runtime",), LOCK) == []
    assert wheels.outdated(PYPROJECT.replace("click>=8", "Click"), ("runtime",), LOCK) == []
    assert wheels.outdated(PYPROJECT.replace("numpy>=2,<3", "numpy>=3"), ("runtime",), LOCK) == ["numpy>=3"]
    assert wheels.outdated(PYPROJECT.replace("uvloop", "msgspec"), ("runtime",), LOCK)[0].startswith("msgspec")


@pytest.mark.parametrize("extra", wheels.LOCKS)
def test_locks_are_up_to_date(extra: str) -> None:
    wheels.check_lock(extra)


def test_a_lock_without_what_another_one_has() -> None:
    kept = wheels.without(LOCK, "numpy==2.4.6 \\\n    --hash=sha256:bb\nclick==8.5.1\n")
    assert requirements(kept.partition("\n")[2]).keys() == {"colorama==0.4.6", "#", "uvloop==0.23.0"}
    assert kept.startswith("# made by a tool\n")


def test_images_carry_what_they_need_and_no_more() -> None:
    names = {
        name: {line.split("==")[0] for line in requirements(wheels.for_python(lock.read_text(), "3.11"))}
        for name, lock in wheels.LOCKS.items()
    }
    assert {"numpy", "tokenizers", "uvicorn", "uvloop", "opentelemetry-sdk"} <= names["runtime"]
    assert {"kopf", "kubernetes", "aiohttp"} <= names["operator"]
    assert not {"torch", "kopf", "kubernetes", "llama-cpp-python"} & names["runtime"]
    assert not {"torch", "numpy", "tokenizers"} & names["operator"]
    assert {"torch", "triton", "nvidia-cublas"} <= names["gpu"]
    assert not names["gpu"] & names["runtime"], "one image has both, and installs each once"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_two_locks_of_the_gpu_image_are_all_that_torch_needs(python: str) -> None:
    """They are installed without looking at dependencies."""
    from importlib.metadata import requires

    from pip._vendor.packaging.requirements import Requirement

    locks = "".join(wheels.for_python(wheels.LOCKS[name].read_text(), python) for name in ("runtime", "gpu"))
    locked = {line.split("==")[0] for line in requirements(locks)}
    environment = {"python_version": python, "extra": ""}
    for package in ("torch", "triton"):
        for text in requires(package) or ():
            wish = Requirement(text)
            if wish.marker is None or wish.marker.evaluate(environment):
                assert wish.name.lower() in locked, f"{package} needs {wish}"


SIMULATION = """\
Reading package lists...
Inst zlib1g (1:1.2.13.dfsg-1 Debian:12.12/oldstable [amd64])
Inst python3.11-minimal (3.11.2-6+deb12u9 Debian-Security:12/oldstable-security [amd64]) []
Inst media-types (10.0.0 Debian:12.12/oldstable [all])
Inst libc6:amd64 (2.36-9 Debian:12.12/oldstable, Debian-Security:12 [amd64])
Conf zlib1g (1:1.2.13.dfsg-1 Debian:12.12/oldstable [amd64])
"""


def test_packages_as_apt_names_their_files() -> None:
    found = base.parse_simulation(SIMULATION)
    assert [package.file for package in found] == [
        "zlib1g_1%3a1.2.13.dfsg-1_amd64.deb",
        "python3.11-minimal_3.11.2-6+deb12u9_amd64.deb",
        "media-types_10.0.0_all.deb",
        "libc6_2.36-9_amd64.deb",
    ]
    assert base.python_version(found) == "3.11"
    with pytest.raises(Failure, match="expected one version of Python"):
        base.python_version(found[:1])


def test_digest_sees_names_contents_and_modes(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x", "1")
    first = digest(tmp_path / "a")
    write(tmp_path / "a" / "__pycache__" / "x.pyc", "compiled")
    assert digest(tmp_path / "a") == first
    (tmp_path / "a" / "x").chmod(0o755)
    second = digest(tmp_path / "a")
    write(tmp_path / "a" / "x", "2", mode=0o755)
    third = digest(tmp_path / "a")
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    assert len({first, second, third, digest(tmp_path / "a")}) == 4
    assert digest("ab", "c") != digest("a", "bc")


def test_a_change_of_code_touches_only_the_last_step(tmp_path: Path) -> None:
    steps = {"model": tmp_path / "model-1", "dependencies": tmp_path / "deps-1", "code": tmp_path / "code"}
    for folder in (*steps.values(), tmp_path / "pip"):
        write(folder / f"{folder.name}.whl", "one")
    write(tmp_path / "pip" / "pip-1.whl", "pip")
    inputs = app.Inputs(tmp_path / "pip", steps, {"model": "m==1\n", "dependencies": "d==1\n"})
    before = inputs.keys()
    write(steps["code"] / "code.whl", "two")
    after = inputs.keys()
    assert {name for name in after if before[name] != after[name]} == {"CODE_KEY"}
    context = tmp_path / "context"
    inputs.lay_out(context)
    assert sorted(str(file.relative_to(context)) for file in context.rglob("*") if file.is_file()) == [
        "code/code.whl", "dependencies/deps-1.whl", "dependencies/requirements.lock", "model/model-1.whl",
        "model/requirements.lock", "pip/install.py", "pip/pip-1.whl",
    ]  # fmt: skip


def test_only_the_gpu_image_has_the_libraries_for_gpus(tmp_path: Path) -> None:
    assert app.locks_of("runtime")["accelerator"] is None
    assert app.locks_of("runtime-gpu")["accelerator"] == wheels.LOCKS["gpu"]
    assert app.dockerfile("runtime-gpu") == app.dockerfile("runtime")
    for folder in ("pip", "gpu-1", "code"):
        write(tmp_path / folder / f"{folder}.whl", "one")
    write(tmp_path / "pip" / "pip-1.whl", "pip")
    steps: dict[str, Path | None] = {"accelerator": None, "code": tmp_path / "code"}
    without = app.Inputs(tmp_path / "pip", steps, {})
    with_it = app.Inputs(tmp_path / "pip", {**steps, "accelerator": tmp_path / "gpu-1"}, {"accelerator": "t==1\n"})
    assert without.keys()["ACCELERATOR_KEY"] == "", "the Dockerfile leaves the step out"
    assert with_it.keys()["ACCELERATOR_KEY"]
    assert with_it.keys()["CODE_KEY"] == without.keys()["CODE_KEY"]
    without.lay_out(tmp_path / "a")
    with_it.lay_out(tmp_path / "b")
    assert list((tmp_path / "a" / "accelerator").iterdir()) == [], "mounted all the same, so it must be there"
    assert {file.name for file in (tmp_path / "b" / "accelerator").iterdir()} == {"gpu-1.whl", "requirements.lock"}


@pytest.mark.parametrize("name", app.NAMES)
def test_dockerfile_mounts_the_folders_and_declares_the_keys_that_the_build_passes(name: str) -> None:
    steps = ("model", "dependencies", "accelerator", "code") if name == "runtime" else ("dependencies", "code")
    text = app.dockerfile(name).read_text()
    declared = [line.split()[1].split("=")[0] for line in text.splitlines() if line.startswith("ARG ")]
    assert declared == ["BASE", *(f"{step.upper()}_KEY" for step in steps)]
    for step in steps:
        assert text.count(f"source={step},target=/mnt/wheels") == 1


def test_an_archive_is_current_only_with_its_key(tmp_path: Path) -> None:
    store = Store(Settings(tmp_path, tmp_path / "state"))
    archive = store.archive("localhost/busload-runtime:dev")
    assert archive == tmp_path / "images" / "busload-runtime-dev.tar"
    write(archive.with_suffix(".key"), "k1")
    assert not store.is_current("localhost/busload-runtime:dev", "k1")
    write(archive, "")
    assert store.is_current("localhost/busload-runtime:dev", "k1")
    assert not store.is_current("localhost/busload-runtime:dev", "k2")


def docker_archive(file: Path, manifest: object) -> Path:
    data = json.dumps(manifest).encode()
    with tarfile.open(file, "w") as tar:
        member = tarfile.TarInfo("manifest.json")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return file


def test_names_in_an_archive(tmp_path: Path) -> None:
    good = docker_archive(tmp_path / "a.tar", [{"RepoTags": ["localhost/a:1", "localhost/a:2"]}])
    assert containers.references(good) == ["localhost/a:1", "localhost/a:2"]
    with pytest.raises(Failure, match="an image without a name"):
        containers.references(docker_archive(tmp_path / "b.tar", [{"RepoTags": None}]))
    write(tmp_path / "c.tar", "text")
    for wrong in ("c.tar", "missing.tar"):
        with pytest.raises(Failure, match="is no docker-archive"):
            containers.references(tmp_path / wrong)


def test_load_skips_what_the_node_has_and_imports_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(tmp_path, tmp_path / "state")
    imported: list[str] = []
    present: list[str] = []

    def ctr(_: Settings, *arguments: object, check: bool = True) -> str:
        if arguments[:2] == ("images", "import"):
            imported.append(Path(str(arguments[-1])).name)
            present.append("localhost/a:1")
        return "\n".join(present)

    monkeypatch.setattr(containers, "ctr", ctr)
    archive = docker_archive(tmp_path / "a.tar", [{"RepoTags": ["localhost/a:1"]}])
    for _ in range(2):
        containers.load(settings, [archive], Progress())
    assert imported == ["a.tar"]
    docker_archive(archive, [{"RepoTags": ["localhost/a:1"], "Layers": ["new"]}])
    containers.load(settings, [archive], Progress())
    assert imported == ["a.tar"] * 2
    present.clear()  # removed behind our back
    containers.load(settings, [archive], Progress())
    assert imported == ["a.tar"] * 3


def view(name: str, provider: str | None = None) -> str:
    extensions = [{"name": "cluster_info", "extension": {"provider": provider}}] if provider else None
    return json.dumps({"current-context": name, "clusters": [{"name": "c", "cluster": {"extensions": extensions}}]})


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (view("kind-dev"), ["kind", "load", "image-archive", "/i.tar", "--name", "dev"]),
        (view("k3d-dev"), ["k3d", "image", "import", "/i.tar", "--cluster", "dev"]),
        (view("mine", "minikube.sigs.k8s.io"), ["minikube", "--profile", "mine", "image", "load", "/i.tar"]),
        (view("prod-eu"), None),
        (view("kindergarten"), None),
    ],
)
def test_how_a_local_cluster_gets_images(context: str, expected: list[str] | None) -> None:
    found = deliver.loader(deliver.parse_context(context))
    assert (found and [found[0], *found[1](Path("/i.tar"))]) == expected


def test_no_current_context_is_said() -> None:
    with pytest.raises(Failure, match="no current context"):
        deliver.parse_context('{"kind": "Config", "clusters": null}')


def test_a_cluster_that_cannot_load_needs_a_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "kubectl"
    write(fake, f"#!/bin/sh\ncat <<'E'\n{view('prod-eu')}\nE\n", mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("REGISTRY", raising=False)
    image = deliver.Image("localhost/busload-runtime:dev", tmp_path / "x.tar")
    with pytest.raises(Failure, match=r"'prod-eu' is no kind, minikube or k3d cluster.*set REGISTRY="):
        deliver.to_current(Store(Settings(tmp_path, tmp_path)), [image], Progress())
    write(fake, f"#!/bin/sh\ncat <<'E'\n{view('kind-x')}\nE\n", mode=0o755)
    with pytest.raises(Failure, match="is a kind cluster, but kind is not on PATH"):
        deliver.to_current(Store(Settings(tmp_path, tmp_path)), [image], Progress())
    write(tmp_path / "kind", f'#!/bin/sh\necho "$@" > {tmp_path}/called\n', mode=0o755)
    deliver.to_current(Store(Settings(tmp_path, tmp_path)), [image], Progress())
    assert (tmp_path / "called").read_text() == f"load image-archive {tmp_path}/x.tar --name x\n"


def test_push_arguments() -> None:
    image = "localhost/busload-runtime:dev"
    assert deliver.push_arguments(image, "ghcr.io/me/") == [
        "push", "--quiet", image, "docker://ghcr.io/me/busload-runtime:dev",
    ]  # fmt: skip
    assert deliver.push_arguments(image, "127.0.0.1:5000")[2:] == [
        "--tls-verify=false", image, "docker://127.0.0.1:5000/busload-runtime:dev",
    ]  # fmt: skip
    for wrong in ("https://ghcr.io/me", "/"):
        with pytest.raises(Failure, match="must be HOST"):
            deliver.push_arguments(image, wrong)


def test_what_an_image_build_installs_is_compiled_once_and_never_checked(tmp_path: Path) -> None:
    write(tmp_path / "a" / "__init__.py", "VALUE = 1\n")
    write(tmp_path / "b.py", "VALUE = 2\n")
    write(tmp_path / "later.py", "match = syntax of another Python\n")
    compile_new(tmp_path)
    compiled = [Path(cache_from_source(str(tmp_path / name))) for name in ("a/__init__.py", "b.py")]
    for path in compiled:
        magic, flags = path.read_bytes()[:4], int.from_bytes(path.read_bytes()[4:8], "little")
        assert (magic, flags) == (MAGIC_NUMBER, 0b01), "by hash, unchecked (PEP 552)"
    before = [path.stat().st_mtime_ns for path in compiled]
    write(tmp_path / "c.py", "VALUE = 3\n")
    compile_new(tmp_path)
    assert Path(cache_from_source(str(tmp_path / "c.py"))).exists()
    assert [path.stat().st_mtime_ns for path in compiled] == before
