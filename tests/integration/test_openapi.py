"""Whatever is asked, sensible or not, is answered as `/openapi.json` says, and never by a 5xx."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.support.local_fleet import LocalFleet, clean_environment

from millstream.api.body import BODY_S

EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "10")
PHASES = os.environ.get("FUZZ_PHASES", "fuzzing")
CHECKS = "not_a_server_error,status_code_conformance"


async def fuzz(url: str, folder: Path) -> str:
    """Let schemathesis make up requests of all kinds; what it says."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("schemathesis"), "run", f"{url}/openapi.json",
        "--checks", CHECKS, "--phases", PHASES, "--max-examples", EXAMPLES,
        "--request-timeout", "20", "--workers", "2", "--no-color", "--warnings", "off",
        cwd=folder, env=clean_environment(), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    text, _ = await process.communicate()
    assert process.returncode == 0, text.decode()
    return text.decode()


async def trickle(url: str) -> tuple[float, str]:
    """Send a body that never ends, a byte a second; when it was answered, and what."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    begun = time.monotonic()
    writer.write(b"POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n")
    answer = asyncio.create_task(reader.readuntil(b"}}"))
    while not answer.done():
        writer.write(b" ")
        await asyncio.wait({answer}, timeout=1)
    writer.close()
    head, _, body = answer.result().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    return time.monotonic() - begun, json.loads(body)["error"]["code"]


@pytest.mark.timeout(60 + 10 * int(EXAMPLES))
async def test_no_request_is_answered_by_a_5xx(fleet: LocalFleet, tmp_path: Path) -> None:
    api = await fleet.api()
    worker = await fleet.worker()
    said, *slow = await asyncio.gather(
        fuzz(api.url, tmp_path), *(trickle(api.url) for _ in range(50))
    )
    assert "No issues found" in said, said
    for seconds, code in slow:
        assert code == "body_timeout"
        assert BODY_S - 1 < seconds < BODY_S + 15
    async with httpx.AsyncClient(base_url=api.url) as http:
        answer = await http.post("/tasks", json={"prompt": '@fake {"tokens": 1}'})
        assert answer.status_code == 202
    for process in (api, worker):
        assert process.popen.poll() is None
        assert "Traceback" not in process.text()
        assert "ERROR" not in process.text()
