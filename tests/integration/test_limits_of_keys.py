"""Limits, keys for retries and usage belong to a caller: what one does, another does not feel."""

from pathlib import Path

import httpx
from tests.support.keys import make_key
from tests.support.local_fleet import LocalFleet

from millstream.api.auth.caller import CallerLimits

BODY = {"prompt": '@fake {"tokens": 3}\nhello'}


async def test_callers_have_limits_retries_and_usage_of_their_own(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    path = tmp_path / "keys.jsonl"
    keys = {
        "ann": make_key(path, "ann"),
        "bob": make_key(path, "bob", limits=CallerLimits(requests_per_min=5)),
        "free": make_key(path, "free", limits=CallerLimits(requests_per_min=0)),
        "admin": make_key(path, "admin", admin=True),
    }
    api = await fleet.api(api_keys_file=path, rate_limit_requests_per_min=2)
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:

        def of(name: str, **more: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {keys[name]}", **more}

        async def used(name: str, query: str = "") -> list[tuple[str, int, int]]:
            answer = await http.get(f"/usage{query}", headers=of(name))
            rows = answer.json()["data"]
            return sorted((row["caller"], row["tasks"], row["completion_tokens"]) for row in rows)

        ids: set[str] = set()
        for name, limit in (("ann", 2), ("bob", 5), ("free", 0)):
            for number in range(limit or 7):
                headers = of(name, **{"Idempotency-Key": f"the same {number}"})
                answer = await http.post("/tasks", json=BODY, headers=headers)
                assert answer.status_code == 202, answer.text
                assert answer.headers.get("x-ratelimit-limit-requests") == (
                    str(limit or "") or None
                )
                ids.add(answer.headers["x-task-id"])
                got = await http.get(
                    f"/tasks/{answer.headers['x-task-id']}/stream", headers=headers
                )
                assert got.status_code == 200
            if limit:
                answer = await http.post("/tasks", json=BODY, headers=of(name))
                assert answer.status_code == 429
        assert len(ids) == 2 + 5 + 7
        assert await used("ann") == [("key:ann", 2, 6)]
        assert await used("bob", "?caller=key:bob") == [("key:bob", 5, 15)]
        assert await used("admin") == []
        assert await used("admin", "?caller=key:free") == [("key:free", 7, 21)]
        assert await used("admin", "?caller=*") == [
            ("key:ann", 2, 6),
            ("key:bob", 5, 15),
            ("key:free", 7, 21),
        ]
        for whose in ("key:bob", "*", "nobody"):
            answer = await http.get(f"/usage?caller={whose}", headers=of("ann"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
    await fleet.quiet()
