"""When a stream last said, and heard, something."""

import time


class Silence:
    """Tells when a keepalive is due on one stream."""

    __slots__ = ("_broken_at", "_due_s", "heard_at", "tick_s")

    def __init__(self, keepalive_s: float, tick_s: float) -> None:
        # Ticks divide the keepalive evenly; half a tick of slack takes up a late timer.
        self.tick_s = keepalive_s / max(1, round(keepalive_s / tick_s))
        self._due_s = keepalive_s - self.tick_s / 2
        self._broken_at = self.heard_at = time.monotonic()

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
