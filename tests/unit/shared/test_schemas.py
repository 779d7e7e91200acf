"""Task ids: what they are made of."""

from collections import Counter

import pytest

from millstream.shared.schemas import new_task_id, shard_of


@pytest.mark.parametrize("shard", [0, 7, 9_999])
def test_an_id_carries_its_shard(shard: int) -> None:
    assert shard_of(new_task_id(shard)) == shard


def test_each_letter_is_as_likely_as_the_others() -> None:
    """5 bits each, so 26 of them are 130."""
    letters = Counter("".join(new_task_id(0)[3:] for _ in range(5_000)))
    assert sorted(letters) == sorted("abcdefghijklmnopqrstuvwxyz234567")
    # 130,000 letters, 4,062 of each: the deviation is 63, and this is eight of them.
    assert all(abs(count - 130_000 / 32) < 500 for count in letters.values())
