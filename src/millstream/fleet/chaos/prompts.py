"""What the clients ask: prompts of all lengths, each with a canary that is its own."""

import json
import random
from dataclasses import dataclass
from typing import Any

LONGEST = 200
"""Tokens of the longest answer: at 20 ms a token it outlives a lease."""

_LENGTHS = (1, 2, 5, 20, 50, 100, 150, LONGEST)
_WORDS = ("grüße", "naïve", "river", "\u2028", "mill", "\n", "data:", "🙂", "水車")
_SPLIT = "naïve 水車 🙂 "


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question and how it is to be answered; no two are alike."""

    text: str
    canary: str
    sampling: dict[str, Any]
    poison: bool = False


def make_canary(generator: random.Random) -> str:
    """A word that nobody else asks for."""
    return f"canary-{generator.getrandbits(64):016x}"


def make_prompt(generator: random.Random) -> Prompt:
    """A prompt whose answer has its canary, or split characters, or words by a hash of it all."""
    canary = make_canary(generator)
    tokens = generator.choice((*_LENGTHS, generator.randint(1, LONGEST)))
    directive: dict[str, Any] = {"tokens": tokens}
    sampling: dict[str, Any] = {"max_tokens": 2 * LONGEST}
    match generator.randrange(4):
        case 0:
            words = generator.sample(_WORDS, 4)
            directive["texts"] = [f" {canary}", *(f" {word}" for word in words)]
        case 1:
            directive["bytes"] = [f"{byte:02x}" for byte in f"{_SPLIT}{canary} ".encode()]
        case 2:
            sampling["seed"] = generator.getrandbits(31)
            sampling["stop"] = [" the wheel", generator.choice((" mill", " river", " zzz"))]
        case _:
            sampling["max_tokens"] = generator.randint(1, LONGEST)
    return Prompt(_text(directive, canary), canary, sampling)


def make_poison(generator: random.Random) -> Prompt:
    """A prompt that ends its worker's process, always at the same token."""
    canary = make_canary(generator)
    directive = {"tokens": 40, "crash_at": generator.randint(1, 20)}
    return Prompt(_text(directive, canary), canary, {"max_tokens": 40}, poison=True)


def _text(directive: dict[str, Any], canary: str) -> str:
    return f"@fake {json.dumps(directive)}\nTell me of {canary}."
