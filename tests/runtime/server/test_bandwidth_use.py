"""The share of the memory's limit: right values over a moving window."""

import msgspec
import pytest

from busload_runtime.engine.messages import Stats
from busload_runtime.server.bandwidth import BandwidthUse

ZERO = Stats(**{f.name: 0 for f in msgspec.structs.fields(Stats)})


def at(clock: float, busy: float, moved: int) -> Stats:
    return msgspec.structs.replace(ZERO, clock=clock, busy_seconds=busy, bytes_moved=moved)


def test_it_is_bytes_over_step_time_against_the_copy() -> None:
    use = BandwidthUse()
    use.add(at(100, 10, 10**9))
    newest = at(102, 11, 31 * 10**9)  # 30 GB in one second of steps, in two of the clock
    use.add(newest)
    assert use.share(newest, 60e9) == pytest.approx(0.5)


def test_only_the_last_seconds_count() -> None:
    use = BandwidthUse()
    for second in range(30):
        moved = second * 50 if second <= 15 else 15 * 50 + (second - 15) * 10  # 50 GB/s, later 10
        newest = at(second, second, moved * 10**9)
        use.add(newest)
    assert use.share(newest, 100e9) == pytest.approx(0.1)


@pytest.mark.parametrize("bandwidth", [0.0, 1e9])
def test_nothing_known_or_nothing_done_is_0(bandwidth: float) -> None:
    use = BandwidthUse()
    assert use.share(None, bandwidth) == 0
    use.add(at(1, 1, 5))
    assert use.share(at(2, 1, 5), bandwidth) == 0


def test_an_idle_while_longer_than_the_window_is_0() -> None:
    use = BandwidthUse()
    use.add(at(0, 0, 0))
    use.add(at(1, 1, 10**9))
    for second in range(2, 20):
        use.add(at(second, 1, 10**9))
    assert use.share(at(20, 1, 10**9), 1e9) == 0
