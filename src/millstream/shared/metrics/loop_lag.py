"""How late an event loop is: what every request and every token waits besides."""

import asyncio
import time

from millstream.shared.metrics.tally import Tally

EVERY_S = 0.25
EDGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class LoopLag:
    """Sleeps for a moment, again and again, and counts how much later it wakes up."""

    def __init__(self) -> None:
        self.seconds = Tally(EDGES_S)

    async def run(self) -> None:
        """Measure for ever; cancel to end."""
        while True:
            due = time.monotonic() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.seconds.add(max(0.0, time.monotonic() - due))
