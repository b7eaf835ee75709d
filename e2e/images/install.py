"""Runs inside an image build: installs wheels with pip out of its own wheel, then compiles what was installed.

usage: python install.py ARGUMENT...   (of `pip install`; wheels come from the folder /mnt/wheels)

Compiled while building, because pods run on a read-only file system; with hashes that are not checked when imported, so
that nothing depends on the times of files, which layers may change.
"""

import py_compile
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path


def main() -> None:
    pip = next(Path(__file__).parent.glob("pip-*.whl")) / "pip"
    options = ["--quiet", "--no-index", "--find-links=/mnt/wheels", "--no-cache-dir", "--no-compile"]
    quiet = ["--root-user-action=ignore", "--disable-pip-version-check"]
    subprocess.run([sys.executable, str(pip), "install", *options, *quiet, *sys.argv[1:]], check=True)
    packages = Path(sysconfig.get_path("purelib"))
    for tests in (packages / "numpy").rglob("tests"):  # a third of numpy's files
        shutil.rmtree(tests, ignore_errors=True)
    compile_new(packages)


def compile_new(packages: Path) -> None:
    """Byte code of all modules below the folder that have none."""
    # Only what this step brought: whatever is written again would be in this step's layer again.
    new = [source for source in packages.rglob("*.py") if not Path(cache_from_source(str(source))).exists()]
    for source in new:
        try:
            py_compile.compile(
                str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
        except py_compile.PyCompileError as error:
            # torch has test helpers in the syntax of a later Python, which it imports only there.
            print(f"not for this Python, left as it is: {source}: {error.exc_value}")


if __name__ == "__main__":
    main()
