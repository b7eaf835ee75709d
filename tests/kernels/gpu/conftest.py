"""Runs the kernels in Triton's interpreter, on tensors in main memory.

Triton reads the variable when it is imported, its own device functions included, so it has to be there before.
"""

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton was imported before tests/kernels/gpu set TRITON_INTERPRET=1: run these tests first, or by themselves"
    )
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, os.path.dirname(__file__))

from measured import MEASURED


@pytest.fixture(autouse=True)
def _measured(request: pytest.FixtureRequest) -> None:
    call = getattr(request.node, "callspec", None)
    MEASURED.begin(request.node.module.__name__, () if call is None else call.params.values())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MEASURED.found:
        terminalreporter.section("GPU kernels against plain torch")
        for line in MEASURED.table():
            terminalreporter.write_line(line)
