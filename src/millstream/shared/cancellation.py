"""Ends background tasks for certain, though one may swallow a cancellation."""

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.5


async def cancel_until_done(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks, again where it did not take, and return when all have ended.

    A client that is just connecting can swallow a cancellation (redis-py turns it into an error of
    its own when a timeout strikes at the same moment), and its loop would go on.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
