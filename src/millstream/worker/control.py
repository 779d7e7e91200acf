"""The worker's control channel: bells and stops, both hints; polls and appends catch the rest."""

from collections.abc import Callable

from millstream.shared.keys import Keys
from millstream.shared.subscription import Subscription


def control_subscription(
    redis_url: str,
    *,
    worker_id: str,
    shards: int,
    on_bell: Callable[[bool], None],
    on_stop: Callable[[str, int], None],
) -> Subscription:
    """What a worker listens on.

    Args:
        redis_url: Where Redis is.
        worker_id: Whose channel.
        shards: How many shards the fleet has.
        on_bell: Called when there may be work; True when it may be another worker's.
        on_stop: Called with task id and attempt of a task that has been stopped.
    """

    def on_message(payload: bytes) -> None:
        word, *rest = payload.decode().split(" ")
        if word == "stop":
            on_stop(rest[0], int(rest[1]))
        else:
            on_bell(word == "released")

    return Subscription(
        redis_url,
        [Keys(shard).control(worker_id) for shard in range(shards)],
        on_open=lambda: on_bell(True),  # for what was rung while nobody listened
        on_message=on_message,
    )
