"""How long to wait before a process that ended is started again."""

FIRST_S = 0.5
LONGEST_S = 30.0
STEADY_S = 10.0
"""A process that was ready for so long did not end because of how it starts."""


class Backoff:
    """Doubles the wait from start to failed start, and forgets once the process ran well."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._next_s = FIRST_S

    def after(self, ready_for_s: float) -> float:
        """The wait after a run that was ready for so long (0: never)."""
        if ready_for_s >= STEADY_S:
            self._next_s = FIRST_S
        wait_s = self._next_s
        self._next_s = min(self._next_s * 2, self._longest_s)
        return wait_s
