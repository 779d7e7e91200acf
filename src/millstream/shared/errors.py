"""What can go wrong, without any HTTP in it.

MillstreamError
├── InvalidRequest          the caller must change something
│   ├── NotAuthenticated    no key, or one that is not taken
│   ├── NotAllowed          this caller may not
│   ├── UnknownModel
│   ├── UnknownTask         unknown or another caller's: never told apart
│   ├── ExpiredTask
│   ├── UnknownWorker
│   ├── EventOutOfRange
│   ├── IdempotencyConflict
│   └── RequestTooLarge
├── RateLimited             the caller has used what it may: `retry_after_s` says until when
├── FleetUnavailable        try again later: `retry_after_s` says when
│   ├── QueueFull
│   ├── NoWorker
│   ├── RedisUnavailable
│   └── KeysUnavailable     whoever signs the callers' tokens does not show its keys
├── LogRewound              Redis lost events of the task that a reader has seen
├── LogIncomplete           events that a reader asks for are missing from the task's log
├── TaskFailed              an accepted task ended in `failed`
└── SettingsError           this process is set up wrongly; the text says what to do
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # it comes with redis, which `millstream --help` can do without
    from millstream.shared.limits import Standing


class MillstreamError(Exception):
    """The root of every error Millstream raises on purpose.

    Args:
        message: One sentence for the person who has to act on it.
        code: A stable word for programs.
    """

    default_code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code


class InvalidRequest(MillstreamError):
    """The request cannot be served as it is; `param` names the field at fault."""

    default_code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class NotAuthenticated(InvalidRequest):
    """No key was given, or one that is not taken; the text never repeats any of it."""

    default_code = "invalid_api_key"

    def __init__(self, message: str, *, given: bool = True, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.given = given
        """Whether there was a key at all."""


class NotAllowed(InvalidRequest):
    """The caller is known and may not do this."""

    default_code = "not_allowed"


class UnknownModel(InvalidRequest):
    """No worker serves, or served lately, a model of this name."""

    default_code = "model_not_found"


class UnknownTask(InvalidRequest):
    """There is no such task, or it is not this caller's."""

    default_code = "task_not_found"


class ExpiredTask(InvalidRequest):
    """The task ended and its log was deleted after its time to live."""

    default_code = "task_expired"


class LostTask(MillstreamError):
    """The store has no more the task of an answer that is being given."""

    default_code = "task_lost"


class UnknownWorker(InvalidRequest):
    """No worker of this id lives."""

    default_code = "worker_not_found"


class EventOutOfRange(InvalidRequest):
    """The event number asked for is malformed or ahead of the log."""

    default_code = "invalid_event_id"


class IdempotencyConflict(InvalidRequest):
    """The idempotency key was used before with another body, or on another route."""

    default_code = "idempotency_key_reused"


class RequestTooLarge(InvalidRequest):
    """The request body is larger than this server takes."""

    default_code = "request_too_large"


class RateLimited(MillstreamError):
    """The caller has used what it may; try again in `retry_after_s` whole seconds (>= 1).

    `limit` is what was used up, in OpenAI's words, and `standing` how the caller stands.
    """

    default_code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int = 1,
        limit: Literal["requests", "tokens"] = "requests",
        standing: "Standing | None" = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, retry_after_s)
        self.limit = limit
        self.standing = standing


class FleetUnavailable(MillstreamError):
    """The fleet cannot take this now; try again in `retry_after_s` whole seconds (>= 1)."""

    default_code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 1, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = max(1, retry_after_s)


class QueueFull(FleetUnavailable):
    """As many tasks wait for the model as may wait."""

    default_code = "queue_full"


class NoWorker(FleetUnavailable):
    """No worker has joined the fleet yet, so nothing says what it will serve."""

    default_code = "no_worker"


class RedisUnavailable(FleetUnavailable):
    """Redis is away, out of memory, or not answering in time."""

    default_code = "redis_unavailable"


class KeysUnavailable(FleetUnavailable):
    """The keys by which tokens are checked cannot be had now, so nobody can be told apart."""

    default_code = "keys_unavailable"


class LogRewound(MillstreamError):
    """Redis came back without events that were shown, and they cannot be had again."""

    default_code = "log_rewound"


class LogIncomplete(MillstreamError):
    """Events are missing from the midst of a task's log, and nobody can put them back."""

    default_code = "log_incomplete"


class TaskFailed(MillstreamError):
    """An accepted task ended in `failed`."""

    default_code = "task_failed"


class SettingsError(MillstreamError):
    """This process is set up wrongly; the message says what to change."""

    default_code = "bad_settings"
