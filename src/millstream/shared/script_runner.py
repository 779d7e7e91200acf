"""Runs the atomic steps on a Redis: one script each in `lua/`, every call with a bound.

A script is `lua/<name>.lua` with `lua/lib.lua` put in after its first line. A server is sent its
hash and, where it has forgotten it (restart, failover, SCRIPT FLUSH), its text.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.exceptions import NoScriptError, TimeoutError as RedisTimeoutError

from millstream.shared.connection import CALL_S


@cache
def script_text(name: str) -> str:
    """The full text of a script."""
    folder = files("millstream.shared") / "lua"
    shebang, _, body = (folder / f"{name}.lua").read_text("utf-8").partition("\n")
    return f"{shebang}\n{(folder / 'lib.lua').read_text('utf-8')}\n{body}"


@cache
def script_hash(name: str) -> str:
    """The name under which a server knows a script: SHA-1 of its text."""
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


class ScriptRunner:
    """Calls to one Redis, each of which ends within `CALL_S`.

    Raises a `RedisError` from every call where Redis is away.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client: Any = client  # redis-py does not type what it answers

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script; what it answers."""

        async def call() -> Any:
            try:
                return await self.client.evalsha(script_hash(name), len(keys), *keys, *args)
            except NoScriptError:
                return await self.client.eval(script_text(name), len(keys), *keys, *args)

        return await self.bounded(call())

    async def bounded(self, call: Awaitable[Any]) -> Any:
        """Any other command, under the same bound."""
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except TimeoutError:
            raise RedisTimeoutError(f"Redis did not answer in {CALL_S:g} s") from None
