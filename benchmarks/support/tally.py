"""What clients were served: times and counts, a window of the run after the other."""

import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any


class Tally:
    """Counts the window that goes on; its memory is one window's, however long the run."""

    def __init__(self, *, apart: str) -> None:
        self._apart = apart
        """A form that is not counted with the others: its times are of another kind."""
        self.errors: Counter[str] = Counter()
        """Of the whole run, by form and kind."""
        self._begin()

    def _begin(self) -> None:
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._first_ms: defaultdict[str, array[float]] = defaultdict(lambda: array("f"))
        self._gaps_ms: defaultdict[str, array[float]] = defaultdict(lambda: array("f"))

    def served(self, form: str, tokens: int) -> None:
        """A request came to the end that its client wanted."""
        self._requests[form] += 1
        self._tokens[form] += tokens

    def failed(self, form: str, kind: str) -> None:
        """It did not."""
        self.errors[f"{form}: {kind}"] += 1

    def first(self, form: str, seconds: float) -> None:
        """So long after it was asked for came the first token."""
        self._first_ms[form].append(1000 * seconds)

    def gap(self, form: str, seconds: float) -> None:
        """So long after the token before came the next."""
        self._gaps_ms[form].append(1000 * seconds)

    def close(self) -> dict[str, Any]:
        """The figures of the window, by form and of all together; another one begins."""
        streamed = {
            form: _times(self._first_ms[form], self._gaps_ms[form]) for form in self._first_ms
        }
        figures: dict[str, Any] = {
            "requests": dict(self._requests),
            "tokens": dict(self._tokens),
            "forms": streamed,
            "all": _times(self._joined(self._first_ms), self._joined(self._gaps_ms)),
        }
        self._begin()
        return figures

    def _joined(self, parts: dict[str, "array[float]"]) -> "array[float]":
        together = (part for form, part in parts.items() if form != self._apart)
        return array("f", itertools.chain.from_iterable(together))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def _times(first: Sequence[float], gaps: Sequence[float]) -> dict[str, float]:
    return {
        "first_p50_ms": percentile(first, 0.5),
        "first_p99_ms": percentile(first, 0.99),
        "gap_p50_ms": percentile(gaps, 0.5),
        "gap_p99_ms": percentile(gaps, 0.99),
    }
