"""Ends an answer of which the model is no longer sure."""

import math
from collections import deque

from millstream.shared.schemas import EarlyStop


class ConfidenceWindow:
    """The probabilities of the last tokens.

    It takes log probabilities as the log keeps them, so whoever goes on with a task decides as its
    first owner would have.
    """

    def __init__(self, early_stop: EarlyStop) -> None:
        self._min_prob = early_stop.min_prob
        self._last: deque[float] = deque(maxlen=early_stop.window)

    def push(self, logprob: float) -> bool:
        """Take the next token; whether the mean of a full window is under what is asked."""
        self._last.append(math.exp(logprob))
        full = len(self._last) == self._last.maxlen
        return full and math.fsum(self._last) / len(self._last) < self._min_prob
