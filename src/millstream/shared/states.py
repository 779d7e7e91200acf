"""The states of a task and the reasons for which a generation ends."""

from enum import StrEnum


class TaskState(StrEnum):
    """Where a task stands; the last three are terminal and never left."""

    QUEUED = "queued"
    """Accepted, waiting for a worker with a free slot."""
    RUNNING = "running"
    """A worker holds its lease (or held it, and the next one has not yet noticed)."""
    COMPLETED = "completed"
    """The generation ended by itself; the log holds the whole answer."""
    CANCELLED = "cancelled"
    """Someone who may stop it did, or its client went away."""
    FAILED = "failed"
    """It could not be done; `error` says why."""

    @property
    def terminal(self) -> bool:
        """Whether nothing more can happen to the task."""
        return self not in (TaskState.QUEUED, TaskState.RUNNING)


class FinishReason(StrEnum):
    """Why a completed generation ended, in OpenAI's words where it has them."""

    STOP = "stop"
    """The model's end token, or one of the request's stop strings."""
    LENGTH = "length"
    """`max_tokens`, the server's limit, or the model's context was reached."""
    LOW_CONFIDENCE = "low_confidence"
    """The model was no longer as sure as `early_stop` asks."""
    CONTENT_FILTER = "content_filter"
    """What would have come next, the content filter does not let out."""


class Priority(StrEnum):
    """The classes of the fair queue."""

    INTERACTIVE = "interactive"
    """Somebody waits for the answer."""
    BATCH = "batch"
    """Nobody does: it gets what is left, and a small share while others wait."""


class WorkerState(StrEnum):
    """What a worker says of itself in the registry."""

    STARTING = "starting"
    """The model is loading."""
    READY = "ready"
    """Claims tasks."""
    DRAINING = "draining"
    """Claims nothing more and hands its tasks over."""
    STALLED = "stalled"
    """Its engine has made no progress for a lease; its tasks move on."""
