"""`python -m e2e.contract`: public conformance suites against live servers; the score and each check that fails.

Exit code 0 when all that fails is explained in `explained.py`, 1 for anything else, 2 when a suite or a server broke.
"""

import sys
from collections.abc import Callable

from e2e.bench.server import BusloadServer, DidNotStart, serve
from e2e.contract.explained import EXPLAINED
from e2e.contract.suites import Check, Report, SuiteBroken, compatcanary, llm_comply, schemathesis
from e2e.steps import say

# Requests made at random ask for all the tokens there are, on a CPU: with this limit they end within the suite's 10 s.
_FUZZED = ("--max-sequence-length=64", "--batch-size=16", "--kv-cache-percent=90")
# Long enough for a small model to come to an end, most of the time.
_ASKED = ("--max-sequence-length=512", "--batch-size=4")
_SUITES: tuple[tuple[Callable[[BusloadServer], Report], tuple[str, ...]], ...] = (
    (schemathesis, _FUZZED),
    (llm_comply, _ASKED),
    (compatcanary, _ASKED),
)


def main() -> int:
    unexplained = 0
    try:
        for suite, flags in _SUITES:
            say(f"{suite.__name__} against busload serve {' '.join(flags)} ...")
            with serve(*flags) as server:
                report = suite(server)
                if any(_is_news(report, check) for check in report.checks):
                    say("once more: the model draws at random, and its answer may have been cut")
                    report = suite(server)
            unexplained += _print(report)
    except (SuiteBroken, DidNotStart) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{unexplained or 'no'} failures without an explanation")
    return 1 if unexplained else 0


def _is_news(report: Report, check: Check) -> bool:
    return not check.passed and (report.suite, check.name) not in EXPLAINED


def _print(report: Report) -> int:
    """Prints a report; how many of its checks failed without an explanation."""
    if report.skipped is not None:
        print(f"\n{report.suite}: SKIPPED, {report.skipped}\n")
        return 0
    print(f"\n{report.suite}: {report.score}")
    for check in report.checks:
        print(f"  {'pass' if check.passed else 'FAIL'}  {check.name}{': ' + check.found if check.found else ''}")
        if not check.passed:
            print(f"        why: {EXPLAINED.get((report.suite, check.name), 'NOT EXPLAINED')}")
    seen = {check.name for check in report.checks if check.passed}
    for suite, name in EXPLAINED:
        if suite == report.suite and name in seen:
            print(f"        {name} passes now; its explanation in e2e/contract/explained.py can go")
    print()
    return sum(_is_news(report, check) for check in report.checks)


if __name__ == "__main__":
    sys.exit(main())
