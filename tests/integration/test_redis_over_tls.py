"""Pod and worker on a Redis that speaks TLS (`rediss://`)."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.support import sse
from tests.support.faults import held, prompt, submit, undisturbed, watch, watch_chat
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store
from tests.support.tls_link import TlsLink
from tests.support.waiting import until

from millstream.shared.connection import RedisError, open_redis
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts

TOKENS = 40
ASKED = prompt(tokens=TOKENS, rate=40)


@asynccontextmanager
async def asked_of(fleet: LocalFleet, link: TlsLink) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a pod with a worker, both behind that link."""
    pod, _ = await asyncio.gather(fleet.api(redis_url=link.url), fleet.worker(redis_url=link.url))
    async with httpx.AsyncClient(base_url=pod.url, timeout=25) as http:
        yield http


async def test_answers_go_on_over_lost_connections(
    store: Store, frail: LocalFleet, tmp_path: Path
) -> None:
    async with (
        TlsLink(store.connect, tmp_path) as link,
        asked_of(frail, link) as http,
        watch(http, await submit(http, ASKED)) as native,
        watch_chat(http, ASKED) as chat,
    ):
        await native.upto(10)
        before = link.handshakes
        link.reset()
        frames = await native.end()
        sse.check_native(frames)
        assert sse.native_text(frames) == undisturbed(ASKED, tokens=TOKENS)
        assert sse.chat_text(await chat.end()) == undisturbed(ASKED, tokens=TOKENS, chat=True)
        assert link.handshakes >= before + 3  # scripts and subscriptions of both
        link.reset()  # while they have nothing to do
        async with watch_chat(http, ASKED) as again:
            text = sse.chat_text(await again.end())
        assert text == undisturbed(ASKED, tokens=TOKENS, chat=True)
    await frail.quiet()


async def test_a_stop_comes_through(store: Store, frail: LocalFleet, tmp_path: Path) -> None:
    asked = held(5, tokens=TOKENS)
    async with (
        TlsLink(store.connect, tmp_path) as link,
        asked_of(frail, link) as http,
        watch(http, await submit(http, asked)) as stream,
    ):
        await until(lambda: stream.numbers == [1, 2, 3, 4, 5])
        stopped = await http.post(f"/tasks/{stream.task_id}/stop")
        assert stopped.json()["status"] == "cancelled"
        assert sse.native_text(await stream.end()) == undisturbed(asked, tokens=5)
    await frail.quiet()


async def test_a_certificate_that_nobody_vouches_for_is_refused(
    store: Store, tmp_path: Path
) -> None:
    async with TlsLink(store.connect, tmp_path) as link:
        async with open_redis(link.untrusted_url) as client:
            with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
                await Scripts(client).depth(Keys(0), model="m")
        assert link.handshakes == 0
        async with open_redis(link.url) as client:
            assert (await Scripts(client).depth(Keys(0), model="m")).running == 0
        assert link.handshakes == 1
