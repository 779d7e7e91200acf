"""Takes a request into the fleet: everything is checked before anything is stored."""

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from millstream.api.auth.caller import Caller
from millstream.api.directory import Directory
from millstream.api.feed import Feed
from millstream.api.limiter import Limiter
from millstream.api.rate_headers import rate_headers
from millstream.api.relay import unavailable
from millstream.api.traced import current_trace
from millstream.api.withdrawals import Withdrawals
from millstream.shared.connection import RedisError
from millstream.shared.content_filter import ContentFilter, refused_prompt
from millstream.shared.errors import (
    IdempotencyConflict,
    InvalidRequest,
    NotAllowed,
    QueueFull,
    RateLimited,
)
from millstream.shared.keys import Keys
from millstream.shared.limits import Admitted, Standing
from millstream.shared.param_names import length_param, prompt_param
from millstream.shared.schemas import TaskRequest, encode_request, new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import Priority
from millstream.shared.steps import Refused, Submitted

MAX_IDEMPOTENCY_KEY = 255
# How long a task may run unheard before its pod counts as dead; a pod that lost its subscription is
# back in a fraction of it.
ORPHAN_S = 15.0
AWAY_S = 2.0  # how long the other shards get a shard's turns after it did not answer


class Accepted(msgspec.Struct, frozen=True):
    """Tasks that are in the queue, or that an idempotency key had made before: one a choice."""

    task_ids: tuple[str, ...]
    model: str
    known: bool
    position: int
    eta_s: float | None
    attached: bool
    """The answer belongs to the connection that asked for it."""
    created: int = 0
    """Unix time; of a known answer, when it was asked for first. 0: it was read by its id."""
    requests: tuple[TaskRequest, ...] = ()
    """What is to be generated, one a task, as it was stored; of a known answer, as it was asked."""
    standing: Standing | None = None
    """How the caller stands with its limits, this answer included."""

    @property
    def headers(self) -> dict[str, str]:
        """What every answer to the request says in its head."""
        return {"x-task-id": self.task_id, **rate_headers(self.standing or Standing())}

    @property
    def task_id(self) -> str:
        """The first of them."""
        return self.task_ids[0]


class Admission:
    """The one way into the queue."""

    def __init__(
        self,
        scripts: Scripts,
        withdrawals: Withdrawals,
        directory: Directory,
        limiter: Limiter,
        settings: Settings,
        *,
        feed: Feed,
        input_filter: ContentFilter | None,
    ) -> None:
        self._scripts = scripts
        self._feed = feed
        self._withdrawals = withdrawals
        self._directory = directory
        self._limiter = limiter
        self._settings = settings
        self._filter = input_filter
        self._turn = 0
        self.accepted: Counter[tuple[str, str]] = Counter()
        """Tasks that this pod has made, by model and class."""
        self._away_until: dict[int, float] = {}

    async def submit(
        self,
        *requests: TaskRequest,
        caller: Caller,
        idempotency_key: str | None = None,
        route: str = "",
        body: bytes = b"",
        attached: bool = False,
        follow: bool = False,
        priority: Priority | None = None,
        deadline_s: float | None = None,
    ) -> Accepted:
        """Check and store the tasks of one answer, all or none.

        Args:
            requests: What to generate, one a choice, of one model; its name is empty where the
                caller named none, which will do while the fleet serves just one.
            caller: Whose tasks they are; one that may not use the model is told there is none.
            idempotency_key: Makes it safe to send the same body again.
            route: Where it came to, compared as the body is: it says what a body means.
            body: The body as it came, compared when the key comes again.
            attached: The answer belongs to the connection: it is not decoded for nobody.
            follow: The tasks' events are read here at once.
            priority: Its class; None is the first that the caller may use.
            deadline_s: When it is to end at the latest, from now, but for a limit that is shorter.

        Raises:
            InvalidRequest: a value is out of bounds, or the model is unknown.
            QueueFull: as many wait as may.
            NoWorker: nobody has joined the fleet yet.
            RedisUnavailable: Redis does not answer; no task comes of it, unless there is a key by
                which to find it.
            IdempotencyConflict: the key stands for another body, or route.
            RateLimited: the caller has used what it may.
            NotAllowed: the caller may not use the class.
        """
        trace = current_trace()
        traceparent = trace.submitting() if trace else ""
        self._check(requests)
        await self._check_content(requests)
        chosen = _class_of(caller, priority)
        bounded = self._limiter.bounded(caller, requests)
        if idempotency_key is not None and not (
            0 < len(idempotency_key) <= MAX_IDEMPOTENCY_KEY and idempotency_key.isprintable()
        ):
            raise InvalidRequest(
                f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_KEY} printable characters.",
                param="Idempotency-Key",
            )
        try:
            name = await self._directory.resolve(requests[0].model or None, allowed=caller.models)
            _check_ids(requests, self._directory.vocabulary_of(name))
            named = [
                msgspec.structs.replace(request, model=name, traceparent=traceparent)
                for request in bounded
            ]
            admitted = None
            if not await self._known(caller, idempotency_key):
                admitted = await self._limiter.admit(caller, requests)
            answer = await self._submit(
                name,
                caller,
                named,
                idempotency_key,
                f"{route}\0".encode() + body,
                admitted=admitted,
                attached=attached,
                follow=follow,
                priority=chosen,
                deadline_s=deadline_s,
            )
            if admitted and (answer.known if isinstance(answer, Submitted) else True):
                await self._limiter.give_back(caller, admitted)
        except RedisError as error:
            raise unavailable(error) from error
        if isinstance(answer, Submitted):
            if trace:
                trace.accepted(named, answer.task_ids)
            if not answer.known:
                self.accepted[name, chosen] += len(requests)
            return Accepted(
                answer.task_ids,
                name,
                answer.known,
                answer.position,
                answer.eta_s,
                attached,
                answer.created_ms // 1000,
                tuple(named),
                admitted.standing if admitted else None,
            )
        if answer.conflict:
            raise IdempotencyConflict(
                "This Idempotency-Key was used with another body, or on another path.",
                param="Idempotency-Key",
            )
        if answer.crowded:
            most = self._limiter.limits_of(caller).waiting_tasks
            raise RateLimited(
                f"Rate limit reached: {most} tasks wait, as many as may.",
                retry_after_s=math.ceil(answer.retry_after_s),
            )
        raise QueueFull(
            f"The queue of {name} is full.",
            retry_after_s=math.ceil(answer.retry_after_s),
        )

    async def _submit(
        self,
        model: str,
        caller: Caller,
        requests: Sequence[TaskRequest],
        key: str | None,
        compared: bytes,
        *,
        admitted: Admitted | None,
        attached: bool,
        follow: bool,
        priority: Priority,
        deadline_s: float | None,
    ) -> Submitted | Refused:
        settings = self._settings
        bodies = [encode_request(request) for request in requests]
        task = {
            "model": model,
            "caller": caller.id,
            "weight": caller.weight,
            "live_ttl_s": settings.live_ttl_s,
            "idempotency_key": key,
            "body_hash": hashlib.blake2b(compared, digest_size=16).hexdigest() if key else "",
            "orphan_s": ORPHAN_S + settings.disconnect_grace_s if attached else 0,
            "life_s": min(self._limiter.life_s(caller), deadline_s or math.inf),
            "priority": priority,
            "admitted_ms": admitted.at_ms if admitted else None,
            "reserved": admitted.reserved if admitted else (),
        }
        *others, last = self._shards(caller.id, key)
        for shard in others:
            room = self._limiter.max_waiting(caller, shard=shard)
            answer = await self._try(
                shard, bodies, follow=follow, **task, max_waiting=room, promise=False
            )
            if isinstance(answer, Submitted) or answer.conflict:
                return answer
        room = self._limiter.max_waiting(caller, shard=last)
        return await self._try(last, bodies, follow=follow, **task, max_waiting=room)

    def _shard_of(self, caller: str, key: str) -> int:
        """Where an idempotency key lies: the same key must meet itself."""
        digest = hashlib.blake2b(f"{caller}\0{key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) % self._settings.shards

    async def _known(self, caller: Caller, key: str | None) -> bool:
        """Whether a request is one that was made before: then it does not count again."""
        if key is None or not self._limiter.counts(caller):
            return False
        shard = Keys(self._shard_of(caller.id, key))
        return await self._scripts.knows(shard, caller=caller.id, idempotency_key=key)

    def _shards(self, caller: str, key: str | None) -> list[int]:
        """Where to try, in this order."""
        if key is not None:
            return [self._shard_of(caller, key)]
        count = self._settings.shards
        self._turn += 1  # in turn: their queues stay level; and where one is full, the next
        now = time.monotonic()
        turn = [(self._turn + at) % count for at in range(count)]
        return [shard for shard in turn if self._away_until.get(shard, 0) <= now] or turn

    async def _try(
        self, shard: int, bodies: Sequence[bytes], *, follow: bool, **task: Any
    ) -> Submitted | Refused:
        """Submit to a shard; one whose node is away is left out of the turns for a while."""
        most, count = self._settings.max_queue, self._settings.shards
        task_ids = [new_task_id(shard) for _ in bodies]
        try:
            answer = await self._scripts.submit(
                Keys(shard),
                task_id=task_ids[0],
                request=bodies[0],
                more=[*zip(task_ids[1:], bodies[1:], strict=True)],
                max_queue=most // count + (shard < most % count),
                pod=self._feed.expect(task_ids) if follow else "",
                **task,
            )
        except RedisError:
            self._away_until[shard] = time.monotonic() + AWAY_S
            if task["idempotency_key"] is None:  # else who sends it again finds it
                self._withdrawals.add(task_ids, task["caller"])
            raise
        if not isinstance(answer, Submitted) or answer.known:
            self._feed.dismiss(task_ids)
        return answer

    def _check(self, requests: Sequence[TaskRequest]) -> None:
        settings = self._settings
        first = requests[0]
        size = first.prompt_chars
        if len(requests) > 1:  # of those that are alike, one
            different = {
                (request.messages, request.prompt, request.prompt_ids): request
                for request in requests
            }
            size = sum(request.prompt_chars for request in different.values())
        if size > settings.max_prompt_chars:
            raise InvalidRequest(
                f"The prompt has {size} characters; {settings.max_prompt_chars} are the most.",
                param=prompt_param(first),
                code="prompt_too_long",
            )
        asked = first.sampling.max_tokens
        if asked is not None and asked > settings.max_tokens_limit:
            raise InvalidRequest(
                f"At most {settings.max_tokens_limit} tokens may be asked for.",
                param=length_param(first),
            )
        room = max(1, -(-settings.max_queue // settings.shards))  # where there is the most
        if len(requests) > room:
            raise InvalidRequest(
                f"{len(requests)} choices are asked for; {room} may wait at once.", param="n"
            )

    async def _check_content(self, requests: Sequence[TaskRequest]) -> None:
        if self._filter is None:
            return
        texts = {text for request in requests for text in request.texts}
        for text in texts:  # in a thread, which lets go of the interpreter while it looks
            if not await asyncio.to_thread(self._filter.allows, text):
                raise refused_prompt(prompt_param(requests[0]))


def _check_ids(requests: Sequence[TaskRequest], vocabulary: int) -> None:
    """Refuse token ids that the model has not, if its vocabulary is known; else its worker does."""
    if not vocabulary:
        return
    for request in requests:
        for param, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", request.sampling.logit_bias),
        ):
            if max(ids, default=0) >= vocabulary:
                raise InvalidRequest(f"Token ids must be from 0 to {vocabulary - 1}.", param=param)


def _class_of(caller: Caller, asked: Priority | None) -> Priority:
    allowed = [priority for priority in Priority if priority in caller.priorities]
    if asked is None and allowed:
        return allowed[0]
    if asked is None or asked not in allowed:
        raise NotAllowed(f"This key may not use the class {asked or 'it asks'}.", param="priority")
    return asked
