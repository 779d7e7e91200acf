"""What a worker is told: bells, stops, drains, tasks. All hints: Redis holds what was missed."""

import asyncio
from collections.abc import Callable, Sequence

from millstream.shared.drains import DRAIN
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.steps import Claim
from millstream.shared.subscription import Subscription
from millstream.worker.stopped import Stop

PROVE_S = 5.0
"""Between two looks at whether we still hear. What is missed meanwhile is found by polling."""


async def prove(controls: Sequence[Subscription], scripts: Scripts) -> None:
    """Have all of them made anew where they are deaf, for ever; cancel to end."""
    while True:
        await asyncio.sleep(PROVE_S)
        await asyncio.gather(*(control.prove(scripts.publish) for control in controls))


def control_subscription(
    redis_url: str,
    shard: int,
    *,
    worker_id: str,
    on_open: Callable[[int], None],
    on_bell: Callable[[int, bool], None],
    on_task: Callable[[int, Claim], None],
    on_stop: Callable[[Stop], None],
    on_drain: Callable[[], None],
) -> Subscription:
    """What a worker listens on, for one shard.

    Args:
        redis_url: Where Redis is.
        shard: Of what shard.
        worker_id: Whose channel.
        on_open: Called with the shard after each (re)connection: what was sent meanwhile was lost.
        on_bell: Called with the shard when it may have work; True when it may be another worker's.
        on_task: Called with the shard and a task that was started for us.
        on_stop: Called with a task that has been stopped.
        on_drain: Called when the worker is to go.
    """

    def on_message(payload: bytes) -> None:
        word, *rest = payload.decode().split(" ", 4)
        if word == "stop":
            task_id, attempt, seq, data = [*rest, "0", ""][:4]
            on_stop(Stop(task_id, int(attempt), int(seq), data))
        elif word == DRAIN:
            on_drain()
        else:
            on_bell(shard, word == "released")

    keys = Keys(shard)
    return Subscription(
        redis_url,
        keys.control(worker_id),
        on_open=lambda: on_open(shard),
        on_message=on_message,
        more={keys.run(worker_id): lambda payload: on_task(shard, Claim.sent(payload))},
    )
