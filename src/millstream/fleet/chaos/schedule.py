"""Which fault comes when: a deck of cards, shuffled by the seed.

Independent draws would leave a rare fault out of every third run. A deck has each fault as often as
its share says, for every seed; only the order is random.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")

TICK_S = 0.25
"""How often a card is drawn."""


class Fault(StrEnum):
    """What is done to the fleet, in a person's words."""

    KILL_WORKER = "SIGKILL of a worker"
    FREEZE_WORKER = "SIGSTOP of a worker for 2 leases"
    DRAIN_WORKER = "SIGTERM of a worker"
    KILL_POD = "SIGKILL of a pod"
    DRAIN_POD = "SIGTERM of a pod"
    RESTART_REDIS = "restart of Redis"
    SLOW_LINK = "link slow by 500 ms for a lease"
    RESET_LINK = "link reset"
    BLACK_HOLE = "link silent for 1 s"
    POISON = "poison task"
    STOP_TASK = "stop of a task"
    CUT_CLIENT = "client cut off"


SHARES = {
    Fault.KILL_WORKER: 0.08,
    Fault.FREEZE_WORKER: 0.04,
    Fault.DRAIN_WORKER: 0.04,
    Fault.KILL_POD: 0.02,
    Fault.DRAIN_POD: 0.02,
    Fault.RESTART_REDIS: 0.01,
    Fault.SLOW_LINK: 0.02,
    Fault.RESET_LINK: 0.02,
    Fault.BLACK_HOLE: 0.01,
    Fault.POISON: 0.05,
    Fault.STOP_TASK: 0.10,
    Fault.CUT_CLIENT: 0.10,
}
"""How many of the ticks have this fault; the other half of the ticks has none."""

SHORTEST_S = 5
"""A shorter run has fewer ticks than there are faults."""


@dataclass(frozen=True, slots=True)
class Card:
    """One fault, and whom it meets: a number from 0 to 1, since nobody knows yet who will live."""

    fault: Fault
    pick: float

    def choose(self, targets: Sequence[T]) -> T:
        """The target among those that there are."""
        return targets[int(self.pick * len(targets))]


def shuffled_deck(seed: int, seconds: float) -> list[Card | None]:
    """A card for each tick; None where nothing happens."""
    ticks = max(int(seconds / TICK_S), len(SHARES))
    generator = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    faults: list[Fault | None] = []
    for fault, share in SHARES.items():
        faults += [fault] * max(1, round(share * ticks))
    faults += [None] * (ticks - len(faults))
    generator.shuffle(faults)
    return [Card(fault, generator.random()) if fault else None for fault in faults]
