"""`/metrics`: for Prometheus. It tells of nobody, so it is open to whoever reaches the pod."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from millstream.api.metrics import PodMetrics

router = APIRouter(tags=["health"])

_TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus's text format, or OpenMetrics to who asks for it.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses=_TEXT)
async def metrics(request: Request) -> Response:
    """What this pod and the fleet do; never waits for a Redis that is away."""
    told: PodMetrics = request.app.state.metrics
    body, content_type = await told.text(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})
