"""What is asked: prompts and answers of chosen lengths, random, so that no prefix is shared."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

# Common English words, which most tokenizers have as one token with the space before them.
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "group", "country", "problem", "hand", "part", "place", "case"),
    *("week", "company", "system", "work", "number", "night", "point", "home", "water", "room"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Length:
    """Lengths in tokens: `mean`, up or down by `spread` (0 to 1) of it, uniformly."""

    mean: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> int:
        """One of them, at least 1."""
        low, high = self.mean * (1 - self.spread), self.mean * (1 + self.spread)
        return max(1, round(rng.uniform(low, high)))


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of request, and how often it comes beside the others."""

    share: float
    prompt: Length
    answer: Length


def draw(mixes: Sequence[Mix], count: int, rng: random.Random, *, fake: bool) -> list[Ask]:
    """So many requests; for the fake engine with the line that makes answers as long as wanted."""
    asks: list[Ask] = []
    for mix in rng.choices(mixes, [mix.share for mix in mixes], k=count):
        tokens = mix.answer.draw(rng)
        words = " ".join(rng.choices(_WORDS, k=mix.prompt.draw(rng)))
        line = f"@fake {json.dumps({'tokens': tokens})}\n" if fake else ""
        asks.append(Ask(line + words, tokens))
    return asks
