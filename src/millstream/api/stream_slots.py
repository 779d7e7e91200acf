"""The streams that limited callers have open on this pod: each counts while the pod says so."""

import asyncio
import logging
from collections import defaultdict

from millstream.shared.connection import RedisError
from millstream.shared.limits import LimitStore

logger = logging.getLogger(__name__)


class StreamSlots:
    """What is open here; a pod that dies says no more, and its streams lapse."""

    def __init__(self, store: LimitStore, *, lease_s: float) -> None:
        self._store = store
        self._keep_s = lease_s / 4  # as for workers: two calls may be lost, and one be late
        self._open: defaultdict[str, set[str]] = defaultdict(set)

    async def take(self, caller: str, stream_id: str, *, most: int) -> bool:
        """Count a stream as open; False: as many are as may.

        Raises:
            RedisError: Redis does not answer.
        """
        taken = await self._store.open_stream(caller, stream_id, most=most)
        if taken:
            self._open[caller].add(stream_id)
        return taken

    async def give_back(self, caller: str, stream_id: str) -> None:
        """A stream has ended; should Redis not hear of it, it lapses."""
        self._open[caller].discard(stream_id)
        if not self._open[caller]:
            del self._open[caller]
        try:
            await self._store.close_stream(caller, stream_id)
        except RedisError as error:
            logger.debug("close of a stream of %s: %s", caller, error)

    async def keep(self) -> None:
        """Say again and again which streams are open."""
        while True:
            await asyncio.sleep(self._keep_s)
            for caller, streams in list(self._open.items()):
                try:
                    await self._store.keep_streams(caller, list(streams))
                except RedisError as error:
                    logger.debug("streams of %s: %s", caller, error)
