"""The pod that serves the page and the worker that writes the answer die in the middle of it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from tests.pages.chat import ChatPage, script
from tests.support.local_fleet import LocalFleet
from tests.support.redis_servers import Servers
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = " ".join(f"word-{at}" for at in range(150))


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(servers: Servers, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with LocalFleet(servers.fresh_url(), tmp_path, lease_s=2, keepalive_s=0.5) as local:
        yield local


async def _running_task(chat: ChatPage) -> str:
    async def look() -> str | None:
        turn = (await chat.stored())[-1]
        return turn.get("task")

    return await eventually(look, what="task of the answer")


async def test_pod_and_worker_are_killed(page: Page, fleet: LocalFleet) -> None:
    api, _, _ = await asyncio.gather(fleet.api(), fleet.worker(), fleet.worker())
    chat = await ChatPage(page).open(api.url)
    await chat.ask(script(WORDS, rate=30))
    await chat.has("word-10")
    task_id = await _running_task(chat)
    owner = await fleet.owner(task_id)
    owner.signal(signal.SIGKILL)
    api.signal(signal.SIGKILL)
    assert await api.ended() == -signal.SIGKILL
    await expect(chat.answer).to_contain_text("Connection lost")
    again = await fleet.api(port=api.url.rpartition(":")[2])
    assert again.pid != api.pid
    await chat.ended()
    await expect(chat.text).to_have_text(WORDS)  # as an undisturbed run gives it
    await expect(chat.marks).to_have_text(["rejoined", "moved to another worker"])
    turn = (await chat.stored())[-1]
    assert (turn["content"], turn["state"], turn["attempts"]) == (WORDS, "completed", 2)
    assert turn["usage"]["completion_tokens"] == -(-len(WORDS) // 4)


async def test_the_worker_is_killed_and_another_comes_late(page: Page, fleet: LocalFleet) -> None:
    api, worker = await asyncio.gather(fleet.api(), fleet.worker())
    chat = await ChatPage(page).open(api.url)
    await chat.ask(script(WORDS, rate=60))
    await chat.has("word-10")
    state = chat.answer.locator(".state")
    await expect(state).to_have_text("")
    worker.signal(signal.SIGKILL)
    await expect(state).to_have_text("Waiting for a worker")
    await fleet.worker()
    await expect(state).to_have_text("", timeout=15_000)
    await expect(chat.marks).to_have_text(["moved to another worker"])
    await chat.ended()
    await expect(chat.text).to_have_text(WORDS)


async def test_the_page_is_loaded_again_in_the_middle(page: Page, fleet: LocalFleet) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    chat = await ChatPage(page).open(api.url)
    await chat.ask(script(WORDS, rate=30))
    await chat.has("word-10")
    task_id = await _running_task(chat)
    await page.reload()
    assert await _running_task(chat) == task_id
    await chat.ended()
    await expect(chat.text).to_have_text(WORDS)
    await expect(chat.marks).to_have_text(["rejoined"])


async def test_the_page_is_gone_meanwhile(page: Page, fleet: LocalFleet) -> None:
    """Closed in the middle, and opened when the answer has long ended: all of it is there."""
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    chat = await ChatPage(page).open(api.url)
    await chat.ask(script(WORDS, rate=100))
    await chat.has("word-3")
    address = page.url
    await page.goto("about:blank")
    await fleet.quiet()
    await page.goto(address)
    await chat.ended()
    await expect(chat.text).to_have_text(WORDS)


async def test_redis_forgot_the_answer(page: Page, fleet: LocalFleet) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    chat = await ChatPage(page).open(api.url)
    await chat.ask(script(WORDS, rate=20))
    await chat.has("word-5")
    await fleet.redis.flushall()
    await chat.ended()
    await expect(chat.answer.locator(".error")).to_be_visible()
    assert WORDS.startswith((await chat.stored())[-1]["content"])


async def test_the_queue_is_full_and_empties(page: Page, fleet: LocalFleet) -> None:
    full, _ = await asyncio.gather(fleet.api(max_queue=0), fleet.worker())
    chat = await ChatPage(page).open(full.url)
    await chat.ask(script("At last."))
    await expect(chat.answer).to_contain_text("The queue of fake is full. Trying again in")
    full.signal(signal.SIGKILL)
    await full.ended()
    await fleet.api(port=full.url.rpartition(":")[2])
    await chat.ended()
    await expect(chat.text).to_have_text("At last.")


async def test_a_fleet_with_keys_asks_for_one(page: Page, fleet: LocalFleet) -> None:
    secret = "ann-key-of-twenty-four-letters"
    api, _ = await asyncio.gather(fleet.api(api_keys=f"ann:{secret}"), fleet.worker())
    await page.goto(api.url)
    dialog = page.get_by_role("dialog", name="This fleet needs an API key")
    await dialog.get_by_label("API key").fill(secret)
    await dialog.get_by_role("button", name="Use this key").click()
    await page.wait_for_selector("#model option", state="attached")
    chat = ChatPage(page)
    await chat.ask(script("Come in."))
    await chat.ended()
    await expect(chat.text).to_have_text("Come in.")
    assert await page.evaluate("() => localStorage.getItem('millstream.key')") is None
