"""`/v1/models`: what live workers serve."""

from typing import Any

from fastapi import APIRouter

from millstream.api.pod import CurrentPod, Pod
from millstream.api.relay import unavailable
from millstream.shared.connection import RedisError
from millstream.shared.errors import UnknownModel

router = APIRouter(tags=["models"])


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "millstream"}


async def _served(pod: Pod) -> dict[str, int]:
    try:
        return await pod.directory.served()
    except RedisError as error:
        raise unavailable(error) from error


@router.get("/v1/models")
async def list_models(pod: CurrentPod) -> dict[str, Any]:
    """The models that live workers serve."""
    served = await _served(pod)
    return {"object": "list", "data": [_model(name, served[name]) for name in sorted(served)]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, pod: CurrentPod) -> dict[str, Any]:
    """One model that live workers serve."""
    served = await _served(pod)
    if name not in served:
        raise UnknownModel(f"The model {name[:200]!r} does not exist.", param="model")
    return _model(name, served[name])
