"""How deep a queue is: what waits, class by class, what runs, and what was given up."""

from collections.abc import Sequence

import msgspec

from millstream.shared.states import Priority


class ClassDepth(msgspec.Struct, frozen=True):
    """The part of a queue that one class of it is."""

    waiting: int = 0
    oldest_wait_s: float = 0.0


class QueueDepth(msgspec.Struct, frozen=True):
    """How deep a model's queue is, on one shard or on several together."""

    running: int
    dead_letters: int
    classes: dict[Priority, ClassDepth]

    @property
    def waiting(self) -> int:
        """In all classes."""
        return sum(depth.waiting for depth in self.classes.values())

    @property
    def oldest_wait_s(self) -> float:
        """In any class."""
        return max(depth.oldest_wait_s for depth in self.classes.values())

    @classmethod
    def of_all(cls, depths: Sequence["QueueDepth"]) -> "QueueDepth":
        """Several shards together."""
        return cls(
            sum(depth.running for depth in depths),
            sum(depth.dead_letters for depth in depths),
            {
                priority: ClassDepth(
                    sum(depth.classes[priority].waiting for depth in depths),
                    max(depth.classes[priority].oldest_wait_s for depth in depths),
                )
                for priority in Priority
            },
        )
