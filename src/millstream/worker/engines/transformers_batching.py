# pyright: basic
"""transformers' ContinuousBatchingManager, with the seams that a server needs.

What differs from the library's own classes, and why:

- A request carries its own cancel flag, looked at before every step. The library's queue of
  cancelled ids loses an id that it sees before the request itself, which then runs unseen.
- An output holds the new tokens only; the library's repeats, and copies, all of them every step.
- The outputs of a step are handed over together.
- The thread is a daemon and tells when it has ended, for whatever reason.

It leans on internals of transformers 5.24, which pyproject.toml pins.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
)

from millstream.worker.engines import transformers_attention
from millstream.worker.engines.base import GenerationRequest, TokenLogprobs
from millstream.worker.engines.transformers_memory import CachePlan
from millstream.worker.engines.transformers_sampling import (
    Draw,
    PositionKeyedSampling,
    is_greedy,
    stream_key,
)
from millstream.worker.engines.transformers_shaping import Shaping

logger = logging.getLogger(__name__)

_SCHEDULER = "millstream"


def use_flash(model: PreTrainedModel) -> bool:
    """Switch a model on a GPU to flash attention, if its package is installed; whether it has it.

    The library would also fetch kernels from the hub; a worker starts without a network.
    """
    if "flash" in str(model.config._attn_implementation):
        return True
    version = flash_version(model, model.device)
    if version is not None:
        model.set_attn_implementation(f"flash_attention_{version}")
    return version is not None


def flash_version(model: PreTrainedModel, device: torch.device) -> int | None:
    """Which flash attention a model takes on a device, if any."""
    if (
        device.type != "cuda"
        or model.dtype not in (torch.bfloat16, torch.float16)
        or not model._supports_flash_attn
    ):
        return None
    if is_flash_attn_3_available():
        return 3
    return 2 if is_flash_attn_2_available() else None


class Generation:
    """One request as the generation thread knows it; shared by all states the manager makes of it.

    Args:
        request: What to generate.
        key: The manager's name for it, used once in the life of the process.
        max_new_tokens: The budget, cut to what the cache holds.
    """

    __slots__ = ("cancelled", "delivered", "key", "max_new_tokens", "request", "seed", "shaping")

    def __init__(self, request: GenerationRequest, *, key: str, max_new_tokens: int) -> None:
        self.request = request
        self.key = key
        self.max_new_tokens = max_new_tokens
        self.seed = request.fallback_seed if request.seed is None else request.seed
        self.cancelled = False
        """Set by the event loop, read by the generation thread."""
        self.delivered = 0
        """Tokens handed over; the generation thread's."""
        self.shaping = Shaping(request) if Shaping.asked_by(request) else None
        """The generation thread's, too."""

    def take_logprobs(self, count: int) -> list[TokenLogprobs]:
        """Those of the `count` tokens that were handed over last, if the request asked for them."""
        if self.shaping is None or self.request.logprobs is None:
            return []
        end = len(self.request.token_ids) - self.request.prompt_length + self.delivered
        return [self.shaping.kept.pop(position) for position in range(end - count, end)]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step brought for one request; the end token is the last of `token_ids` if it came."""

    generation: Generation
    token_ids: list[int]
    finished: bool
    error: str | None
    logprobs: list[TokenLogprobs]


@dataclass(repr=False, eq=False)
class _State(RequestState):
    """The manager's record of a request that is in, or waits for, the batch."""

    generation: Generation = field(kw_only=True)

    def to_generation_output(self) -> StepTokens:  # type: ignore[override]
        """The tokens since the last call.

        A request that lost its cache to others starts again with its tokens as part of the prompt;
        they were delivered before, so the new ones are always at the end of `generated_tokens`.
        """
        generation = self.generation
        earlier = len(self.initial_tokens) - len(generation.request.token_ids)
        total = earlier + len(self.generated_tokens)
        fresh, generation.delivered = total - generation.delivered, max(total, generation.delivered)
        return StepTokens(
            generation,
            self.generated_tokens[-fresh:] if fresh > 0 else [],
            self.status == RequestStatus.FINISHED,
            self.error,
            generation.take_logprobs(max(fresh, 0)),
        )

    def create_equivalent_initial_request(self) -> "_State":
        """This request from the start, with what it generated so far as part of its prompt."""
        return _State(
            request_id=self.request_id,
            initial_tokens=self.initial_tokens + self.generated_tokens,
            max_new_tokens=self._new_tokens_limit - len(self.generated_tokens),
            eos_token_id=list(self._eos_token_ids),
            streaming=True,
            generation=self.generation,
        )

    def draw(self) -> Draw | None:
        """How to choose the token after the `position_offset` ones that are in the cache then."""
        request = self.generation.request
        if is_greedy(request.temperature):
            return None
        position = self.position_offset - request.prompt_length
        key = stream_key(self.generation.seed, position)
        return Draw(request.temperature, request.top_k, request.top_p, key)

    def shaping(self) -> tuple[int, Shaping] | None:
        """The position of that token, and how it is shaped, if it is."""
        shaping = self.generation.shaping
        if shaping is None:
            return None
        shaping.take(self.initial_tokens, self.generated_tokens)
        return self.position_offset - self.generation.request.prompt_length, shaping


class _Router(OutputRouter):
    """Hands the outputs of a step to one function, on the generation thread."""

    def __init__(
        self, sink: Callable[[list[StepTokens]], None], status: BackgroundThreadStatus
    ) -> None:
        super().__init__()
        self.sink = sink
        self._status = status

    def deliver(self, output: StepTokens) -> None:  # type: ignore[override]
        """One request failed; when all do, the end of the thread tells, with the reason."""
        if self._status.local_status == BackgroundThreadStatus.DONT_STOP:
            self.sink([output])

    def deliver_batch(self, outputs: list[StepTokens]) -> None:  # type: ignore[override]
        """A step is done."""
        self.sink(outputs)


class _Scheduler(FIFOScheduler):
    """First come, first served, with cancel flags instead of a queue of ids."""

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Drop what was cancelled, and let waiting requests have the room."""
        for state in chain(self.active_requests.values(), self.waiting_requests.values()):
            if state.generation.cancelled:  # type: ignore[attr-defined]
                self._requests_to_cancel.add(state.request_id)
        cancelled = super().clear_cancelled_requests()
        # After it took the cache from a request, the library starts nothing until another has
        # finished; if all others were cancelled instead, it would wait for ever.
        if cancelled or not self.active_requests:
            self.block_new_requests = False
        return cancelled


SCHEDULER_MAPPING[_SCHEDULER] = _Scheduler


class BatchingManager(ContinuousBatchingManager):
    """A manager whose requests are `Generation`s.

    Args:
        model: The loaded model.
        plan: How large cache and steps are.
        max_concurrent: How many requests a step may serve.
        eos_token_ids: Any of them ends a request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: CachePlan,
        *,
        max_concurrent: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        transformers_attention.install()
        super().__init__(
            model=model,  # type: ignore[arg-type]
            generation_config=GenerationConfig(do_sample=False, eos_token_id=list(eos_token_ids)),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=plan.page_tokens,
                num_blocks=plan.pages,
                max_batch_tokens=plan.batch_tokens,
                max_requests_per_batch=max_concurrent,
                max_memory_percent=1.0,  # the plan has seen to it
                auto_switch_to_flash=False,  # `use_flash` did, before the plan
                scheduler_type=_SCHEDULER,
            ),
        )
        resolved = self.continuous_batching_config
        self.logit_processor = PositionKeyedSampling(
            on_device=model.device.type == "cuda",
            replayed=bool(resolved.use_async_batching or any(resolved.cuda_graph_booleans)),
        )
        self._eos_token_ids = list(eos_token_ids)
        self._on_end: Callable[[], None] | None = None

    @property
    def steps(self) -> int:
        """Steps done."""
        return getattr(self, "current_batch", 0)

    @property
    def failure(self) -> str | None:
        """Why the thread ended or will, or None while it lives."""
        error = self.background_thread_status.fatal_error
        if error is not None:
            return f"{type(error).__name__}: {error}"
        if self._generation_thread is not None and not self._generation_thread.is_alive():
            return "the generation thread ended"
        return None

    @property
    def can_shape(self) -> bool:
        """Whether requests may ask for bias, penalties, min_p and log probabilities."""
        return self.logit_processor.can_shape

    @property
    def longest_request(self) -> int:
        """Tokens that one request can have in the cache when it is alone there."""
        if self.batch_processor is None:
            raise RuntimeError("The manager has not begun.")
        return infer_max_single_request_tokens(self.batch_processor.cache)

    @torch.no_grad()
    def begin(self, sink: Callable[[list[StepTokens]], None], on_end: Callable[[], None]) -> None:
        """Allocate everything and start stepping.

        Args:
            sink: Takes the outputs of each step, on the generation thread.
            on_end: Called last on the generation thread, however it ends.
        """
        self.output_router = _Router(sink, self.background_thread_status)
        self._on_end = on_end
        self.warmup()  # makes the batch processor; records CUDA graphs, if there are any
        self.background_thread_status.clear()
        # A daemon: a step that hangs must not keep the process from ending.
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop,
            kwargs={"use_inference_mode": False},
            name="generation",
            daemon=True,
        )
        self._generation_thread.start()

    def set_sink(self, sink: Callable[[list[StepTokens]], None]) -> None:
        """Send the outputs of later steps elsewhere."""
        self.output_router.sink = sink  # type: ignore[attr-defined]

    def add(self, generation: Generation) -> None:
        """Put a request in line; any thread."""
        self.input_queue.put(
            _State(
                request_id=generation.key,
                initial_tokens=list(generation.request.token_ids),
                max_new_tokens=generation.max_new_tokens,
                eos_token_id=self._eos_token_ids,
                streaming=True,
                generation=generation,
            )
        )
        self._wake_up_loop.set()

    def cancel(self, generation: Generation) -> None:
        """Drop a request before the next step; any thread, also before it was seen."""
        generation.cancelled = True
        self._wake_up_loop.set()

    def end(self, timeout: float) -> bool:
        """Stop after the step that runs; whether the thread ended in time. Blocks."""
        self._wake_up_loop.set()
        self.stop(block=True, timeout=timeout, hard_stop=True)
        return self._generation_thread is None

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        logger.error("a step failed, and with it the engine", exc_info=error)
        super()._handle_critical_error(error, batch_processor)

    def _run_generation_loop(self, use_inference_mode: bool) -> None:
        try:
            super()._run_generation_loop(use_inference_mode)
        finally:
            if self._on_end is not None:
                self._on_end()
