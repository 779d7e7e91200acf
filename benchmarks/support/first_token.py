"""`millstream up` with the bundled model, until it has said something."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time

from benchmarks.support.lean_http import asked
from benchmarks.support.processes import Started, as_installed
from tests.support.ports import free_port

MOST_S = 120.0
_AGAIN_S = 0.02
_LOOK_S = 0.1  # each look costs the pod some milliseconds
_END_S = 30.0
_CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "stream": True,
}


def first_token() -> dict[str, float]:
    """Start a fleet and ask for a chat as soon as somebody listens.

    Returns:
        Seconds from the command on: `pod_s` until a pod answers, `worker_s` until the worker is on
        the roster, `ready_s` until it is ready, `wall_s` until the first token; and `cpu_s`, what
        all processes have used by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        began = time.monotonic()
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream", "up", "--port", str(port)],
            env=as_installed() | {"XDG_STATE_HOME": folder},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return asyncio.run(_watch(Started(popen, port), began))
        finally:
            popen.terminate()
            popen.wait(_END_S)


async def _watch(up: Started, began: float) -> dict[str, float]:
    async with asyncio.timeout(MOST_S), asyncio.TaskGroup() as group:
        looking = group.create_task(_roster(up.port, began))
        await _chat(up.port)
        figures = {"wall_s": time.monotonic() - began, "cpu_s": up.cpu_s()}
    return figures | looking.result()


async def _chat(port: int) -> None:
    """Return at the first token."""
    while True:
        with contextlib.suppress(OSError):
            async with asked(port, "/v1/chat/completions", _CHAT) as answer:
                if answer.status == 200:
                    async for frames in answer.frames():
                        if any(b'"delta":{"content":' in frame for frame in frames):
                            return
        await asyncio.sleep(_AGAIN_S)


async def _roster(port: int, began: float) -> dict[str, float]:
    """When pod and worker were seen."""
    seen: dict[str, float] = {}
    while "ready_s" not in seen:
        with contextlib.suppress(OSError):
            async with asked(port, "/fleet.json") as answer:
                workers = json.loads(await answer.body()).get("workers", [])
                now = time.monotonic() - began
                seen.setdefault("pod_s", now)
                if workers:
                    seen.setdefault("worker_s", now)
                if any(worker["state"] == "ready" for worker in workers):
                    seen["ready_s"] = now
        await asyncio.sleep(_LOOK_S)
    return seen
