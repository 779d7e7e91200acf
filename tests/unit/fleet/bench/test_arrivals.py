"""When requests begin."""

import itertools
import math
import random
import statistics

import pytest

from millstream.fleet.bench.arrivals import Arrivals


def _delays(arrivals: Arrivals, count: int = 20_000) -> list[float]:
    return list(arrivals.delays(count, random.Random(1)))


def test_without_a_rate_none_waits() -> None:
    assert _delays(Arrivals(), 5) == [0.0] * 5


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_intervals_have_the_mean_and_the_spread_asked_for(
    burstiness: float, variation: float
) -> None:
    delays = _delays(Arrivals(rate=50, burstiness=burstiness))
    mean = statistics.fmean(delays)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # The coefficient of variation of a gamma distribution is 1 over the root of its shape.
    assert statistics.pstdev(delays) / mean == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "expected"), [("linear", [1, 5.5, 10]), ("exponential", [1, math.sqrt(10), 10])]
)
def test_a_ramp_goes_from_one_rate_to_the_other(shape: str, expected: list[float]) -> None:
    ramp = Arrivals(burstiness=math.inf, ramp=shape, ramp_start=1, ramp_end=10)
    assert [1 / delay for delay in _delays(ramp, 3)] == pytest.approx(expected)
    rates = [1 / delay for delay in _delays(ramp, 50)]
    assert all(before < after for before, after in itertools.pairwise(rates))
