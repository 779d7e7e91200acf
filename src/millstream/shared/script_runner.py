"""Runs the atomic steps on a Redis: one script each in `lua/`, every call with a bound.

A script is `lua/<name>.lua` with what it uses of `PARTS` put in after its first line. A server is
sent its hash and, where it has forgotten it (restart, failover, SCRIPT FLUSH), its text.
"""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.exceptions import (
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)

from millstream.shared.connection import CALL_S
from millstream.shared.metrics.calls import CallStats
from millstream.shared.server_client import KeptConnection

AGAIN_S = 0.2
PARTS = ("lib", "fair", "tasks")
"""Files of what scripts share; each definition uses only what comes before it."""
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_DEFINITION = re.compile(
    r"^local (?:function (\w+)|(\w+(?:, \w+)*) =).*\n(?:(?!local ).*\n)*", re.MULTILINE
)


def _read(name: str) -> str:
    return (files("millstream.shared") / "lua" / f"{name}.lua").read_text("utf-8")


@cache
def script_text(name: str) -> str:
    """The full text of a script."""
    shebang, _, body = _read(name).partition("\n")
    shared = _COMMENT.sub("", "".join(_read(part) for part in PARTS))
    used = _COMMENT.sub("", body)
    taken = ""
    # A server makes each definition anew in every call, so a script is given no more than it needs.
    for definition in reversed([*_DEFINITION.finditer(shared)]):
        names = (definition[1] or definition[2]).split(", ")
        if any(re.search(rf"\b{name}\b", used) for name in names):
            taken = definition[0] + taken
            used += definition[0]
    return f"{shebang}\n{taken}{body}"


@cache
def script_hash(name: str) -> str:
    """The name under which a server knows a script: SHA-1 of its text."""
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


class ScriptRunner:
    """Calls to one Redis, each of which ends within `CALL_S`, or `AGAIN_S` later.

    Raises a `RedisError` from every call where Redis is away.

    Args:
        client: To that Redis.
        stats: Where calls are counted.
    """

    def __init__(self, client: redis.asyncio.Redis, stats: CallStats | None = None) -> None:
        self.client: Any = client  # redis-py does not type what it answers
        self._kept: KeptConnection | None = getattr(client, "kept", None)  # a cluster's has none
        self._stats = stats or CallStats()

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script; what it answers.

        The client's kept connection is tried first, if it has one. Without an answer there it is
        done again the usual way, unless its client must not repeat what may have been done.
        """
        called = (script_hash(name), len(keys), *keys, *args)
        began = time.monotonic()
        with self._stats.timed(name):
            if self._kept is not None and self._kept.ready:
                try:
                    return await self._on_kept(self._kept, name, called)
                except ReadOnlyError:
                    pass  # it has not begun
                except ResponseError:
                    raise
                except RedisError:
                    if not self._kept.repeats:
                        raise
            async with _in_time(began):
                try:
                    answer = await self.client.evalsha(*called)
                except NoScriptError:
                    answer = await self.client.eval(script_text(name), *called[1:])
            if self._kept is not None:
                self._kept.trust()
            return answer

    async def _on_kept(self, kept: KeptConnection, name: str, called: Sequence[Any]) -> Any:
        try:
            return await kept.call("EVALSHA", *called)
        except NoScriptError:
            return await kept.call("EVAL", script_text(name), *called[1:])

    async def bounded(self, call: Awaitable[Any], name: str = "command") -> Any:
        """Any other command, under the same bound; it is counted under the name."""
        with self._stats.timed(name):
            async with _in_time(time.monotonic()):
                return await call


@asynccontextmanager
async def _in_time(began: float) -> AsyncGenerator[None]:
    left = began + CALL_S - time.monotonic()
    try:
        # A send that ends as it is cancelled goes on (asyncio.wait_for before Python 3.12), and the
        # call would take all its time anew. Calls that wait for their turn make that likely: many
        # end at one moment, and let go of connections.
        async with asyncio.timeout(left + AGAIN_S), asyncio.timeout(left):
            yield
    except TimeoutError:
        raise RedisTimeoutError(f"Redis did not answer in {CALL_S:g} s") from None
