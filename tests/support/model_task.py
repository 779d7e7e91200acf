"""What a model of the protocol knows of a task, and of what its workers believe."""

from dataclasses import dataclass, field

from millstream.shared.events import Event
from millstream.shared.steps import Claim

MAX_ATTEMPTS = 3


@dataclass
class Losses:
    """Of one task, as Redis should count them (I14)."""

    owner: str = ""
    """The worker that has the task; '' once it has let it go."""
    drained: bool = False
    """Whoever had it last has let it go without blame."""
    count: int = 0
    """Workers lost in a row under the task, without an event in between."""
    seq: int = -1
    """How long the log was at the last of them."""

    def with_one_more(self, length: int) -> int:
        """The count if the owner turns out to be lost while the log is so long."""
        if self.drained:
            return self.count
        return 1 if length > self.seq else self.count + 1

    def give(self, worker: str, length: int, *, first: bool) -> None:
        """A claim gave the task to a worker, under a new attempt."""
        if not first and not self.drained:
            self.count, self.seq = self.with_one_more(length), length
            assert self.count < MAX_ATTEMPTS, "it was tried once too often"
        self.owner, self.drained = worker, False

    def let_go(self, blame: str) -> None:
        """Its owner released it."""
        self.owner, self.drained = "", not blame

    def give_up(self, length: int) -> None:
        """It failed, with so many tokens."""
        assert not self.drained, "a drain counted as a loss"
        assert self.with_one_more(length) >= MAX_ATTEMPTS, "it was given up too early"


@dataclass
class Task:
    """What we know of a task from outside."""

    seen: list[Event] = field(default_factory=list)
    """What a pod has shown, which all readers have read."""
    caller: str = ""
    attempt: int = 0
    losses: Losses = field(default_factory=Losses)
    terminal: str | None = None
    stopped: bool = False


@dataclass
class Held:
    """What a worker believes it runs."""

    claim: Claim
    events: list[tuple[str, str]]
    """Of the whole log: those of the claim, then its own."""
    written: int
