"""Which models the fleet serves: what live workers say, and what is remembered of those gone."""

import asyncio
import time

from millstream.shared.connection import RedisError, RedisTimeout
from millstream.shared.errors import InvalidRequest, NoWorker, UnknownModel
from millstream.shared.registry import WorkerInfo, read_workers
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import WorkerState

FRESH_S = 1.0  # how old an answer may be
MISS_S = 0.1  # how old, when a name is not in it: a worker may just have joined
# How long a request waits for a look at the roster, before it waits for its own turn: with that (a
# call takes CALL_S at the most) it stays under the 5 s in which a 503 must come.
WAIT_S = 1.0
FIRST_PAUSE_S = 0.25


class Directory:
    """A pod's view of the roster, read at most once a second.

    A model whose workers are all gone is still known: its tasks wait for the next worker, which is
    what scaling from zero and a rolling restart need.
    """

    def __init__(self, scripts: Scripts, settings: Settings) -> None:
        self._scripts = scripts
        self._settings = settings
        self._reading: asyncio.Task[None] | None = None
        self._read_at = 0.0
        self._workers: list[WorkerInfo] = []
        self._remembered: dict[str, float] = {}
        self._known = self._all_known()
        """All models that the fleet knows."""

    async def load(self) -> None:
        """Have a first view, however long that takes.

        A client's first calls connect to each node and send the scripts; no request is to wait for
        all of that, and `/ready` is red until it is done.
        """
        while not self._read_at:
            try:
                await self._refresh(FRESH_S)
            except RedisError:
                await asyncio.sleep(FIRST_PAUSE_S)

    async def _refresh(self, age_s: float) -> None:
        """Have a view no older than that; an older one must do where Redis is slow."""
        if time.monotonic() - self._read_at < age_s:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="read roster")
            self._reading.add_done_callback(_settled)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(self._reading)  # one reading, and one failure, serves all
        except TimeoutError:
            if not self._read_at:
                raise RedisTimeout("The roster could not be read in time.") from None

    async def _read(self) -> None:
        self._workers = await read_workers(self._scripts, lease_s=self._settings.lease_s)
        self._remembered = await self._scripts.remembered_models()
        self._known = self._all_known()
        self._read_at = time.monotonic()

    async def workers(self) -> list[WorkerInfo]:
        """The live workers."""
        await self._refresh(FRESH_S)
        return self._workers

    async def served(self) -> dict[str, WorkerInfo]:
        """Models of live workers, with the oldest worker of each."""
        await self._refresh(0)  # who asks was often told a moment ago that one is ready
        models: dict[str, WorkerInfo] = {}
        for worker in sorted(self._workers, key=lambda worker: worker.started_at):
            if worker.state != WorkerState.STARTING:
                models.setdefault(worker.model, worker)
        return models

    def vocabulary_of(self, model: str) -> int:
        """Below what token ids must be for each worker of a model; 0: none has told."""
        sizes = (worker.vocabulary for worker in self._workers if worker.model == model)
        return min(filter(None, sizes), default=0)

    def _all_known(self) -> set[str]:
        known = {worker.model for worker in self._workers} | self._remembered.keys()
        known |= self._settings.on_demand
        if self._settings.model:
            known.add(self._settings.model)
        return known

    async def can_take_work(self) -> bool:
        """Whether a task sent now would be accepted and has, had, or will get someone to run it."""
        await self._refresh(FRESH_S)
        return bool(self._remembered or self._settings.on_demand)

    async def resolve(self, name: str | None, *, allowed: frozenset[str] | None = None) -> str:
        """The model a request means, out of those allowed (None: all).

        Raises:
            UnknownModel: the fleet knows others, not this one, or it is not allowed.
            NoWorker: the fleet knows none at all yet.
            InvalidRequest: none was named, and there are several.
        """
        await self._refresh(FRESH_S)
        if not self._known:
            await self._refresh(0)  # the first worker may have joined since this pod started
        elif name is not None and name not in self._known:
            await self._refresh(MISS_S)
        known = self._known
        if not known:
            raise NoWorker("No worker has joined the fleet yet.", retry_after_s=5)
        if allowed is not None:
            known = known & allowed  # not in place: it is the whole fleet's
        if name is not None:
            if name in known:
                return name
            raise UnknownModel(
                f"The model {name[:200]!r} does not exist, or this key may not use it."
                if allowed is not None
                else f"The model {name[:200]!r} does not exist.",
                param="model",
            )
        live = {worker.model for worker in self._workers} & known or known
        if not live:
            raise UnknownModel("No model of this fleet may be used with this key.", param="model")
        if len(live) > 1:
            raise InvalidRequest(
                f"model must be one of: {', '.join(sorted(live))}.",
                param="model",
                code="missing_required_parameter",
            )
        return next(iter(live))


def _settled(reading: "asyncio.Task[None]") -> None:
    """Take a failure that nobody waits for any more."""
    if not reading.cancelled():
        reading.exception()
