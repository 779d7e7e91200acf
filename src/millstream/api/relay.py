"""A task's events for one reader: the log from where it left off, then what comes, gapless."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator

from millstream.api.feed import Feed
from millstream.shared.connection import RedisError
from millstream.shared.errors import ExpiredTask, RedisUnavailable, UnknownTask
from millstream.shared.events import Event
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import LogPage, Scripts

logger = logging.getLogger(__name__)

PAGE = 256  # events read at once: bounds the memory of a reader that is far behind
# The subscription has a watchdog of its own; this only bounds what a bug in it would cost.
RECHECK_S = 15.0
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0


class Relay:
    """Reads logs and follows them."""

    def __init__(self, scripts: Scripts, feed: Feed) -> None:
        self._scripts = scripts
        self._feed = feed

    async def page(
        self, task_id: str, caller: str, *, after: int, follow: bool = False, count: int = PAGE
    ) -> LogPage:
        """Events after a number, and how the task stands.

        Raises:
            UnknownTask: there is none, or it is another caller's.
            ExpiredTask: there was one.
            RedisUnavailable: Redis did not answer.
        """
        shard = shard_of(task_id)
        if shard is None:
            raise UnknownTask(f"There is no task {task_id[:64]!r}.", param="task_id")
        try:
            page = await self._scripts.follow(
                Keys(shard),
                task_id=task_id,
                caller=caller,
                pod=self._feed.pod_id if follow else "",
                after=after,
                count=count,
            )
        except RedisError as error:
            raise unavailable(error) from error
        if isinstance(page, LogPage):
            return page
        if page == "expired":
            raise ExpiredTask(f"Task {task_id} has expired.", param="task_id")
        raise UnknownTask(f"There is no task {task_id[:64]!r}.", param="task_id")

    async def events(
        self, task_id: str, caller: str, *, after: int, tick_s: float
    ) -> AsyncGenerator[list[Event]]:
        """All events after a number, in order, each once, up to the terminal one; in batches.

        A batch is empty when nothing came for `tick_s`, or when the pod wakes its readers: the
        moment to send a keepalive, or to leave. A Redis that is away is waited for. Raises as
        `page` for a task that is not there, or no longer.
        """
        next_seq = after + 1
        delay = RETRY_FIRST_S
        read_at = time.monotonic()
        with self._feed.reading(task_id) as reader:
            while True:
                if reader.behind:
                    reader.begin_catch_up()
                    try:
                        page = await self.page(task_id, caller, after=next_seq - 1, follow=True)
                    except RedisUnavailable:
                        reader.fall_behind()
                        await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311
                        delay = min(2 * delay, RETRY_MOST_S)
                        yield []
                        continue
                    delay = RETRY_FIRST_S
                    read_at = time.monotonic()
                    batch = page.events
                    if batch:
                        next_seq = batch[-1].seq + 1
                    reader.end_catch_up(next_seq)
                    if len(batch) == PAGE and not batch[-1].terminal:
                        reader.fall_behind()  # more to read
                    elif not batch and page.state.terminal and page.seq < next_seq:
                        return  # nothing after the number asked for
                else:
                    await reader.wait(tick_s)
                    batch = reader.take()
                    if batch:
                        next_seq = batch[-1].seq + 1
                        read_at = time.monotonic()
                    elif time.monotonic() - read_at > RECHECK_S:
                        reader.fall_behind()
                yield batch
                if batch and batch[-1].terminal:
                    return


def unavailable(error: RedisError) -> RedisUnavailable:
    """What a caller is told when Redis does not do its part."""
    logger.debug("Redis: %s", error)
    return RedisUnavailable("The fleet's store does not answer; try again.", retry_after_s=2)
