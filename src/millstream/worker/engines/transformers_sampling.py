# pyright: basic
"""Sampling that depends on (seed, position) alone, so that any worker goes on with the same text.

Adding independent Gumbel noise to the logits and taking the argmax draws exactly from their softmax
(the Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014). The
noise here is a pure function of (seed, position, token id): the bits are those of SplitMix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of
Vigna's splitmix64.c), a generator whose n-th output can be computed on its own. No state is kept,
so neither the batch nor an interruption changes what is drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from millstream.worker.engines.transformers_shaping import Observation, ShapedRow, Shaping, shape

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

_GREEDY_BELOW = 1e-5
"""A temperature under which dividing logits by it leaves float32; the limit is greedy anyway."""
_WIDTHS = (64, 512, 4096)
"""How many of the best tokens are looked at. A row's width depends on nothing but the row, since
the order in which `topk` gives equal logits may depend on the width. Up to 512 of 49,152 `topk`
costs 0.1 ms a row here, a full sort 3.7 ms."""
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


class Draw(NamedTuple):
    """How to draw one request's next token."""

    temperature: float
    top_k: int
    top_p: float
    key: int
    """From `stream_key`."""


def stream_key(seed: int, position: int) -> int:
    """The 64-bit state from which SplitMix64 makes the noise of one position.

    It is the `position`-th output of the generator started at the mixed seed, so neighbouring seeds
    and positions have nothing in common.
    """
    return _mix(_mix(seed) + (position + 1) * _GAMMA)


def is_greedy(temperature: float) -> bool:
    """Whether a temperature means the most likely token."""
    return temperature < _GREEDY_BELOW


def mark_choices(scores: torch.Tensor, draws: Sequence[Draw | None]) -> None:
    """Draw a token per row and raise its score to infinity, so that argmax finds it; on the CPU.

    Args:
        scores: Float32 logits [rows, vocabulary], changed in place. Rows after the last draw, and
            those whose draw is None, stay as they are.
        draws: One per row.
    """
    vocabulary = scores.shape[-1]
    pending: dict[int, list[int]] = {}
    for row, draw in enumerate(draws):
        if draw is None:
            continue
        if draw.top_p >= 1.0 and not 0 < draw.top_k < vocabulary:
            _mark_from_all(scores[row], draw)
        else:
            pending.setdefault(_width(draw.top_k, vocabulary), []).append(row)
    widths = [width for width in _WIDTHS if width < vocabulary] + [vocabulary]
    for width, wider in zip(widths, [*widths[1:], vocabulary], strict=True):
        if rows := pending.pop(width, None):
            too_narrow = _mark_from_best(scores, rows, [draws[row] for row in rows], width)
            pending.setdefault(wider, []).extend(too_narrow)


def choose(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Draw a token per row without a look at the values, as CUDA graphs demand; on any device.

    Args:
        scores: Float32 logits [rows, vocabulary].
        temperature: Float32 [rows]; under 1e-5 means greedy.
        top_k: Int32 [rows]; 0 means all.
        top_p: Float32 [rows].
        key: Int64 [rows], the bits of `stream_key`.

    Returns:
        Token ids, int64 [rows, 1].
    """
    values, token_ids = scores.sort(dim=-1, descending=True)
    scaled = (values - values[:, :1]) / temperature.clamp(min=_GREEDY_BELOW)[:, None]
    rank = torch.arange(scores.shape[-1], device=scores.device)[None, :]
    keep = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    mass = scaled.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    keep &= (before < top_p[:, None]) | (top_p >= 1.0)[:, None] | (rank == 0)
    noisy = scaled + _gumbel(_uniform_on_device(key, token_ids))
    best = noisy.masked_fill(~keep, -torch.inf).argmax(dim=-1, keepdim=True)
    drawn = token_ids.gather(1, best)
    greedy = scores.argmax(dim=-1, keepdim=True)
    return torch.where((temperature < _GREEDY_BELOW)[:, None], greedy, drawn)


class PositionKeyedSampling(ContinuousBatchingLogitsProcessorList):
    """The logits processors of a ContinuousBatchingManager with `do_sample=False`.

    It stands in for the whole list, not for one processor in it, since a processor has one 32-bit
    number a request, and a draw takes five.

    Args:
        on_device: Draw on the device of the scores; False draws on the CPU.
        replayed: Whether a call may be recorded and run again with other arguments (CUDA graphs),
            or run while the next batch is prepared (asynchronous batching).
    """

    def __init__(self, *, on_device: bool, replayed: bool) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.tensors_required = 5
        self._on_device = on_device
        self._replayed = replayed
        self._draws: list[Draw | None] = []
        self._shaped: list[ShapedRow] = []

    @property
    def can_shape(self) -> bool:
        """Whether a request may ask for more than a draw.

        A recorded call runs without Python, and the next batch may be prepared before the token
        that its penalties count is known.
        """
        return not self._replayed

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Temperature 0 everywhere."""
        int32_tensor.zero_()

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Note how to draw for the requests that get a token, in the order of their rows."""
        states = [r.state for r in requests_in_batch if r.has_new_token]
        self._draws = draws = [_draw_of(state) for state in states]
        self._shaped = [
            ShapedRow(row, *shaped)
            for row, state in enumerate(states)
            if (shaped := _shaping_of(state)) is not None
        ]
        if self._on_device and (self._replayed or any(draws)):
            rows = [draw or Draw(0.0, 0, 1.0, 0) for draw in draws]
            packed = torch.tensor(
                [
                    [r.key >> 32 for r in rows],
                    [r.key & 0xFFFFFFFF for r in rows],
                    [min(r.top_k, 0x7FFFFFFF) for r in rows],
                ],
                dtype=torch.int64,
            ).to(torch.int32)  # wraps
            real = torch.tensor([[r.temperature for r in rows], [r.top_p for r in rows]])
            packed = torch.cat([packed, real.view(torch.int32)])
            arg_storage[:, : len(rows)] = packed.to(arg_storage.device)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        """Raise the drawn token of each sampled row to infinity; [rows, vocabulary]."""
        drawn = self._replayed or any(self._draws)
        if not drawn and not self._shaped:
            return scores
        device = scores.device
        if not self._on_device:
            scores = scores.cpu()  # itself, on a CPU
        observation = None
        if self._shaped:
            observation = Observation(scores, self._shaped)
            shape(scores, self._shaped)
        if drawn and self._on_device:
            high, low, top_k = logits_processor_args[:3, : scores.shape[0]]
            temperature, top_p = logits_processor_args[3:, : scores.shape[0]].view(torch.float32)
            key = (high.long() << 32) | (low.long() & 0xFFFFFFFF)
            choice = choose(scores, temperature, top_k, top_p, key)
            scores = scores.scatter(1, choice, torch.inf)
        elif drawn:
            mark_choices(scores, self._draws)
        if observation is not None:
            observation.keep(scores)
        return scores.to(device)


def _draw_of(state: RequestState) -> Draw | None:
    """How a request draws; the library's own requests, with which it warms up, are greedy."""
    draw = getattr(state, "draw", None)
    return draw() if draw is not None else None


def _shaping_of(state: RequestState) -> tuple[int, Shaping] | None:
    """Position of the next token and how it is shaped, for a request that asks for it."""
    shaping = getattr(state, "shaping", None)
    return shaping() if shaping is not None else None


def _mix(value: int) -> int:
    """SplitMix64's output function, a bijection of 64 bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _width(top_k: int, vocabulary: int) -> int:
    """How many of the best tokens to look at first."""
    if not 0 < top_k < vocabulary:
        return min(_WIDTHS[1], vocabulary)  # a nucleus of any size; most have less than 512 tokens
    return next((width for width in _WIDTHS if top_k <= width < vocabulary), vocabulary)


def _mark_from_all(scores: torch.Tensor, draw: Draw) -> None:
    """Draw from the whole vocabulary; [vocabulary]. A row's numbers stay in the cache that way."""
    noise = _gumbel(torch.from_numpy(_uniform(np.uint64(draw.key), _steps(scores.shape[0]))))
    noisy = torch.sub(scores, scores.max()).div_(draw.temperature).add_(noise)
    scores[int(noisy.numpy().argmax())] = torch.inf


def _mark_from_best(
    scores: torch.Tensor, rows: list[int], draws: Sequence[Draw | None], width: int
) -> list[int]:
    """Draw from the `width` best tokens of some rows; the rows whose nucleus is wider than that."""
    index = torch.tensor(rows)
    chosen = scores if len(rows) == scores.shape[0] else scores[index]
    values, token_ids = chosen.topk(width)
    temperature, top_k, top_p, keys = zip(*draws, strict=True)  # type: ignore[arg-type]
    heat = torch.tensor(temperature)[:, None]
    limit = torch.tensor([k if k > 0 else scores.shape[-1] for k in top_k])[:, None]
    nucleus = torch.tensor(top_p, dtype=torch.float64)[:, None]
    rank = torch.arange(width)[None, :]

    best = values[:, :1]
    scaled = (values - best) / heat
    keep = rank < limit
    too_narrow: list[int] = []
    if min(top_p) < 1.0:
        # In float64, since a running sum over 49,152 tokens loses four digits in float32.
        mass = scaled.double().masked_fill_(~keep, -torch.inf)
        total = mass.logsumexp(dim=-1, keepdim=True)
        for i, draw in enumerate(draws):
            if draw is not None and draw.top_p < 1.0 and not 0 < draw.top_k < scores.shape[-1]:
                total[i] = ((chosen[i] - best[i]) / draw.temperature).double().logsumexp(dim=-1)
        mass = (mass - total).exp_()
        before = mass.cumsum(dim=-1) - mass
        keep &= (before < nucleus) | (nucleus >= 1.0) | (rank == 0)
        if width < scores.shape[-1]:
            reaches = (keep[:, -1:] & (limit > width)).flatten().tolist()
            too_narrow = [row for row, wide in zip(rows, reaches, strict=True) if wide]
    steps = _steps(scores.shape[-1])[token_ids.numpy()]
    noise = _gumbel(torch.from_numpy(_uniform(np.array(keys, np.uint64)[:, None], steps)))
    choice = (scaled + noise).masked_fill_(~keep, -torch.inf).argmax(dim=-1, keepdim=True)
    drawn = token_ids.gather(1, choice).flatten().tolist()
    for row, token_id in zip(rows, drawn, strict=True):
        if row not in too_narrow:
            scores[row, token_id] = torch.inf
    return too_narrow


_steps_of: dict[int, np.ndarray] = {}


def _steps(vocabulary: int) -> np.ndarray:
    """(token id + 1) * gamma for all ids, uint64 [vocabulary]; the generator's way to each id."""
    steps = _steps_of.get(vocabulary)
    if steps is None:
        steps = np.arange(1, vocabulary + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        _steps_of[vocabulary] = steps
    return steps


def _uniform(key: np.ndarray | np.uint64, steps: np.ndarray) -> np.ndarray:
    """Uniform float32 in (0, 1) from SplitMix64 started at `key`, by the way to each output.

    numpy and not torch: its 64-bit loops take a third of the time on a CPU.
    """
    bits = steps + key
    shifted = np.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(bits, np.uint64(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        np.multiply(bits, np.uint64(factor), out=bits)
    np.right_shift(bits, np.uint64(31), out=shifted)
    np.bitwise_xor(bits, shifted, out=bits)
    # 63 bits and a half: small numbers keep all digits of a float32, and these are the ones that
    # win. Signed, since that conversion is one instruction.
    np.right_shift(bits, np.uint64(1), out=bits)
    uniform = bits.view(np.int64).astype(np.float32)
    uniform *= np.float32(2.0**-63)
    uniform += np.float32(2.0**-64)
    return np.minimum(uniform, np.float32(_LARGEST_BELOW_ONE), out=uniform)


def _uniform_on_device(key: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """What `_uniform` gives, in torch; `key` int64 [rows], `token_ids` int64 [rows, n]."""
    bits = (token_ids + 1) * _signed(_GAMMA) + key[:, None]
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits = (bits ^ _shift_right(bits, shift)) * _signed(factor)
    bits = _shift_right(bits ^ _shift_right(bits, 31), 1)
    return (bits.float() * 2.0**-63 + 2.0**-64).clamp(max=_LARGEST_BELOW_ONE)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """A logical shift; torch's own copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The signed number of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32; changes `uniform`.

    By way of the exponential -log1p(-u), whose small values, the winning ones, are exact to the
    last digit, where -log(u) would have them in steps of 2**-24.
    """
    return uniform.neg_().log1p_().neg_().log_().neg_()
