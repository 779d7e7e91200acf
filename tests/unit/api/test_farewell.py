"""Requests that the server cancels: an answer in the usual shape, or a cut."""

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from millstream.api.farewell import Farewell
from millstream.api.http import CUT
from millstream.api.request_counts import RequestCounts


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancelled_request(begun: bool) -> None:
    sent: list[Any] = []
    cut = asyncio.Event()
    started = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        started.set()
        await asyncio.Event().wait()

    async def receive() -> Any:
        await cut.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    counts = RequestCounts()
    scope = {"type": "http", "method": "GET", "path": "/x", "extensions": {CUT: {"now": cut.set}}}
    request = asyncio.create_task(Farewell(app, counts)(scope, receive, send))
    await started.wait()
    request.cancel()
    await request
    assert cut.is_set() == begun
    assert sent[0]["status"] == (200 if begun else 503)
    assert len(sent) == (1 if begun else 2)
    assert counts.answered == {("GET", "none", "200" if begun else "503"): 1}
    if not begun:
        assert b'"code":"server_closing"' in sent[1]["body"]
        assert (b"retry-after", b"1") in sent[0]["headers"]
