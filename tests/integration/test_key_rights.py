"""What a key allows: models, and the fleet's own affairs; keys that come and go while pods run."""

import asyncio
import json
import time
from pathlib import Path

import httpx
import jwt
import pytest
from tests.support.local_fleet import LocalFleet
from tests.support.native import submit
from tests.support.waiting import eventually

from millstream.fleet.cli import invoke

SECRET = "a-secret-of-the-issuer-0123456789abcdef"


def make_key(file: Path, capsys: pytest.CaptureFixture[str], name: str, *words: str) -> str:
    assert invoke(["keys", "add", name, "--file", str(file), *words]) == 0
    return capsys.readouterr().out.strip()


async def test_models_of_a_key(
    fleet: LocalFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that it may not use does not exist: not listed, not told from one that there is not."""
    file = tmp_path / "keys"
    some = make_key(file, capsys, "some", "--model", "one")
    every = make_key(file, capsys, "every", "--weight", "3")
    none = make_key(file, capsys, "none", "--model", "other")
    api = await fleet.api(api_keys_file=file)
    await fleet.worker(model="one")
    await fleet.worker(model="two")
    async with httpx.AsyncClient(base_url=api.url, timeout=10) as http:

        async def models(key: str) -> list[str]:
            http.headers["Authorization"] = f"Bearer {key}"
            return [model["id"] for model in (await http.get("/v1/models")).json()["data"]]

        async def tried(model: str | None) -> tuple[int, str | None]:
            body = {"prompt": "x"} | ({"model": model} if model else {})
            answer = await http.post("/tasks", json=body)
            return answer.status_code, answer.json().get("error", {}).get("code")

        async def both() -> bool:
            return await models(every) == ["one", "two"]

        await eventually(both)
        assert await tried("two") == (202, None)
        (task,) = [key async for key in fleet.redis.scan_iter("*:task:*")]
        assert float(await fleet.redis.hget(task, "weight")) == 3
        assert await tried(None) == (400, "missing_required_parameter")
        assert await models(some) == ["one"]
        assert await tried(None) == (202, None)  # the one it may use
        assert (await http.get("/v1/models/two")).status_code == 404
        refused = await http.post("/tasks", json={"prompt": "x", "model": "two"})
        unknown = await http.post("/tasks", json={"prompt": "x", "model": "tow"})
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace("two", "tow") == unknown.text
        assert await models(none) == []
        assert await tried(None) == (404, "model_not_found")
        assert await tried("one") == (404, "model_not_found")


async def test_keys_come_and_go_without_a_restart(
    fleet: LocalFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    first = make_key(file, capsys, "ann")
    api = await fleet.api(api_keys_file=file)
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=10) as http:

        async def status(key: str) -> int:
            answer = await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            return answer.status_code

        assert await status(first) == 200
        task_id = await submit_as(http, first)
        second = make_key(file, capsys, "ann")

        async def taken() -> bool:
            return await status(second) == 200

        await eventually(taken)
        assert invoke(["keys", "revoke", json.loads(listed(file, capsys))[0]["id"], "--file",
                       str(file)]) == 0  # fmt: skip

        async def refused() -> bool:
            return await status(first) == 401

        await eventually(refused)
        # The same caller, with the other key: her tasks are still hers.
        answer = await http.get(f"/tasks/{task_id}", headers={"Authorization": f"Bearer {second}"})
        assert answer.status_code == 200
    assert first not in api.text()
    assert second not in api.text()


def listed(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert invoke(["keys", "list", "--json", "--file", str(file)]) == 0
    return capsys.readouterr().out


async def submit_as(http: httpx.AsyncClient, key: str) -> str:
    async with httpx.AsyncClient(
        base_url=http.base_url, headers={"Authorization": f"Bearer {key}"}
    ) as client:
        return await submit(client, tokens=1)


async def test_tokens_and_keys_side_by_side(fleet: LocalFleet) -> None:
    """A token's caller is its subject, whichever token it is; a key of the same name is another."""
    api = await fleet.api(api_keys=f"ann:{SECRET[::-1]}", jwt_secret=SECRET, jwt_audience="mill")
    await fleet.worker()

    def bearer(sub: str, **changes: object) -> dict[str, str]:
        claims = {"sub": sub, "aud": "mill", "exp": time.time() + 60, **changes}
        return {"Authorization": f"bearer {jwt.encode(claims, SECRET)}"}

    async with httpx.AsyncClient(base_url=api.url, timeout=10) as http:
        http.headers.update(bearer("ann", jti="1"))
        task_id = await submit(http, tokens=1)
        for headers, status in (
            (bearer("ann", jti="2"), 200),
            (bearer("bob"), 404),
            ({"Authorization": f"Bearer {SECRET[::-1]}"}, 404),
            (bearer("ann", exp=time.time() - 60), 401),
            (bearer("ann", aud="other"), 401),
            ({"Authorization": "Bearer a.b.c"}, 401),
        ):
            answer = await http.get(f"/tasks/{task_id}", headers=headers)
            assert answer.status_code == status, answer.text
        answer = await http.get("/v1/models", headers=bearer("ann", millstream={"models": []}))
        assert answer.json()["data"] == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
async def test_a_fleet_without_keys_is_for_this_machine_alone(fleet: LocalFleet, host: str) -> None:
    if host:
        api = fleet.start_api(host=host)
        assert await api.ended() == 2
        (line,) = [line for line in api.text().splitlines() if line.startswith("millstream: ")]
        assert line == (
            f"millstream: anyone who reaches {host} could use the API: set MILLSTREAM_API_KEYS, "
            "MILLSTREAM_API_KEYS_FILE or MILLSTREAM_JWT_…, or MILLSTREAM_ALLOW_ANONYMOUS=1 if all "
            "may"
        )
        return
    await asyncio.gather(
        *(
            fleet.api(host="0.0.0.0", **settings)
            for settings in ({"allow_anonymous": 1}, {"api_keys": SECRET}, {"jwt_secret": SECRET})
        ),
        fleet.api(host="localhost"),  # a name that leads to this machine alone
    )


async def test_a_fleet_without_keys_is_not_for_strange_pages(fleet: LocalFleet) -> None:
    """Nothing that a page could send without asking first makes a task (CSRF, DNS rebinding)."""
    api = await fleet.api()
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=10) as http:
        form = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
        for headers, code in (
            (form, "origin_not_allowed"),
            ({**form, "Content-Type": "application/x-www-form-urlencoded"}, "origin_not_allowed"),
            ({"Origin": "null"}, "origin_not_allowed"),
            ({"Host": "evil.example:8000"}, "host_not_allowed"),
            ({"Host": "evil.example", "Origin": "http://evil.example"}, "host_not_allowed"),
        ):
            answer = await http.post("/tasks", content=b'{"prompt": "x"}', headers=headers)
            assert answer.status_code == 403, answer.text
            assert answer.json()["error"]["code"] == code
        assert await fleet.redis.keys("*:task:*") == []
        for headers in (
            {"Origin": "http://localhost:3000"},
            {"Host": "localhost"},
            {"Authorization": "Bearer none"},
        ):
            assert (await http.post("/tasks", json={"prompt": "x"}, headers=headers)).is_success
        # What anyone may know.
        assert (await http.get("/health", headers={"Host": "evil.example"})).status_code == 200


async def test_a_fleet_with_broken_settings_says_so_in_one_line(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("{}\n")
    cases: list[tuple[dict[str, object], str]] = [
        ({"api_keys_file": tmp_path / "keys"}, "keys, line 1: Object missing required field"),
        ({"api_keys_file": tmp_path / "none"}, "none: cannot be read: No such file"),
        ({"jwt_secret": "short"}, "MILLSTREAM_JWT_SECRET must be a random text of 32 bytes"),
        ({"api_keys": "a b:c"}, "MILLSTREAM_API_KEYS: key 1 needs another name"),
    ]
    apis = [fleet.start_api(**settings) for settings, _ in cases]
    for api, (_, told) in zip(apis, cases, strict=True):
        assert await api.ended() == 2
        lines = api.text().splitlines()
        assert lines[-1].startswith("millstream: ")
        assert told in lines[-1]
        assert "Traceback" not in api.text()
