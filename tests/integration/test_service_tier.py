"""`service_tier`: OpenAI's word for a task's class, on all of its routes."""

import json

import httpx
import pytest
from tests.support.local_fleet import LocalFleet
from tests.support.routes import asking
from websockets.asyncio.client import connect

from millstream.shared.keys import Keys

OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.mark.asyncio(loop_scope="module")
async def test_openais_flex_tier_waits_behind_the_others(shared_fleet: LocalFleet) -> None:
    """On every route of OpenAI's that makes a task, and on the socket."""
    bodies = {path: asking(path, '@fake {"tokens": 1}') for path in OPENAI}
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        for path, body in bodies.items():
            told: list[tuple[str | None, str | None]] = []
            for tier in ("flex", "auto", None):
                answer = await http.post(path, json={**body, "service_tier": tier})
                task_id = answer.headers["x-task-id"]
                fields = await shared_fleet.scripts.task_fields(Keys(0), task_id)
                told.append((fields["priority"], answer.json().get("service_tier")))
            repeated = path == "/v1/responses"
            assert told == [
                ("batch", "flex" if repeated else None),
                ("interactive", "default" if repeated else None),
                ("interactive", "default" if repeated else None),
            ], path
    async with connect(f"ws{shared_fleet.url[4:]}/v1/chat/ws") as socket:
        await socket.send(json.dumps({**bodies["/v1/chat/completions"], "service_tier": "flex"}))
        task_id = json.loads(await socket.recv())["data"]["task_id"]
        fields = await shared_fleet.scripts.task_fields(Keys(0), task_id)
        assert fields["priority"] == "batch"
