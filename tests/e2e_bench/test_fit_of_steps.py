from dataclasses import replace

import pytest

from busload_operator.simulate.hardware import HARDWARE
from busload_runtime.contract import StepLaw
from e2e.bench import step_law
from e2e.bench.step_law import Check, Run, checks, fit_law, simulated


@pytest.fixture(scope="module")
def run() -> Run:
    """Steps scatter by 15%, and the pod is up to 4% slower or faster than its law for minutes."""
    return simulated(HARDWARE["cpu"])


@pytest.mark.parametrize("every", step_law.SCRAPES)
def test_unseen_batches_and_capacity_within_a_tenth(run: Run, every: float) -> None:
    law = fit_law(run, every)
    assert law is not None
    assert law.usable
    found = checks(run, law)
    assert len(found) == len(step_law.UNSEEN_SHARES) + 1
    assert [check.name for check in found if not check.within] == []


def test_a_wrong_law_is_told(run: Run) -> None:
    law = fit_law(run, 1.0)
    assert law is not None
    slower = replace(law, a=1.3 * law.a, b=1.3 * law.b, c=1.3 * law.c, d=1.3 * law.d)
    assert not any(check.within for check in checks(run, slower))


def test_too_few_windows_are_told(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert not step_law.report("short", replace(run, fitted=[run.fitted[0][:20]]))
    assert "no usable law" in capsys.readouterr().out


def test_the_simulated_pod_has_the_law_it_was_given() -> None:
    exact = replace(HARDWARE["cpu"], law=StepLaw(4e-3, 5e-4, 2e-6, 2e-4), noise=0.0, drift=0.0)
    law = fit_law(simulated(exact, seed=3), 1.0)
    assert law is not None
    assert (law.a, law.b, law.c, law.d) == pytest.approx((4e-3, 5e-4, 2e-6, 2e-4), rel=0.05)


def test_the_bar_is_a_tenth() -> None:
    assert Check("x", 1.09, 1.0, "s").within
    assert not Check("x", 1.11, 1.0, "s").within
