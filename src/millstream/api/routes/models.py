"""`/v1/models`: what live workers serve."""

from typing import Any

from fastapi import APIRouter

from millstream.api.auth.caller import Caller
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.pod import CurrentPod, Pod
from millstream.api.relay import unavailable
from millstream.shared.connection import RedisError
from millstream.shared.errors import UnknownModel
from millstream.shared.registry import WorkerInfo

router = APIRouter(tags=["models"])


# For models whose makers suggest nothing: small ones babble at 1, which is OpenAI's default.
_SUGGESTED_SAMPLING = {"temperature": 0.7}


def _model(worker: WorkerInfo) -> dict[str, Any]:
    return {
        "id": worker.model,
        "object": "model",
        "created": int(worker.started_at),
        "owned_by": "millstream",
        "suggested_sampling": worker.suggested_sampling or _SUGGESTED_SAMPLING,
    }


async def _served(pod: Pod, caller: Caller) -> dict[str, WorkerInfo]:
    try:
        served = await pod.directory.served()
    except RedisError as error:
        raise unavailable(error) from error
    return {name: worker for name, worker in served.items() if caller.may_use(name)}


@router.get("/v1/models")
async def list_models(pod: CurrentPod, caller: CurrentCaller) -> dict[str, Any]:
    """The models that live workers serve and the caller may use."""
    served = await _served(pod, caller)
    return {"object": "list", "data": [_model(served[name]) for name in sorted(served)]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, pod: CurrentPod, caller: CurrentCaller) -> dict[str, Any]:
    """One of them."""
    served = await _served(pod, caller)
    if name not in served:
        raise UnknownModel(f"The model {name[:200]!r} does not exist.", param="model")
    return _model(served[name])
