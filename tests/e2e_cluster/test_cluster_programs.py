import dataclasses
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster import programs
from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress

KUBEONE = programs.PROGRAMS["kubeone"]
UPSTREAM = """\
module k8s.io/kubernetes

go 1.24.0

require (
	github.com/x/y v1.2.3
	k8s.io/api v0.0.0
)

replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/client-go => ./staging/src/k8s.io/client-go
)
"""


def test_module_file_names_the_released_staging_modules() -> None:
    text = programs.module_file(UPSTREAM, KUBEONE)
    assert text.startswith("module busload.dev/kubeone\n")
    assert "k8s.io/api => k8s.io/api v0.34.4\n" in text
    assert "k8s.io/client-go => k8s.io/client-go v0.34.4\n" in text
    assert text.endswith("\nrequire k8s.io/kubernetes v1.34.4\n")
    assert "github.com/x/y v1.2.3" in text
    assert "./" not in text


def test_module_file_refuses_a_replacement_that_no_proxy_has() -> None:
    with pytest.raises(Failure, match=r"replaces a module by a folder: => \.\./engine"):
        programs.module_file("module a\n\nreplace b => ../engine\n", programs.PROGRAMS["helm"])


def test_key_changes_with_everything_that_changes_the_program() -> None:
    keys = [
        KUBEONE.key,
        dataclasses.replace(KUBEONE, version="v1.34.5").key,
        dataclasses.replace(KUBEONE, version_variables=()).key,
        dataclasses.replace(KUBEONE, module="example.org/other").key,
    ]
    assert len(set(keys)) == len(keys)
    assert KUBEONE.key == programs.PROGRAMS["kubeone"].key
    assert KUBEONE.key.startswith("kubeone-v1.34.4-")
    assert dataclasses.replace(KUBEONE, takes="an hour").key == KUBEONE.key


def test_version_variables_are_what_the_programs_call_themselves() -> None:
    flags = KUBEONE.linker_flags
    assert "-X k8s.io/component-base/version.gitVersion=v1.34.4" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=34" in flags


@pytest.mark.parametrize(
    ("found", "toolchain", "fits"),
    [
        ("go1.26.8", "local", True),
        ("go1.24.0", "local", True),
        ("go1.23.4", "local", False),
        ("go1.23.4", "auto", True),  # fetches a newer one by itself
        ("go1.19.8", "", False),  # knows no toolchains
    ],
)
def test_go_too_old_is_refused_unless_it_can_fetch_a_newer_one(found: str, toolchain: str, fits: bool) -> None:
    if fits:
        programs.check_go_version("1.24.0", found, toolchain, "kubernetes")
    else:
        with pytest.raises(Failure, match=f"needs Go 1.24.0 or newer; this machine has {found}"):
            programs.check_go_version("1.24.0", found, toolchain, "kubernetes")


def fake_go(folder: Path, build: str) -> None:
    """A `go` that answers as the real one does, and runs `build` in place of a compilation ($out is its -o)."""
    module = folder / "module"
    module.mkdir(parents=True)
    (module / "go.mod").write_text("module github.com/coredns/coredns\n\ngo 1.24.0\n")
    (module / "go.sum").write_text("")
    script = folder / "go"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1 $2" in\n'
        f"""'mod download') echo '{{"Dir": "{module}", "Sum": "h1:a", "GoModSum": "h1:b"}}' ;;\n"""
        "'env GOVERSION') printf 'go1.26.8\\nlocal\\n' ;;\n"
        f'build*) while [ "$1" != -o ]; do shift; done; out=$2; {build} ;;\n'
        "esac\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PATH", f"{tmp_path / 'fake'}:{os.environ['PATH']}")
    return Settings(tmp_path / "cache", tmp_path / "state")


def test_build_keeps_the_program_under_its_key_and_builds_once(settings: Settings, tmp_path: Path) -> None:
    fake_go(tmp_path / "fake", f'echo program > "$out"; echo built >> {tmp_path}/count')
    first = programs.build(settings, "coredns", Progress())
    assert first == settings.bin / programs.PROGRAMS["coredns"].key
    assert programs.build(settings, "coredns", Progress()) == first
    assert (tmp_path / "count").read_text() == "built\n"
    programs.link(settings)
    assert [link.name for link in settings.node_bin.iterdir()] == ["coredns"]
    assert (settings.node_bin / "coredns").read_text() == "program\n"


def test_a_build_that_fails_half_way_leaves_nothing_under_the_key(settings: Settings, tmp_path: Path) -> None:
    fake_go(tmp_path / "fake", 'echo half > "$out"; echo "x.go:1: broken" >&2; exit 1')
    with pytest.raises(Failure, match=r"building coredns v1.14.7 ended with 1:\nx.go:1: broken"):
        programs.build(settings, "coredns", Progress())
    assert not programs.path(settings, "coredns").exists()


def test_a_killed_builder_leaves_neither_half_a_program_nor_a_lock(settings: Settings, tmp_path: Path) -> None:
    fake_go(tmp_path / "fake", f'echo half > "$out"; echo started > {tmp_path}/started; sleep 60')
    code = (
        "from pathlib import Path; from e2e.cluster import programs, settings, shell;"
        f"programs.build(settings.Settings(Path({str(settings.cache)!r}), Path('/s')), 'coredns', shell.Progress())"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as builder:
        while not (tmp_path / "started").exists():
            assert builder.poll() is None
        os.killpg(builder.pid, 9)
    assert not programs.path(settings, "coredns").exists()
    with (settings.cache / "locks" / "go-build").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_go_the_message_says_where_to_get_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("e2e.cluster.programs.shutil.which", lambda *_, **__: None)
    with pytest.raises(Failure, match=r"Go is not installed.*https://go.dev/dl/"):
        programs.build(settings, "coredns", Progress())
