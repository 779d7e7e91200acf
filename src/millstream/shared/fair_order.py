"""The order in which the fair queue serves those who wait: the rule of `lua/fair.lua`, pure.

Virtual token counters (Sheng et al., OSDI 2024) on two levels; docs/adr/0015 says why.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from millstream.shared.keys import CLASSES
from millstream.shared.states import Priority

CLASS_WEIGHT = {Priority.INTERACTIVE: 8, Priority.BATCH: 1}


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A task that waits; a look at a queue makes ten thousand."""

    task_id: str
    priority: Priority
    who: str
    """Its caller, as the counters name it."""


def serving_order(
    line: Iterable[Waiting], counters: Mapping[str, Mapping[str, float]], *, cost: float
) -> list[str]:
    """The ids in the order in which they are served, if nobody comes and each task costs the same.

    Args:
        line: Those who wait; a caller's own in their order.
        counters: Per level, the tokens that each who waits there was served.
        cost: Tokens of a task, above 0.
    """
    callers: dict[str, dict[str, deque[str]]] = {}
    for task in line:
        callers.setdefault(task.priority, {}).setdefault(task.who, deque()).append(task.task_id)
    classes = {
        level: deque(_in_turns(lines, counters.get(level, {}), dict.fromkeys(lines, cost)))
        for level, lines in callers.items()
    }
    steps = {str(priority): cost / weight for priority, weight in CLASS_WEIGHT.items()}
    return list(_in_turns(classes, counters.get(CLASSES, {}), steps))


def _in_turns(
    lines: Mapping[str, deque[str]], counters: Mapping[str, float], steps: Mapping[str, float]
) -> Iterator[str]:
    """The first of whose counter is least, which goes up by its step; among equals by name."""
    turns = [(counters.get(who, 0.0), who) for who in lines]
    heapq.heapify(turns)
    while turns:
        used, who = turns[0]
        yield lines[who].popleft()
        if lines[who]:
            heapq.heapreplace(turns, (used + steps[who], who))
        else:
            heapq.heappop(turns)
