"""`/fleet.json`: who is in the fleet, and what waits and runs."""

from typing import Any

from fastapi import APIRouter

from millstream.api.auth.dependencies import Administrator
from millstream.api.pod import CurrentPod
from millstream.api.relay import unavailable
from millstream.shared.connection import RedisError

router = APIRouter(tags=["fleet"])


@router.get("/fleet.json")
async def fleet(pod: CurrentPod, _: Administrator) -> dict[str, Any]:
    """Redis, pods, workers and queues, as of at most a second ago."""
    try:
        return await pod.fleet_watch.view()
    except RedisError as error:
        raise unavailable(error) from error
