"""`GET /usage`: what a caller used, by day and model."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query

from millstream.api.auth.caller import Caller
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.pod import CurrentPod
from millstream.api.relay import unavailable
from millstream.shared.connection import RedisError
from millstream.shared.errors import InvalidRequest, NotAllowed
from millstream.shared.usage import KEPT_DAYS, DayOfUsage, read_usage

router = APIRouter(tags=["usage"])

EVERYONE = "*"


@router.get("/usage")
async def get_usage(
    pod: CurrentPod,
    caller: CurrentCaller,
    first: Annotated[str | None, Query(alias="from", description="YYYY-MM-DD, UTC")] = None,
    last: Annotated[str | None, Query(alias="to", description="YYYY-MM-DD, UTC")] = None,
    whose: Annotated[
        str | None, Query(alias="caller", description="Another caller, or `*`: admins only")
    ] = None,
) -> dict[str, Any]:
    """Tasks that ended and their tokens, each counted once; of today, if no day is given."""
    to = _day("to", last) or datetime.now(UTC).date()
    since = _day("from", first) or to
    if not timedelta(0) <= to - since < timedelta(days=KEPT_DAYS):
        raise InvalidRequest(
            f"From one day to another are 1 to {KEPT_DAYS} days; earlier ones are not kept.",
            param="from",
        )
    try:
        rows = await read_usage(
            pod.scripts.runner,
            shards=pod.settings.shards,
            first=since,
            last=to,
            caller=_whose(caller, whose),
        )
    except RedisError as error:
        raise unavailable(error) from error
    return {"object": "list", "from": since, "to": to, "data": [_row(row) for row in rows]}


def _day(name: str, text: str | None) -> date | None:
    if text is None:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError:
        raise InvalidRequest(f"{name} must be a day, YYYY-MM-DD.", param=name) from None


def _whose(caller: Caller, wanted: str | None) -> str | None:
    """Whose usage is read; None is everyone's."""
    if wanted in (None, "", caller.id):
        return caller.id
    if not caller.admin:
        raise NotAllowed("Only admins may see what others use.", param="caller")
    return None if wanted == EVERYONE else wanted


def _row(row: DayOfUsage) -> dict[str, Any]:
    return {
        "date": row.day,
        "caller": row.caller,
        "model": row.model,
        "tasks": row.tasks,
        **row.tokens.to_dict(),
    }
