"""A signal that comes while a command is still importing what it needs."""

import subprocess
import sys

# The import hook stands for a slow import: the signal arrives in the middle of it.
TERMINATED_AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from busload_operator.cli import build_app
build_app()(sys.argv[2:])
"""


def test_sigterm_during_the_imports_ends_the_operator_with_0() -> None:
    # As process 1 of a container it would otherwise be lost: an operator that was told to go would become the leader.
    # (`busload serve` has the same test among those of its life cycle.)
    program = [sys.executable, "-c", TERMINATED_AT_IMPORT, "busload_operator.control.main", "operator"]
    result = subprocess.run(program, capture_output=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
