"""No key, token, ticket or password in anything that a process prints, at the chattiest level."""

import time
from pathlib import Path

import httpx
import jwt
import pytest
import redis
from tests.support.local_fleet import LocalFleet
from tests.support.native import submit
from tests.support.store import Store

from millstream.fleet.cli import invoke
from millstream.shared.settings import Settings

KEY = "secret-key-of-ann"
TOKEN_SECRET = "secret-of-the-issuer-0123456789abcdef"
PASSWORD = "secret-of-redis"
WRONG = "secret-that-is-wrong"


async def test_no_secret_is_logged(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.configure("requirepass", PASSWORD)
    url = store.url.replace("redis://", f"redis://:{PASSWORD}@")
    assert invoke(["keys", "add", "bob", "--file", str(tmp_path / "keys")]) == 0
    made = capsys.readouterr().out.strip()
    claims = {"sub": "cy", "exp": time.time() + 60}
    token, forged = jwt.encode(claims, TOKEN_SECRET), jwt.encode(claims, TOKEN_SECRET[::-1])
    secrets = [KEY, TOKEN_SECRET, PASSWORD, WRONG, made, token, forged]
    async with LocalFleet(url, tmp_path, log_level="debug") as fleet:
        api = await fleet.api(
            api_keys=f"ann:{KEY}", api_keys_file=tmp_path / "keys", jwt_secret=TOKEN_SECRET
        )
        await fleet.worker()
        async with httpx.AsyncClient(base_url=api.url, timeout=10) as http:
            for key in (WRONG, forged, made, token, KEY):
                http.headers["Authorization"] = f"Bearer {key}"
                await http.get("/v1/models")
                await http.get("/v1/models", params={"api_key": key})
                await http.post("/tasks", content=b"{")
            task_id = await submit(http, tokens=3)
            for _ in range(2):
                ticket = (await http.post(f"/tasks/{task_id}/ticket")).json()["ticket"]
                secrets.append(ticket)
                del http.headers["Authorization"]
                for _ in range(2):  # taken, and refused
                    await http.get(f"/tasks/{task_id}/stream", params={"ticket": ticket})
                http.headers["Authorization"] = f"Bearer {KEY}"
            # Failures are where libraries talk.
            with redis.Redis(port=store.port, password=PASSWORD) as client:
                client.client_kill_filter(_type="normal")
            await http.get(f"/tasks/{task_id}")
            async with httpx.AsyncClient(base_url=api.url) as raw:
                await raw.get("/x", headers={"Authorization": f"Bearer {KEY}", "Bad": "y" * 70_000})
        lost = fleet.start_api(redis_url=url.replace(PASSWORD, WRONG))
        assert await lost.ended() == 1
        bad = fleet.start_api(api_keys=f"a b:{KEY}", redis_url=url)
        assert await bad.ended() == 2
        output = [process.text() for process in fleet.processes]
    assert "asyncio" in output[0]  # at this level it does talk
    for text in output:
        assert text
        for secret in secrets:
            assert secret not in text


def test_settings_do_not_show_themselves() -> None:
    settings = Settings.model_validate(
        {"redis_url": f"redis://:{PASSWORD}@host:1/0", "api_keys": KEY, "jwt_secret": TOKEN_SECRET}
    )
    for text in (repr(settings), str(settings)):
        assert not any(secret in text for secret in (PASSWORD, KEY, TOKEN_SECRET))
