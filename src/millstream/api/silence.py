"""When a stream last said, and heard, something."""

import time


class Silence:
    """Tells when a keepalive is due on one stream, and when to look up next.

    Args:
        keepalive_s: How long it may be silent.
        tick_s: As `tick`.
    """

    __slots__ = ("_broken_at", "_due_s", "_keepalive_s", "heard_at", "tick_s")

    def __init__(self, keepalive_s: float, tick_s: float) -> None:
        self._keepalive_s = keepalive_s
        self.tick(tick_s)
        self._broken_at = self.heard_at = time.monotonic()

    def tick(self, tick_s: float) -> None:
        """Look up about so often, but no less often than keepalives are due."""
        # Ticks divide the keepalive evenly; half a tick of slack takes up a late timer.
        self.tick_s = self._keepalive_s / max(1, round(self._keepalive_s / tick_s))
        self._due_s = self._keepalive_s - self.tick_s / 2

    def heard(self) -> None:
        """There were events, whether or not they had anything to show."""
        self.heard_at = time.monotonic()

    def broken(self) -> None:
        """Something has been sent."""
        self._broken_at = time.monotonic()

    def told(self) -> None:
        """There were events, and they have been sent."""
        self._broken_at = self.heard_at = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether a keepalive must be sent now."""
        return time.monotonic() - self._broken_at >= self._due_s
