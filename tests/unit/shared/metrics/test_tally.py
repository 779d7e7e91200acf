"""The histogram in plain numbers, and what calls to Redis leave in one."""

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError, ResponseError

from millstream.shared.metrics.calls import CallStats
from millstream.shared.metrics.tally import Tally

INFINITY = float("inf")


def test_edges_are_included_and_counts_add_up() -> None:
    tally = Tally((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        tally.add(value)
    tally.add(2.0, 3)
    assert tally.buckets() == [(1.0, 2), (2.0, 6), (5.0, 6), (INFINITY, 7)]
    assert (tally.count, tally.sum) == (7, 16.0)


def test_calls_are_counted_with_what_became_of_them() -> None:
    stats = CallStats()
    with stats.timed("claim"):
        pass
    assert stats.up
    with pytest.raises(RedisConnectionError), stats.timed("claim"):
        raise RedisConnectionError
    assert not stats.up
    with pytest.raises(ResponseError), stats.timed("submit"):
        raise ResponseError("WRONGTYPE")
    assert stats.up  # it answered
    with pytest.raises(KeyError), stats.timed("submit"):
        raise KeyError
    assert stats.errors == {("claim", "away"): 1, ("submit", "refused"): 1}
    assert {name: tally.count for name, tally in stats.seconds.items()} == {"claim": 2, "submit": 1}
