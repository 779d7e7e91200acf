"""A pod whose link to Redis goes silent without a word; that of a worker is F16 in tests/faults."""

import asyncio
import time
from contextlib import AsyncExitStack

import httpx
from tests.support import sse
from tests.support.faults import busy, prompt, submit, undisturbed, watch, watch_chat
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store
from tests.support.waiting import until

from millstream.fleet.chaos.link import Link

REFUSED_WITHIN_S = 5.0
TOKENS = 60
ASKED = prompt(tokens=TOKENS, rate=25)


async def test_a_silent_redis_is_refused_in_time_and_waited_for(
    store: Store, frail: LocalFleet
) -> None:
    async with Link(store.connect) as link, AsyncExitStack() as stack:
        pod, _ = await asyncio.gather(
            frail.api(keepalive_s=0.5, redis_url=link.url), frail.worker()
        )
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=pod.url, timeout=25, limits=httpx.Limits())
        )
        native = await stack.enter_async_context(watch(http, await submit(http, ASKED)))
        chat = await stack.enter_async_context(watch_chat(http, ASKED))
        await native.upto(10)
        link.silence()
        silent_since = time.monotonic()

        async def refused(method: str, path: str, body: object = None) -> None:
            began = time.monotonic()
            answer = await http.request(method, path, json=body)
            assert time.monotonic() - began < REFUSED_WITHIN_S * busy(), path
            assert answer.status_code == 503, (path, answer.text)
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "redis_unavailable"

        await asyncio.gather(
            *(refused("POST", "/tasks", {"prompt": "x"}) for _ in range(20)),
            refused(
                "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}
            ),
            refused("GET", f"/tasks/{native.task_id}"),
            refused("GET", f"/tasks/{native.task_id}/stream"),
            refused("POST", f"/tasks/{native.task_id}/stop"),
            refused("GET", "/ready"),
        )
        assert (await http.get("/health")).status_code == 200
        for stream in (native, chat):  # meanwhile they say that they live, and do not end
            await until(lambda at=stream: sum(t > silent_since for t in at.pings) >= 4)
            assert not stream.reading.done()
        link.heal()
        frames = await native.end()
        sse.check_native(frames)
        assert sse.native_text(frames) == undisturbed(ASKED, tokens=TOKENS)
        assert sse.chat_text(await chat.end()) == undisturbed(ASKED, tokens=TOKENS, chat=True)
        assert (await http.post("/tasks", json={"prompt": "x"})).status_code == 202
        assert pod.text().count("\n") < 30
    await frail.quiet()
