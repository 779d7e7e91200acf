"""When requests begin: all at once, or as independent users come, or on a ramp.

The intervals and names are those of vLLM's `bench serve`: gamma-distributed with the shape
`burstiness`, so 1 is a Poisson process, less is burstier, more is steadier.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests come."""

    rate: float = math.inf
    """Requests per second; infinite: as soon as there is room (a closed loop)."""
    burstiness: float = 1.0
    ramp: str = ""
    """`linear` or `exponential`: the rate grows, from `ramp_start` to `ramp_end`."""
    ramp_start: float = 1.0
    ramp_end: float = 1.0

    def delays(self, count: int, rng: random.Random) -> Iterator[float]:
        """Seconds from each request's start to the next one's."""
        for number in range(count):
            rate = self._rate(number / max(count - 1, 1))
            if math.isinf(rate):
                yield 0.0
            elif math.isinf(self.burstiness):
                yield 1 / rate
            else:
                yield rng.gammavariate(self.burstiness, 1 / (rate * self.burstiness))

    def _rate(self, progress: float) -> float:
        match self.ramp:
            case "linear":
                return self.ramp_start + (self.ramp_end - self.ramp_start) * progress
            case "exponential":
                return self.ramp_start * (self.ramp_end / self.ramp_start) ** progress
            case _:
                return self.rate
