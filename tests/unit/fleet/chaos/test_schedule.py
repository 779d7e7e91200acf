"""The deck of faults: the same for a seed, and never without one of them."""

from collections import Counter

import pytest

from millstream.fleet.chaos.schedule import (
    SHARES,
    SHORTEST_S,
    TICK_S,
    Card,
    Fault,
    shuffled_deck,
)


def counts(deck: list[Card | None]) -> Counter[Fault]:
    return Counter(card.fault for card in deck if card is not None)


def test_a_seed_gives_the_same_deck_again() -> None:
    assert shuffled_deck(7, 90) == shuffled_deck(7, 90)
    assert shuffled_deck(7, 90) != shuffled_deck(8, 90)


@pytest.mark.parametrize("seed", range(20))
def test_every_seed_has_what_a_run_must_have(seed: int) -> None:
    deck = shuffled_deck(seed, 90)
    assert len(deck) == 90 / TICK_S
    found = counts(deck)
    assert found[Fault.KILL_WORKER] >= 20
    assert found[Fault.FREEZE_WORKER] >= 5
    assert found[Fault.KILL_POD] >= 5
    assert found[Fault.RESTART_REDIS] >= 1
    assert found == {fault: round(share * len(deck)) for fault, share in SHARES.items()}


@pytest.mark.parametrize("seed", range(20))
def test_the_shortest_run_has_every_fault(seed: int) -> None:
    deck = shuffled_deck(seed, SHORTEST_S)
    assert len(deck) == SHORTEST_S / TICK_S
    assert set(counts(deck)) == set(Fault)


def test_faults_are_spread_over_the_run() -> None:
    deck = shuffled_deck(3, 90)
    quarters = [counts(deck[at : at + 90])[Fault.KILL_WORKER] for at in range(0, 360, 90)]
    assert min(quarters) > 0


def test_a_card_chooses_among_those_there_are() -> None:
    assert Card(Fault.KILL_WORKER, 0.0).choose("abc") == "a"
    assert Card(Fault.KILL_WORKER, 0.999).choose("abc") == "c"
    assert Card(Fault.KILL_WORKER, 0.5).choose("a") == "a"
