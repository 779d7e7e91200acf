# pyright: basic
"""What shapes the choice of a token before the draw, and what tells how likely tokens were.

Order and meaning are vLLM's (vllm/v1/sample): log probabilities are those of the model's own
logits; then the bias; then the penalties, of which repetition counts prompt and answer (Keskar et
al., "CTRL", 2019) and presence and frequency the answer alone; then, on the scale of the
temperature, min_p (Nguyen et al., "Turning Up the Heat", 2024). top_k and top_p come with the draw.

All requests of a step are changed together. A request that asks for none of this has no part in it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from millstream.worker.engines.base import GenerationRequest, TokenLogprobs


class Shaping:
    """What one request asks for, and the tokens that its penalties count.

    All of it follows from the request and the tokens so far, so another worker goes on alike.
    """

    __slots__ = ("_taken", "bias", "kept", "repeated", "request", "said")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        bias = request.logit_bias
        self.bias = (
            np.fromiter(bias.keys(), np.int64, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )
        self.repeated = _Counts() if request.repetition_penalty != 1.0 else None
        """Tokens of prompt and answer."""
        said = request.presence_penalty or request.frequency_penalty
        self.said = _Counts() if said else None
        """Tokens of the answer."""
        self.kept: dict[int, TokenLogprobs] = {}
        """By position in the answer, until they are handed over."""
        self._taken = 0

    @staticmethod
    def asked_by(request: GenerationRequest) -> str | None:
        """The first parameter by which a request asks for this, if it does."""
        if request.logprobs is not None:
            return "logprobs"
        if request.repetition_penalty != 1.0:
            return "repetition_penalty"
        names = ("presence_penalty", "frequency_penalty", "logit_bias", "min_p")
        return next((name for name in names if getattr(request, name)), None)

    def take(self, initial: Sequence[int], generated: Sequence[int]) -> None:
        """Count the tokens that are new since the last call; both lists together are all so far."""
        total = len(initial) + len(generated)
        if self.repeated is not None or self.said is not None:
            for at in range(self._taken, total):
                token_id = initial[at] if at < len(initial) else generated[at - len(initial)]
                if self.repeated is not None:
                    self.repeated.add(token_id)
                if self.said is not None and at >= self.request.prompt_length:
                    self.said.add(token_id)
        self._taken = total


class ShapedRow(NamedTuple):
    """A request that asks for something, in one step."""

    row: int
    """Of the scores."""
    position: int
    """Of the token to come, in the answer."""
    shaping: Shaping


class Observation:
    """How likely the model holds the tokens of one step, taken before anything is changed.

    Args:
        scores: The model's logits, float32 [rows, vocabulary].
        rows: Those that are shaped; some of them may have asked for log probabilities.
    """

    def __init__(self, scores: torch.Tensor, rows: Sequence[ShapedRow]) -> None:
        self._rows = [row for row in rows if row.shaping.request.logprobs is not None]
        if not self._rows:
            return
        self._index = torch.tensor([row.row for row in self._rows], device=scores.device)
        self._logits = scores[self._index]
        # Row by row: for several at once torch sums in another order, and the last digit moves.
        self._total = torch.stack([row.logsumexp(dim=0, keepdim=True) for row in self._logits])
        width = max(row.shaping.request.logprobs or 0 for row in self._rows)
        self._top = self._logits.topk(min(width, scores.shape[-1]))

    def keep(self, scores: torch.Tensor) -> None:
        """Note what the rows hold likely, and their choice: the largest score of each."""
        if not self._rows:
            return
        choice = scores[self._index].argmax(dim=-1, keepdim=True)
        chosen = (self._logits.gather(1, choice) - self._total).flatten().tolist()
        values = (self._top.values - self._total).tolist()
        token_ids = self._top.indices.tolist()
        for at, (_, position, shaping) in enumerate(self._rows):
            pairs = zip(token_ids[at], values[at], strict=True)
            top = tuple(pairs)[: shaping.request.logprobs]
            shaping.kept[position] = TokenLogprobs(chosen[at], top)


def shape(scores: torch.Tensor, rows: Sequence[ShapedRow]) -> None:
    """Change the scores of the shaped rows in place; float32 [rows, vocabulary], any device."""
    bias = [(row, *shaping.bias) for row, _, shaping in rows if len(shaping.bias[0])]
    if bias:
        where, values = _flat(bias, scores.device)
        scores[where] += values
    repeated = [
        (row, *shaping.repeated.arrays(0.0, shaping.request.repetition_penalty))
        for row, _, shaping in rows
        if shaping.repeated is not None
    ]
    if repeated:
        where, values = _flat(repeated, scores.device)
        before = scores[where]
        scores[where] = torch.where(before > 0, before / values, before * values)
    said = [
        (
            row,
            *shaping.said.arrays(
                shaping.request.frequency_penalty, shaping.request.presence_penalty
            ),
        )
        for row, _, shaping in rows
        if shaping.said is not None
    ]
    if said:
        where, values = _flat(said, scores.device)
        scores[where] -= values
    _cut_unlikely(scores, rows)


def _cut_unlikely(scores: torch.Tensor, rows: Sequence[ShapedRow]) -> None:
    """min_p: a token p times as likely as the best one is log(p) x temperature below it."""
    cut = [
        (row, shaping.request.temperature * math.log(shaping.request.min_p))
        for row, _, shaping in rows
        if shaping.request.min_p > 0.0
    ]
    if not cut:
        return
    index = torch.tensor([row for row, _ in cut], device=scores.device)
    margin = torch.tensor([margin for _, margin in cut], device=scores.device)
    chosen = scores[index]
    least = chosen.amax(dim=-1) + margin
    scores[index] = chosen.masked_fill(chosen < least[:, None], -torch.inf)


def _flat(
    parts: Sequence[tuple[int, np.ndarray, np.ndarray]], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Where (row, token id) and which values, of all requests together."""
    rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
    ids = np.concatenate([ids for _, ids, _ in parts])
    values = np.concatenate([values for _, _, values in parts])
    return (
        (torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)),
        torch.from_numpy(values).to(device),
    )


class _Counts:
    """How often each token came: arrays that grow, so that a step costs no walk over the text."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def add(self, token_id: int) -> None:
        """Count a token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1

    def arrays(self, each: float, once: float) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, int64 [n], and `each` x count + `once`, float32 [n]."""
        count = len(self._places)
        values = self._counts[:count] * np.float32(each) + np.float32(once)
        return self._ids[:count], values
