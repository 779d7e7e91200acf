"""The pod that serves the page and the worker that writes the answer die in the middle of it."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from tests.pages.chat import ChatPage, script
from tests.support.local_fleet import LocalFleet, Process
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


async def _ended(worker: Process) -> None:
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0


def _asked(page: Page) -> list[dict[str, Any]]:
    """The bodies of the tasks that the page sends from now on."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: (
            bodies.append(request.post_data_json)
            if request.method == "POST" and request.url.endswith("/tasks")
            else None
        ),
    )
    return bodies


async def test_the_model_asked_last_is_asked_while_it_has_no_worker(
    page: Page, fleet: LocalFleet
) -> None:
    api, *workers = await asyncio.gather(fleet.api(), fleet.worker(), fleet.worker(model="another"))
    chat = await ChatPage(page).open(api.url)
    await page.get_by_label("Model", exact=True).select_option("fake")
    await chat.ask(script("First."))
    await chat.ended()
    await asyncio.gather(*(_ended(worker) for worker in workers))
    bodies = _asked(page)
    await chat.open(api.url + "/?again")  # a new conversation
    note = page.locator("#note")
    await expect(note).to_have_text("Waiting for a worker.")
    await expect(page.get_by_label("Model", exact=True)).to_have_value("fake")
    await chat.ask(script("Second."))
    await expect(chat.answer.locator(".state")).to_have_text("Waiting: 1st in the queue")
    await expect(note).to_have_text("Waiting for a worker.")
    assert [(body["model"], body["temperature"]) for body in bodies] == [("fake", 0.7)]
    await fleet.worker()
    await chat.ended()
    await expect(chat.text).to_have_text("Second.")
    await expect(note).to_have_text("")


async def test_a_model_never_seen_is_asked_without_its_name(page: Page, fleet: LocalFleet) -> None:
    api, worker = await asyncio.gather(fleet.api(), fleet.worker())
    await _ended(worker)
    await page.goto(api.url)
    await expect(page.locator("#note")).to_have_text("Waiting for a worker.")
    await expect(page.locator("#model option")).to_have_count(0)
    bodies = _asked(page)
    chat = ChatPage(page)
    await chat.ask(script("The only one."))
    await expect(chat.answer.locator(".state")).to_have_text("Waiting: 1st in the queue")
    assert ["model" in body for body in bodies] == [False]
    await fleet.worker()
    await chat.ended()
    await expect(chat.text).to_have_text("The only one.")
    await expect(page.get_by_label("Model", exact=True)).to_have_value("fake")


async def test_which_of_several_models_is_asked_back(page: Page, fleet: LocalFleet) -> None:
    api, *workers = await asyncio.gather(fleet.api(), fleet.worker(), fleet.worker(model="another"))
    await asyncio.gather(*(_ended(worker) for worker in workers))
    await page.goto(api.url)
    await expect(page.locator("#note")).to_have_text("Waiting for a worker.")
    chat = ChatPage(page)
    await chat.ask(script("Which one?"))
    await expect(chat.answer.locator(".error")).to_have_text("model must be one of: another, fake.")
    await fleet.worker()
    await expect(page.get_by_label("Model", exact=True)).to_have_value("fake")
    await page.get_by_role("button", name="Retry").click()
    await expect(chat.text).to_have_text("Which one?")


async def test_a_question_waits_for_the_first_worker_of_all(page: Page, fleet: LocalFleet) -> None:
    """It is refused, kept as any other that is refused for now, and sent again."""
    api = await fleet.api()
    await page.goto(api.url)
    await expect(page.locator("#note")).to_have_text("Waiting for a worker.")
    chat = ChatPage(page)
    await chat.ask(script("At last."))
    await expect(chat.answer.locator(".state")).to_have_text(
        re.compile(r"No worker has joined the fleet yet.* Trying again in 5 s\.")
    )
    await expect(page.locator(".turn.user .text")).to_have_text(script("At last."))
    assert [turn["state"] for turn in (await chat.stored())[1:]] == ["sending"]
    await fleet.worker()
    await chat.ended()
    await expect(chat.text).to_have_text("At last.")


async def test_a_fleet_with_keys_asks_for_one(page: Page, fleet: LocalFleet) -> None:
    secret = "ann-key-of-twenty-four-letters"
    api, _ = await asyncio.gather(fleet.api(api_keys=f"ann:{secret}"), fleet.worker())
    await page.goto(api.url)
    dialog = page.get_by_role("dialog", name="This fleet needs an API key")
    why = dialog.get_by_role("paragraph")
    await expect(why).to_have_text("This fleet asks for a key.")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(page.locator("#note")).to_have_text("This fleet asks for a key.")
    await page.get_by_role("button", name="Key", exact=True).click()
    await dialog.get_by_label("API key").fill("of-another-fleet")
    await dialog.get_by_role("button", name="Use this key").click()
    await expect(why).to_have_text("Incorrect API key provided.")
    await dialog.get_by_label("API key").fill(secret)
    await dialog.get_by_role("button", name="Use this key").click()
    await page.wait_for_selector("#model option", state="attached")
    chat = ChatPage(page)
    await chat.ask(script("Come in."))
    await chat.ended()
    await expect(chat.text).to_have_text("Come in.")
    assert await page.evaluate("() => localStorage.getItem('millstream.key')") is None
