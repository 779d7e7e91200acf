"""A pod's subscription on one shard: the proof that it works, and what is due after it did not."""

import asyncio
import logging
from collections.abc import Callable

from millstream.api.shown import Shown
from millstream.shared.connection import RedisError
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.subscription import Subscription

logger = logging.getLogger(__name__)

PUT_BACK_PAUSE_S = 0.2


class Channel:
    """What one shard's workers publish for this pod.

    Args:
        redis_url: Where Redis is.
        scripts: The atomic steps.
        shown: What readers were given lately.
        shard: The shard.
        pod_id: Whose channel.
        on_open: Called after each (re)connection: what was published meanwhile was not heard.
        on_ready: Called when logs may be read again after it.
        on_events: Called with each pod message.
        on_rewound: Called with tasks whose logs have gone on otherwise than readers were told.
    """

    def __init__(
        self,
        redis_url: str,
        scripts: Scripts,
        shown: Shown,
        *,
        shard: int,
        pod_id: str,
        on_open: Callable[[], None],
        on_ready: Callable[[], None],
        on_events: Callable[[bytes], None],
        on_rewound: Callable[[list[str]], None],
    ) -> None:
        self._shard = shard
        self._subscription = Subscription(
            redis_url,
            Keys(shard).pod(pod_id),
            on_open=self._opened,
            on_message=on_events,
            on_pulse=self._pulse,
        )
        self._scripts = scripts
        self._shown = shown
        self._on_open = on_open
        self._on_ready = on_ready
        self._on_rewound = on_rewound
        self._reopened = asyncio.Event()
        self._session = 0
        self._checked = 0

    @property
    def session(self) -> int | None:
        """Which unbroken connection logs may be read in; None until they have been compared.

        After a loss of the connection Redis may hold another text than the one readers are in the
        middle of. So nothing is read to them until what was shown has been put back.
        """
        if self._subscription.open and self._checked == self._session:
            return self._session
        return None

    @property
    def reconnects(self) -> int:
        """How often the subscription was lost and made again."""
        return max(0, self._subscription.opened - 1)

    async def run(self) -> None:
        """Listen for the pod's whole life."""
        await asyncio.gather(self._subscription.run(), self._put_back())

    def _opened(self) -> None:
        self._on_open()
        self._session += 1
        self._reopened.set()

    def _pulse(self) -> None:
        # A Redis that takes messages may refuse writes still: until then all of it is kept.
        if self._checked == self._session:
            self._shown.forget_old(self._shard)

    async def _put_back(self) -> None:
        """After each loss of the connection see that the logs hold what was shown of them."""
        session = 0
        done: set[str] = set()
        while True:
            await self._reopened.wait()
            self._reopened.clear()
            if session != self._session:  # what was put back may be lost again
                session = self._session
                done.clear()
            try:
                changed, waiting = await self._shown.put_back(self._shard, done=done)
            except RedisError as error:
                logger.debug("put back: %s", error)
                self._reopened.set()
                await asyncio.sleep(PUT_BACK_PAUSE_S)
                continue
            self._on_rewound(changed)
            done.update(changed)
            if self._checked != session:
                self._checked = session
                self._on_ready()
            if waiting:
                self._reopened.set()
                await asyncio.sleep(PUT_BACK_PAUSE_S)

    async def prove(self) -> None:
        """Send a pulse, and connect again where it is not heard."""
        await self._subscription.prove(self._scripts.publish)
