"""`/health`: the process lives. `/ready`: it can take work."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from millstream.api.errors import error_response
from millstream.api.pod import CurrentPod
from millstream.api.relay import unavailable
from millstream.shared.connection import RedisError
from millstream.shared.errors import FleetUnavailable, NoWorker

router = APIRouter(tags=["health"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """The process answers; nothing else is looked at."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False, response_model=None)
@router.get("/ready", response_model=None)
async def ready(pod: CurrentPod) -> dict[str, str] | JSONResponse:
    """Tasks sent here are accepted: Redis takes writes, and some worker has been ready before, or
    is started on demand."""
    if pod.closing:
        return error_response(FleetUnavailable("This pod is going away.", code="server_closing"))
    try:
        await pod.scripts.ready()
        can_take_work = await pod.directory.can_take_work()
    except RedisError as error:
        return error_response(unavailable(error))
    if not can_take_work:
        return error_response(NoWorker("No worker has been ready yet.", retry_after_s=2))
    return {"status": "ready"}
