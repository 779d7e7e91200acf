# pyright: basic
"""Sampling that depends on (seed, position) alone, so that any worker goes on with the same text.

Adding independent Gumbel noise to the logits and taking the argmax draws exactly from their softmax
(the Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014). The
noise here is a pure function of (seed, position, token id): the bits are those of SplitMix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of
Vigna's splitmix64.c), a generator whose n-th output can be computed on its own. No state is kept,
so neither the batch nor an interruption changes what is drawn.
"""

import math
import threading
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
    for row, draw in enumerate(draws):
        if draw is not None:
            scores[row, _drawn(scores[row], draw)] = torch.inf


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


def _drawn(scores: torch.Tensor, draw: Draw) -> int:
    """The token that a draw takes; [vocabulary]. Row by row, whose numbers stay in the cache then.

    numpy where it has loops that torch has not or takes longer for.
    """
    logits, token_ids = scores.numpy(), None
    largest = logits.max()
    if not np.isfinite(largest):  # a broken model's; the others in its batch are not to suffer
        return int(logits.argmax())
    room = _rooms.of(len(logits))
    if 0 < draw.top_k < len(logits):
        logits, token_ids = (each.numpy() for each in scores.topk(draw.top_k))
    values = np.subtract(logits, largest, out=room.values[: len(logits)])
    values /= np.float32(draw.temperature)
    if draw.top_p < 1.0:
        kept = _nucleus(values, draw.top_p, room)
        values, token_ids = values[kept], kept if token_ids is None else token_ids[kept]
    if token_ids is None:
        token_ids = _leaders(values, draw.key, room)
        values = values[token_ids]
    noise = _gumbel(torch.from_numpy(_uniform(draw.key, room.steps[token_ids], room))).numpy()
    return int(token_ids[int(np.add(values, noise, out=noise).argmax())])


class _Room:
    """What a row's numbers are written to.

    Fresh arrays of that size are memory that the system maps anew for each: twice the time.
    """

    def __init__(self, size: int) -> None:
        self.steps = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        """(token id + 1) * gamma: the generator's way to each id."""
        self.values = np.empty(size, np.float32)
        self.mass = np.empty(size, np.float32)
        self.uniform = np.empty(size, np.float32)
        self.chosen = np.empty(size, np.bool_)
        self.bits = np.empty(size, np.uint64)
        self.shifted = np.empty(size, np.uint64)


class _Rooms(threading.local):
    """A thread's, which has one engine and so one size of vocabulary."""

    _room: _Room | None = None

    def of(self, size: int) -> _Room:
        """Room for rows of a vocabulary."""
        if self._room is None or len(self._room.steps) != size:
            self._room = _Room(size)
        return self._room


_rooms = _Rooms()


def _nucleus(values: np.ndarray, top_p: float, room: _Room) -> np.ndarray:
    """Where the smallest set is that has the mass `top_p`, the likeliest first.

    Only what is likely enough is sorted: the rest of 49,152 tokens would take 4 ms.

    Args:
        values: Logarithms of what the masses are in proportion to, [n]; 0 is the largest.
        top_p: Under 1; nothing leaves the likeliest.
        room: For n numbers or more.
    """
    mass = np.exp(values, out=room.mass[: len(values)])
    likely = room.chosen[: len(values)]
    wanted = mass.sum(dtype=np.float64) * top_p  # float32 loses four digits in such a sum
    floor = 0.25
    while mass[np.greater_equal(mass, floor, out=likely)].sum(dtype=np.float64) < wanted:
        floor /= 4.0
    kept = np.flatnonzero(likely)
    kept = kept[np.argsort(-values[kept], kind="stable")]
    before = mass[kept].cumsum(dtype=np.float64)[:-1]
    return kept[: 1 + int(before.searchsorted(wanted))]


def _leaders(values: np.ndarray, key: int, room: _Room) -> np.ndarray:
    """Where a draw from all can only fall: a few, so that two logarithms of all are saved.

    The largest of `values` + noise is the first in a race whose times are -log1p(-u) / mass, and
    these are not under u / mass.
    """
    mass = np.exp(values, out=room.mass)
    uniform = _uniform(key, room.steps, room)
    with np.errstate(divide="ignore", over="ignore"):
        least = np.divide(uniform, mass, out=room.mass)
    ahead = int(least.argmin())
    arrives = -math.log1p(-float(uniform[ahead])) / math.exp(values[ahead])
    return np.flatnonzero(np.less_equal(least, arrives * 1.001, out=room.chosen))


def _uniform(key: int, steps: np.ndarray, room: _Room) -> np.ndarray:
    """Uniform float32 in (0, 1) from SplitMix64 started at `key`, by the way to each output.

    numpy and not torch: its 64-bit loops take a third of the time on a CPU. The result lies in
    the room until the next.
    """
    bits = np.add(steps, np.uint64(key), out=room.bits[: len(steps)])
    shifted = room.shifted[: len(steps)]
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(bits, np.uint64(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        np.multiply(bits, np.uint64(factor), out=bits)
    np.right_shift(bits, np.uint64(31), out=shifted)
    np.bitwise_xor(bits, shifted, out=bits)
    # 63 bits and a half: small numbers keep all digits of a float32, and these are the ones that
    # win. Signed, since that conversion is one instruction.
    np.right_shift(bits, np.uint64(1), out=bits)
    uniform = room.uniform[: len(steps)]
    np.copyto(uniform, bits.view(np.int64), casting="unsafe")
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
