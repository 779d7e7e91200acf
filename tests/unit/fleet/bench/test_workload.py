"""What is asked."""

import random

from millstream.fleet.bench.workload import Length, Mix, draw


def test_the_same_seed_asks_the_same() -> None:
    mixes = [Mix(1, Length(20, 0.5), Length(10, 0.5))]
    first, again, other = (draw(mixes, 50, random.Random(s), fake=False) for s in (1, 1, 2))
    assert first == again != other
    assert len({ask.prompt for ask in first}) == 50


def test_lengths_and_shares() -> None:
    mixes = [Mix(3, Length(10), Length(5)), Mix(1, Length(100, 0.2), Length(50, 0.2))]
    asks = draw(mixes, 4000, random.Random(0), fake=False)
    short = [ask for ask in asks if ask.max_tokens == 5]
    assert 0.72 < len(short) / len(asks) < 0.78
    assert {len(ask.prompt.split()) for ask in short} == {10}
    long = [ask for ask in asks if ask.max_tokens != 5]
    assert {min(ask.max_tokens for ask in long), max(ask.max_tokens for ask in long)} == {40, 60}


def test_the_fake_engine_is_told_how_long_to_go_on() -> None:
    (ask,) = draw([Mix(1, Length(3), Length(7))], 1, random.Random(0), fake=True)
    assert ask.prompt.startswith('@fake {"tokens": 7}\n')
