"""Waiting for a condition with a bound, instead of sleeping."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Value = TypeVar("Value")


async def eventually(
    look: Callable[[], Awaitable[Value]], *, within_s: float = 10.0, what: str = "condition"
) -> Value:
    """Call `look` until it gives something true; its value."""
    deadline = time.monotonic() + within_s
    while True:
        value = await look()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {within_s:g} s; last: {value!r}")
        await asyncio.sleep(0.02)


async def until(look: Callable[[], Value], *, within_s: float = 10.0) -> Value:
    """As `eventually`, for what can be seen without awaiting."""

    async def seen() -> Value:
        return look()

    return await eventually(seen, within_s=within_s)
