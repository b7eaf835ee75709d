"""The public suites: each is run against a server and read into checks."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.bench.server import BusloadServer

_SECONDS = 600.0
_CANARY = "compatcanary@0.2.2"


@dataclass(frozen=True)
class Check:
    """What a suite found on one point."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Report:
    """All that a suite found. `skipped` says why it could not be run."""

    suite: str
    score: str
    checks: tuple[Check, ...]
    skipped: str | None = None


class SuiteBroken(RuntimeError):
    """A suite ended without a verdict; the message ends with what it wrote."""


def schemathesis(server: BusloadServer) -> Report:
    """Requests made from `/openapi.json`, sound and unsound: no 5xx, no status and no answer that is not declared."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        server.url.removesuffix("/v1") + "/openapi.json",
    ]
    command += ["--checks", "not_a_server_error,response_schema_conformance,status_code_conformance"]
    command += ["--max-examples", "50", "--seed", "1", "--request-timeout", "10", "--no-color"]
    with tempfile.TemporaryDirectory() as folder:  # it leaves a cache where it runs
        done = _run(command, folder)
    if done.returncode not in (0, 1) or "SUMMARY" not in done.stdout:
        raise SuiteBroken(
            f"schemathesis ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    cases = re.search(r"^ *(\d+ generated.*)$", done.stdout, re.MULTILINE)
    details = done.stdout.partition("= ERRORS =")[2] or done.stdout.partition("= FAILURES =")[2]
    found = "nothing" if done.returncode == 0 else details
    checks = (Check("answers as declared", done.returncode == 0, found),)
    return Report("schemathesis", cases[1] if cases else "no cases", checks)


def llm_comply(server: BusloadServer) -> Report:
    """llm-comply, from PyPI: answers field by field."""
    command = [str(Path(sys.executable).with_name("llm-comply")), "--format", "openai-chat", "--json"]
    done = _run([*command, "-u", server.url, "-k", "unused", "-m", server.model])
    suite = _json("llm-comply", done)
    checks = tuple(
        Check(
            result["name"],
            result["status"] == "passed",
            "; ".join([*result.get("errors", ()), *result.get("warnings", ())]),
        )
        for result in suite["results"]
        if result["status"] != "skipped"
    )
    return Report("llm-comply", _share(checks), checks)


def compatcanary(server: BusloadServer) -> Report:
    """compatcanary, from npm: what applications ask for first. Needs node."""
    npx = shutil.which("npx")
    if npx is None:
        return Report("compatcanary", "-", (), "there is no npx on this machine; install Node.js to run it")
    command = [npx, "--yes", _CANARY, "scan", "--base-url", server.url, "--model", server.model]
    report = _json("compatcanary", _run([*command, "--profile", "chat", "--format", "json"]))
    checks = tuple(Check(result["name"], result["status"] == "pass", result["summary"]) for result in report["results"])
    return Report("compatcanary", f"{report['score']}/100", checks)


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)


def _json(suite: str, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        found = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        raise SuiteBroken(
            f"{suite} ended with exit code {done.returncode} and no report:\n{(done.stdout + done.stderr)[-3000:]}"
        ) from None
    assert isinstance(found, dict)
    return found


def _share(checks: tuple[Check, ...]) -> str:
    return f"{sum(check.passed for check in checks)}/{len(checks)}"
