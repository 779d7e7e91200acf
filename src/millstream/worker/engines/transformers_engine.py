# pyright: basic
"""The engine for Hugging Face models: transformers' continuous batching behind `Engine`.

This module stays light; torch and all that needs it is imported by the loading thread, so that a
worker that starts shows up at once, and says what it is doing.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from millstream.shared.errors import InvalidRequest, SettingsError
from millstream.shared.imports import uncollected
from millstream.worker.engines.base import (
    EngineHealth,
    EngineInfo,
    EngineSettings,
    GenerationRequest,
    OnStep,
    StepOutput,
    Tokenizer,
)

if TYPE_CHECKING:
    from millstream.worker.engines.transformers_batching import (
        BatchingManager,
        Generation,
        StepTokens,
    )

for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        raise ImportError(f"No module named {_package!r}", name=_package)

logger = logging.getLogger(__name__)

_WARM_UP_S = 120.0
"""A first step compiles and allocates; one that takes longer than this hangs."""
_STOP_S = 10.0
"""A step takes a second at most, unless it hangs; then the thread is left behind."""


class TransformersEngine:
    """Generates with one model for many requests at once.

    Args:
        settings: What to load, and how.
        cache_tokens: Size of the KV cache in tokens over all requests; None measures the machine.
    """

    def __init__(self, settings: EngineSettings, *, cache_tokens: int | None = None) -> None:
        self._settings = settings
        self._cache_tokens = cache_tokens
        self._manager: BatchingManager | None = None
        self._tokenizer: Tokenizer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_step: OnStep | None = None
        self._active: dict[str, Generation] = {}
        self._keys = itertools.count()
        self._vocabulary_size = 0
        self._context_length = 0
        self._eos: frozenset[int] = frozenset()
        self._ended: str | None = None
        """Why no step will ever come again."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; there once `start` has returned."""
        if self._tokenizer is None:
            raise RuntimeError("The engine has not been started.")
        return self._tokenizer

    async def start(self, on_step: OnStep) -> EngineInfo:
        """Load the model and start stepping; `on_progress` is called from another thread.

        Raises:
            SettingsError: the model cannot be loaded as set; says what to do.
        """
        self._loop = asyncio.get_running_loop()
        self._on_step = on_step
        return await asyncio.to_thread(self._load)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request into the batch; its outputs arrive through `on_step`.

        Prompt and answer together fit into the context, so the budget is cut to what is left of
        it, and such a request ends with "length".

        Raises:
            InvalidRequest: it can never run here.
        """
        from millstream.worker.engines.transformers_batching import Generation
        from millstream.worker.engines.transformers_shaping import Shaping

        if self._manager is None or self._loop is None:
            raise RuntimeError("The engine has not been started.")
        room = self._check(request)
        if not self._manager.can_shape and (asked := Shaping.asked_by(request)):
            raise InvalidRequest(
                f"{asked} cannot be had of this worker: its model runs in CUDA graphs.", param=asked
            )
        generation = Generation(
            request,
            key=str(next(self._keys)),
            max_new_tokens=min(request.max_new_tokens, room),
        )
        self._active[request.request_id] = generation
        if self._ended is not None:
            self._loop.call_soon(self._fail_all)
            return
        self._manager.add(generation)

    def cancel(self, request_id: str) -> None:
        """Drop a request within one step; no output of it arrives after this call."""
        generation = self._active.pop(request_id, None)
        if generation is not None and self._manager is not None:
            self._manager.cancel(generation)

    def health(self) -> EngineHealth:
        """How the engine does; from any thread."""
        manager = self._manager
        return EngineHealth(
            active=len(self._active),
            steps=manager.steps if manager is not None else 0,
            fatal=self._ended or (manager.failure if manager is not None else None),
        )

    async def stop(self) -> None:
        """End all requests without further outputs and free the model."""
        self._active.clear()
        manager, self._manager = self._manager, None
        if manager is not None and not await asyncio.to_thread(manager.end, _STOP_S):
            logger.warning("the generation thread hangs; it ends with the process")

    def _load(self) -> EngineInfo:
        """Everything that takes long; runs in a thread of its own."""
        settings = self._settings
        settings.on_progress("starting torch")
        with contextlib.nullcontext() if "transformers" in sys.modules else uncollected():
            from millstream.worker.engines import (
                transformers_batching as batching,
                transformers_memory as memory,
            )
            from millstream.worker.engines.transformers_source import describe_numerics, load_model
            from millstream.worker.engines.transformers_tokenizer import TransformersTokenizer

        loaded = load_model(settings)
        model = loaded.model
        config = model.config.get_text_config()
        try:
            plan = memory.plan_cache(
                config,
                dtype=model.dtype,
                device=model.device,
                max_concurrent=settings.max_concurrent,
                flash=batching.use_flash(model),
                available_bytes=memory.available_memory(model.device),
                cache_tokens=self._cache_tokens,
            )
            manager = batching.BatchingManager(
                model,
                plan,
                max_concurrent=settings.max_concurrent,
                eos_token_ids=loaded.eos_token_ids,
            )
            settings.on_progress("warming up")
            self._begin(manager)
        except (ValueError, MemoryError, RuntimeError, AttributeError) as error:
            raise SettingsError(
                f"The model of MILLSTREAM_MODEL_SOURCE={settings.source!r} cannot run in batches "
                f"({type(error).__name__}: {error}); choose another one, or a smaller one."
            ) from error
        self._eos = frozenset(loaded.eos_token_ids)
        self._vocabulary_size = model.get_input_embeddings().weight.size(0)  # type: ignore[operator]
        limit = getattr(config, "max_position_embeddings", None) or manager.longest_request
        self._context_length = min(limit, manager.longest_request)
        self._tokenizer = TransformersTokenizer(loaded.tokenizer)
        self._manager = manager
        return EngineInfo(
            vocabulary_size=self._vocabulary_size,
            context_length=self._context_length,
            cache_tokens=plan.cache_tokens,
            suggested_sampling=loaded.suggested_sampling,
            numerics=describe_numerics(model),
        )

    def _begin(self, manager: "BatchingManager") -> None:
        """Start the manager and wait for a first token, which shows that the model runs."""
        from millstream.worker.engines.transformers_batching import Generation

        first = threading.Event()
        manager.begin(lambda _: first.set(), self._on_thread_end)
        probe = GenerationRequest(
            request_id="",
            token_ids=[0],
            prompt_length=1,
            max_new_tokens=1,
            seed=0,
            fallback_seed=0,
        )
        manager.add(Generation(probe, key="warm-up", max_new_tokens=1))
        deadline = time.monotonic() + _WARM_UP_S
        while not first.wait(0.1):
            if manager.failure is not None or time.monotonic() > deadline:
                break
        if manager.failure is not None or not first.is_set():
            reason = manager.failure or f"no token within {_WARM_UP_S:g} s"
            manager.end(_STOP_S)
            raise RuntimeError(reason)
        manager.set_sink(self._on_tokens)

    def _check(self, request: GenerationRequest) -> int:
        """How many tokens may come after the prompt.

        The manager checks nothing, and dies of most of this with all its requests.
        """
        length = len(request.token_ids)
        if request.request_id in self._active:
            raise InvalidRequest(f"The request {request.request_id!r} runs already.")
        if length == 0:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if request.max_new_tokens < 1:
            raise InvalidRequest("At least one token must be asked for.", param="max_tokens")
        if length >= self._context_length:
            raise InvalidRequest(
                f"The prompt has {length} tokens; the model's context holds "
                f"{self._context_length}, with at least one for the answer.",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocabulary_size:
            raise InvalidRequest(
                f"Token ids must be from 0 to {self._vocabulary_size - 1}.", param="prompt"
            )
        if (
            request.logit_bias
            and not 0 <= min(request.logit_bias) <= max(request.logit_bias) < self._vocabulary_size
        ):
            raise InvalidRequest(
                f"Token ids must be from 0 to {self._vocabulary_size - 1}.", param="logit_bias"
            )
        return self._context_length - length

    def _on_tokens(self, outputs: "list[StepTokens]") -> None:
        """A step is done; on the generation thread."""
        self._call(self._deliver, [(o.generation, self._to_output(o)) for o in outputs])

    def _to_output(self, output: "StepTokens") -> StepOutput:
        request_id = output.generation.request.request_id
        if output.error is not None:
            return StepOutput(request_id, finish="error", error=output.error)
        token_ids, logprobs = tuple(output.token_ids), tuple(output.logprobs)
        if not output.finished:
            return StepOutput(request_id, token_ids, logprobs=logprobs)
        if token_ids and token_ids[-1] in self._eos:
            return StepOutput(request_id, token_ids[:-1], "stop", logprobs=logprobs[:-1])
        return StepOutput(request_id, token_ids, "length", logprobs=logprobs)

    def _deliver(self, outputs: "list[tuple[Generation, StepOutput]]") -> None:
        """Hand a step to the worker, without the requests cancelled meanwhile; on the loop."""
        current: list[StepOutput] = []
        for generation, output in outputs:
            if self._active.get(output.request_id) is not generation:
                continue
            if output.finish is not None:
                del self._active[output.request_id]
            current.append(output)
        if current and self._on_step is not None:
            self._on_step(current)

    def _on_thread_end(self) -> None:
        """The generation thread ends; on that thread."""
        self._call(self._fail_all)

    def _fail_all(self) -> None:
        """No step will come any more: whoever still waits hears of it; on the loop."""
        if self._manager is None:
            return  # told to stop
        if self._ended is None:
            self._ended = self._manager.failure or "the generation thread ended"
        outputs = [StepOutput(name, finish="error", error=self._ended) for name in self._active]
        self._active.clear()
        if outputs and self._on_step is not None:
            self._on_step(outputs)

    def _call(self, function, *arguments) -> None:
        """Run a function on the event loop, from the generation thread."""
        if self._loop is not None:
            # A closed loop has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)
