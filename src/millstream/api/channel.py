"""A pod's subscription on one shard: the proof that it works, and what is due after it did not."""

import asyncio
import logging
import time
from collections.abc import Callable

from millstream.api.shown import Shown
from millstream.shared.connection import RedisError
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.subscription import Subscription

logger = logging.getLogger(__name__)

# A subscription that has not heard our own pulse for so long is dead, whatever TCP thinks.
PULSE_LOST_S = 4.0
PUT_BACK_PAUSE_S = 0.2
_PULSE = b"pulse"


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
        self._name = Keys(shard).pod(pod_id)
        self._shard = shard
        self._subscription = Subscription(
            redis_url, self._name, on_open=self._opened, on_message=self._heard
        )
        self._scripts = scripts
        self._shown = shown
        self._on_open = on_open
        self._on_ready = on_ready
        self._on_events = on_events
        self._on_rewound = on_rewound
        self._reopened = asyncio.Event()
        self._session = 0
        self._checked = 0
        self._heard_at = 0.0
        self._unheard_since: float | None = None
        """When the first pulse was sent that has not come back."""

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
        self._unheard_since = None
        self._on_open()
        self._session += 1
        self._reopened.set()

    def _heard(self, payload: bytes) -> None:
        self._heard_at, self._unheard_since = time.monotonic(), None
        if payload == _PULSE:
            # A Redis that takes messages may refuse writes still: until then all of it is kept.
            if self._checked == self._session:
                self._shown.forget_old(self._shard)
        else:
            self._on_events(payload)

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
        """Send a pulse, and connect again where it would not be, or has not been, heard.

        Nobody is subscribed on the server that takes it, though our subscription is open: after a
        failover ours is with the old primary, which may well pass on what it hears.
        """
        was_open = self._subscription.open
        sent_at = time.monotonic()
        try:
            listeners = await self._scripts.publish(self._name, _PULSE)
        except RedisError:
            return  # Redis is away; the subscription will notice as well
        if listeners > 0 and self._heard_at < sent_at and self._unheard_since is None:
            self._unheard_since = sent_at
        silent = self._unheard_since is not None and sent_at - self._unheard_since > PULSE_LOST_S
        if silent or (listeners == 0 and was_open and self._subscription.open):
            logger.warning("the subscription is deaf; connecting again")
            self._unheard_since = None
            await self._subscription.drop()
