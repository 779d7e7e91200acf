"""How Redis answers: what each call took, and which had no answer."""

import threading
import time
from collections import Counter

from redis.exceptions import RedisError

from millstream.shared.connection import is_transient
from millstream.shared.metrics.tally import CALL_S, Tally


class CallStats:
    """Figures on a process's calls to Redis, from any of its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds: dict[str, Tally] = {}
        """What calls took, by name, those that failed included."""
        self.errors: Counter[tuple[str, str]] = Counter()
        """By name, and `away` where a failure passes by itself, else `refused`."""
        self.up = True
        """Whether the last call that ended was answered."""

    def timed(self, name: str) -> "_Timed":
        """Count a call. One whose caller gave up says nothing."""
        return _Timed(self, name)

    def failed(self, name: str, started: float, error: RedisError) -> None:
        """A call ended so."""
        away = is_transient(error)
        self.answered(name, started, up=not away)
        with self._lock:
            self.errors[name, "away" if away else "refused"] += 1

    def answered(self, name: str, started: float, *, up: bool = True) -> None:
        """A call ended."""
        took = time.perf_counter() - started
        with self._lock:
            self.up = up
            tally = self.seconds.get(name)
            if tally is None:
                tally = self.seconds[name] = Tally(CALL_S)
            tally.add(took)


class _Timed:
    """A generator would cost twice as much, at each decode step."""

    __slots__ = ("_name", "_started", "_stats")

    def __init__(self, stats: CallStats, name: str) -> None:
        self._stats = stats
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self._stats.answered(self._name, self._started)
        elif isinstance(error, RedisError):
            self._stats.failed(self._name, self._started, error)
