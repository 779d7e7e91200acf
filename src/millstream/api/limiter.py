"""How much a caller may use: what is asked before a task is made, and told with its answer."""

import logging
import math
import secrets
from collections.abc import Sequence
from functools import lru_cache, partial

import msgspec

from millstream.api.auth.caller import Caller, CallerLimits
from millstream.shared.connection import RedisError
from millstream.shared.errors import InvalidRequest, RateLimited
from millstream.shared.limits import Admitted, LimitStore
from millstream.shared.param_names import length_param, prompt_param
from millstream.shared.schemas import TaskRequest
from millstream.shared.settings import Settings

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 4  # of English text; what it was is settled at the task's end


class Limits(msgspec.Struct, frozen=True):
    """A caller's limits; 0: none."""

    requests_per_min: int
    tokens_per_min: int
    concurrent_streams: int
    tokens_per_stream: int
    waiting_tasks: int
    minutes_per_stream: int


def limits_of(own: CallerLimits, settings: Settings) -> Limits:
    """A caller's own limits, and the settings' where it has none of its own."""

    def of(name: str) -> int:
        limit: int | None = getattr(own, name)
        return getattr(settings, f"rate_limit_{name}") if limit is None else limit

    return Limits(**{name: of(name) for name in Limits.__struct_fields__})


class Limiter:
    """Asks the store before a task is made; who has no limit costs no call."""

    def __init__(self, store: LimitStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        # Each request asks half a dozen times.
        self._limits_of = lru_cache(1024)(partial(limits_of, settings=settings))

    def limits_of(self, caller: Caller) -> Limits:
        """What the caller may use."""
        return self._limits_of(caller.limits)

    def counts(self, caller: Caller) -> bool:
        """Whether the caller's requests or tokens are counted."""
        limits = self.limits_of(caller)
        return bool(limits.requests_per_min or limits.tokens_per_min)

    def bounded(self, caller: Caller, requests: Sequence[TaskRequest]) -> Sequence[TaskRequest]:
        """The requests, with no answer longer than the caller's may be.

        Raises:
            InvalidRequest: a longer one is asked for, or more choices than may ever wait.
        """
        room = self.max_waiting(caller, shard=0)  # where there is the most
        if room is not None and len(requests) > room:
            raise InvalidRequest(
                f"{len(requests)} choices are asked for; {room} may wait with this key.", param="n"
            )
        most = self.limits_of(caller).tokens_per_stream
        if not most:
            return requests
        if any((request.sampling.max_tokens or 0) > most for request in requests):
            raise InvalidRequest(
                f"At most {most} tokens may be asked for with this key.",
                param=length_param(requests[0]),
            )
        return [_no_longer_than(most, request) for request in requests]

    def max_waiting(self, caller: Caller, *, shard: int) -> int | None:
        """How many of its tasks may wait for a model on a shard: its part of the limit, but one."""
        limit, shards = self.limits_of(caller).waiting_tasks, self._settings.shards
        return max(1, limit // shards + (shard < limit % shards)) if limit else None

    def life_s(self, caller: Caller) -> float:
        """How long its tasks may take from submit to end."""
        minutes = self.limits_of(caller).minutes_per_stream
        most = self._settings.max_task_s
        return min(most, 60 * minutes) if minutes else most

    async def admit(self, caller: Caller, requests: Sequence[TaskRequest]) -> Admitted | None:
        """Count a request for an answer, and reserve its tokens; None: nothing is counted.

        Raises:
            RateLimited: it would go beyond a limit; then it does not count.
            InvalidRequest: it alone asks for more tokens than the caller may use in a minute.
            RedisError: Redis does not answer: nobody is let in unseen.
        """
        if not self.counts(caller):
            return None
        limits = self.limits_of(caller)
        prompts = [math.ceil(request.prompt_chars / CHARS_PER_TOKEN) for request in requests]
        first = requests[0]
        _refuse_what_never_fits(prompts, first, limits.tokens_per_min)
        answer = await self._store.admit(
            caller.id,
            request_id=secrets.token_hex(8),
            requests_per_min=limits.requests_per_min,
            tokens_per_min=limits.tokens_per_min,
            prompts=prompts,
            max_tokens=first.sampling.max_tokens,
        )
        if isinstance(answer, Admitted):
            return answer
        retry = max(1, math.ceil(answer.retry_after_s))
        raise RateLimited(
            f"Rate limit reached: {getattr(limits, f'{answer.limit}_per_min')} {answer.limit} per "
            f"minute. Please try again in {retry} s.",
            retry_after_s=retry,
            limit=answer.limit,
            standing=answer.standing,
        )

    async def give_back(self, caller: Caller, admitted: Admitted) -> None:
        """A request that was admitted made no task; should Redis not hear of it, it lapses."""
        try:
            await self._store.give_back(caller.id, admitted)
        except RedisError as error:
            logger.debug("request of %s: %s", caller.id, error)


def _no_longer_than(most: int, request: TaskRequest) -> TaskRequest:
    if request.sampling.max_tokens is not None:
        return request
    sampling = msgspec.structs.replace(request.sampling, max_tokens=most)
    return msgspec.structs.replace(request, sampling=sampling)


def _refuse_what_never_fits(prompts: Sequence[int], first: TaskRequest, limit: int) -> None:
    answers = len(prompts) * (first.sampling.max_tokens or 1)
    if limit and sum(prompts) + answers > limit:
        raise InvalidRequest(
            f"About {sum(prompts)} tokens to read and {answers} to make are more than the {limit} "
            "that may be used in a minute with this key.",
            param=length_param(first) if sum(prompts) < limit else prompt_param(first),
        )
