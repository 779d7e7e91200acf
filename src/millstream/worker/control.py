"""The worker's control channel: bells and stops, both hints; polls and appends catch the rest."""

from collections.abc import Callable

from millstream.shared.keys import Keys
from millstream.shared.subscription import Subscription


def control_subscription(
    redis_url: str,
    shard: int,
    *,
    worker_id: str,
    on_bell: Callable[[bool], None],
    on_stop: Callable[[str, int], None],
) -> Subscription:
    """What a worker listens on, for one shard.

    Args:
        redis_url: Where Redis is.
        shard: Of what shard.
        worker_id: Whose channel.
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
        Keys(shard).control(worker_id),
        on_open=lambda: on_bell(True),  # for what was rung while nobody listened
        on_message=on_message,
    )
