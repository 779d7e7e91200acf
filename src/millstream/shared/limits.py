"""What callers have asked for of late: typed callers of the scripts that hold the limits.

All state of a caller lies in its home shard, so each look and what follows from it is one step.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
from redis.exceptions import RedisError

from millstream.shared.keys import Keys, home_shard
from millstream.shared.script_runner import ScriptRunner

WINDOW_S = 60.0
_SETTLE_S = 0.5  # what another shard may take to tell; until it does, its tasks' reserves hold


class Window(msgspec.Struct, frozen=True):
    """How a caller stands with one limit."""

    limit: int
    used: int
    reset_s: float
    """Until nothing is used any more, if nothing more is asked for."""

    @property
    def remaining(self) -> int:
        """What may be asked for now; 0 also where more was used than was to be."""
        return max(0, self.limit - self.used)


class Standing(msgspec.Struct, frozen=True):
    """How a caller stands with the limits of a minute that it has."""

    requests: Window | None = None
    tokens: Window | None = None


class Admitted(msgspec.Struct, frozen=True):
    """A request that counts, until it is given back or its minute is over."""

    id: str
    reserved: tuple[str, ...]
    """For each task what is settled at its end; empty: no tokens were reserved."""
    at_ms: int
    standing: Standing


class Exceeded(msgspec.Struct, frozen=True):
    """A request beyond a limit: it does not count."""

    limit: Literal["requests", "tokens"]
    retry_after_s: float
    standing: Standing


class LimitStore:
    """The limits' state, for all pods.

    Every call raises a `RedisError` where Redis is away.
    """

    def __init__(self, runner: ScriptRunner, *, shards: int, lease_s: float) -> None:
        self._runner = runner
        self._shards = shards
        self._lease_ms = int(lease_s * 1000)

    def _home(self, caller: str) -> Keys:
        return Keys(home_shard(caller, self._shards))

    async def admit(
        self,
        caller: str,
        *,
        request_id: str,
        requests_per_min: int,
        tokens_per_min: int,
        prompts: Sequence[int],
        max_tokens: int | None,
        window_s: float = WINDOW_S,
    ) -> Admitted | Exceeded:
        """Count a request and reserve its tokens, unless it goes beyond a limit (0: there is none).

        `prompts` are the tokens to read of each of its tasks. Without `max_tokens` an answer is
        taken to be as long as the caller's are.
        """
        home = self._home(caller)
        settled = await self._ended_elsewhere(caller, home) if tokens_per_min else {}
        answer = await self._runner.run(
            "admit",
            [
                home.requests(caller),
                home.tokens(caller),
                home.balance(caller),
                home.ended(caller),
            ],
            [
                request_id,
                requests_per_min,
                tokens_per_min,
                int(window_s * 1000),
                " ".join(map(str, prompts)),
                max_tokens or 0,
                *(part for told in settled.values() for pair in told for part in pair),
            ],
        )
        await self._forget(caller, settled)
        verdict, retry_ms, at_ms, reserved, requests, requests_ms, tokens, tokens_ms = answer
        standing = Standing(
            Window(requests_per_min, requests, requests_ms / 1000) if requests_per_min else None,
            Window(tokens_per_min, tokens, tokens_ms / 1000) if tokens_per_min else None,
        )
        match verdict:
            case b"admitted":
                return Admitted(request_id, tuple(reserved.decode().split()), at_ms, standing)
            case b"requests":
                return Exceeded("requests", retry_ms / 1000, standing)
            case _:
                return Exceeded("tokens", retry_ms / 1000, standing)

    async def _ended_elsewhere(
        self, caller: str, home: Keys
    ) -> dict[Keys, Sequence[tuple[bytes, bytes]]]:
        """Reserve and use of the tasks that ended on other shards; those that do not tell wait."""
        others = [Keys(shard) for shard in range(self._shards) if shard != home.shard]

        async def read(shard: Keys) -> Sequence[tuple[bytes, bytes]]:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    told = await self._runner.client.hgetall(shard.ended(caller))
            except (RedisError, TimeoutError):
                return ()
            return tuple(told.items())

        answers = await asyncio.gather(*map(read, others))
        return {shard: told for shard, told in zip(others, answers, strict=True) if told}

    async def _forget(
        self, caller: str, settled: dict[Keys, Sequence[tuple[bytes, bytes]]]
    ) -> None:
        """What is settled need not be told again; if it is, it changes nothing."""

        async def forget(shard: Keys, told: Sequence[tuple[bytes, bytes]]) -> None:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    await self._runner.client.hdel(shard.ended(caller), *(key for key, _ in told))
            except (RedisError, TimeoutError):
                return

        await asyncio.gather(*(forget(*pair) for pair in settled.items()))

    async def give_back(self, caller: str, admitted: Admitted) -> None:
        """Forget a request that made no task."""
        home = self._home(caller)
        names = [home.requests(caller), home.tokens(caller), home.balance(caller)]
        await self._runner.run("give_back", names, [admitted.id, *admitted.reserved])

    async def open_stream(self, caller: str, stream_id: str, *, most: int) -> bool:
        """Count a stream as open for a lease; False: as many are open as may."""
        return await self._lease(caller, most, [stream_id])

    async def keep_streams(self, caller: str, stream_ids: Sequence[str]) -> None:
        """Streams that are open go on counting as such."""
        await self._lease(caller, 0, stream_ids)

    async def _lease(self, caller: str, most: int, stream_ids: Sequence[str]) -> bool:
        key = self._home(caller).streams(caller)
        args = [most, self._lease_ms, *stream_ids]
        return await self._runner.run("lease_streams", [key], args) == 1

    async def close_stream(self, caller: str, stream_id: str) -> None:
        """A stream is open no more."""
        key = self._home(caller).streams(caller)
        await self._runner.bounded(self._runner.client.zrem(key, stream_id))
