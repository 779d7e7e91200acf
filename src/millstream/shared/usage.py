"""What callers used: counted by the script that ends a task, read by day."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta

import msgspec

from millstream.shared.keys import Keys
from millstream.shared.schemas import Usage
from millstream.shared.script_runner import ScriptRunner

KEPT_DAYS = 40
"""For how long a day's usage can be read; `USAGE_TTL_S` in lua/lib.lua."""
_EPOCH = date(1970, 1, 1)
_AT_ONCE = 8  # calls; half the connections of a pod


class DayOfUsage(msgspec.Struct, frozen=True, order=True):
    """What one caller used of one model on one day (UTC) in which tasks of it ended."""

    day: date
    caller: str
    model: str
    tasks: int
    """Those that ended, however they did."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> Usage:
        """The tokens of all those tasks."""
        return Usage(self.prompt_tokens, self.completion_tokens)


async def read_usage(
    runner: ScriptRunner, *, shards: int, first: date, last: date, caller: str | None
) -> Sequence[DayOfUsage]:
    """What a caller (None: each) used from one day to another, both included; in order.

    Raises:
        RedisError: Redis does not answer, or one of its nodes does not: no sum without a part.
    """
    places = [
        (first + timedelta(days=n), Keys(shard))
        for n in range((last - first).days + 1)
        for shard in range(shards)
    ]
    counts: Counter[tuple[date, str, str, str]] = Counter()

    async def read(day: date, shard: Keys) -> None:
        number = (day - _EPOCH).days
        answer = await runner.run("usage", [shard.callers(number)], [number, caller or ""])
        for who, fields in zip(answer[::2], answer[1::2], strict=True):
            for name, count in zip(fields[::2], fields[1::2], strict=True):
                what, _, model = name.decode().partition(" ")
                counts[day, who.decode(), model, what] += int(count)

    for batch in range(0, len(places), _AT_ONCE):
        await asyncio.gather(*(read(*place) for place in places[batch : batch + _AT_ONCE]))
    return sorted(
        DayOfUsage(
            day,
            who,
            model,
            count,
            counts[day, who, model, "prompt_tokens"],
            counts[day, who, model, "completion_tokens"],
        )
        for (day, who, model, what), count in counts.items()
        if what == "tasks"
    )
