"""How Redis answers: what each call took, and which had no answer."""

import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

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

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Count a call. One whose caller gave up says nothing."""
        started = time.perf_counter()
        try:
            yield
        except RedisError as error:
            away = is_transient(error)
            self._count(name, started, up=not away)
            with self._lock:
                self.errors[name, "away" if away else "refused"] += 1
            raise
        self._count(name, started, up=True)

    def _count(self, name: str, started: float, *, up: bool) -> None:
        took = time.perf_counter() - started
        with self._lock:
            self.up = up
            tally = self.seconds.get(name)
            if tally is None:
                tally = self.seconds[name] = Tally(CALL_S)
            tally.add(took)
