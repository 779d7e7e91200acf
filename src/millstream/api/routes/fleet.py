"""`/fleet.json` and `/fleet/…`: who is in the fleet, what waits and runs, and a hand on both."""

import logging
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query

from millstream.api.auth.dependencies import Administrator
from millstream.api.pod import CurrentPod
from millstream.api.relay import missing_task, unavailable
from millstream.shared.connection import RedisError
from millstream.shared.drains import order_drain
from millstream.shared.errors import UnknownWorker
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.task_list import list_tasks

logger = logging.getLogger(__name__)

router = APIRouter(tags=["fleet"])

MOST_LISTED = 50
"""Tasks that run, and tasks that wait."""


@router.get("/fleet.json")
async def fleet(pod: CurrentPod, _: Administrator) -> dict[str, Any]:
    """Redis, pods, workers and queues, as of at most a second ago."""
    try:
        return await pod.fleet_watch.view()
    except RedisError as error:
        raise unavailable(error) from error


@router.post("/fleet/workers/{worker_id}/drain", status_code=202)
async def drain_worker(worker_id: str, pod: CurrentPod, admin: Administrator) -> dict[str, Any]:
    """Have a worker hand its tasks over and end, as by SIGTERM; what started it starts another."""
    try:
        found = await order_drain(pod.scripts, worker_id, lease_s=pod.settings.lease_s)
    except RedisError as error:
        raise unavailable(error) from error
    if not found:
        raise UnknownWorker(f"There is no worker {worker_id[:100]!r}.", param="worker_id")
    logger.info("%s told worker %s to drain", admin.id, worker_id)
    return {"worker": worker_id, "status": "ordered"}


@router.get("/fleet/tasks")
async def unfinished_tasks(
    pod: CurrentPod, _: Administrator, model: Annotated[str, Query()] = ""
) -> dict[str, Any]:
    """What runs and waits for a model, of all callers, without prompts and texts; the oldest.

    The model may be left out while the fleet serves one.
    """
    try:
        name = await pod.directory.resolve(model or None)
        tasks = await list_tasks(
            pod.scripts.runner, model=name, shards=pod.settings.shards, most=MOST_LISTED
        )
    except RedisError as error:
        raise unavailable(error) from error
    return {"object": "list", "data": [msgspec.to_builtins(task) for task in tasks]}


@router.post("/fleet/tasks/{task_id}/stop")
async def stop_any_task(task_id: str, pod: CurrentPod, admin: Administrator) -> dict[str, Any]:
    """End a task, whoever's it is; one that has ended stays as it was."""
    shard = shard_of(task_id)
    try:
        fields = {} if shard is None else await pod.scripts.task_fields(Keys(shard), task_id)
    except RedisError as error:
        raise unavailable(error) from error
    if "caller" not in fields:
        raise missing_task(task_id)
    state, usage = await pod.stop(task_id, fields["caller"])
    logger.info("%s stopped a task of %s", admin.id, fields["caller"], extra={"task_id": task_id})
    return {"task_id": task_id, "status": state, "usage": usage.to_dict()}
