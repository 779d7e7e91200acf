"""Which tasks run and wait, for who looks after the fleet: whose, where and since when."""

import msgspec

from millstream.shared.keys import Keys
from millstream.shared.script_runner import ScriptRunner
from millstream.shared.states import Priority, TaskState


class ListedTask(msgspec.Struct, frozen=True):
    """An unfinished task, without its prompt and text."""

    id: str
    caller: str
    state: TaskState
    priority: Priority
    worker: str
    """Empty while it waits, and after a hand-over until another worker has it."""
    tokens: int
    created_at: float
    """Unix time, as `started_at`."""
    started_at: float | None


async def list_tasks(
    runner: ScriptRunner, *, model: str, shards: int, most: int
) -> list[ListedTask]:
    """Up to `most` that run and as many that wait; those that run first, then by age.

    Raises:
        RedisError: Redis does not answer.
    """
    found: list[ListedTask] = []
    for shard in map(Keys, range(shards)):
        rows: list[list[bytes]] = await runner.run("tasks_of", [shard.queue(model)], [model, most])
        found += map(_listed, rows)
    kept: list[ListedTask] = []
    for state in (TaskState.RUNNING, TaskState.QUEUED):
        those = [task for task in found if task.state == state]
        kept += sorted(those, key=lambda task: task.created_at)[:most]
    return kept


def _listed(row: list[bytes]) -> ListedTask:
    task_id, caller, state, priority, worker, tokens, created, started = (
        part.decode() for part in row
    )
    return ListedTask(
        id=task_id,
        caller=caller,
        state=TaskState(state),
        priority=Priority(priority or Priority.INTERACTIVE),
        worker=worker,
        tokens=int(tokens or 0),
        created_at=int(created) / 1000,
        started_at=int(started) / 1000 if started else None,
    )
