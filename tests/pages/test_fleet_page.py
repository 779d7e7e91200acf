"""The fleet page, and what both pages are to people who cannot see or use a mouse."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect
from tests.pages.chat import ChatPage, script
from tests.support.local_fleet import LocalFleet
from tests.support.redis_servers import Servers
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(servers: Servers, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with LocalFleet(servers.fresh_url(), tmp_path, lease_s=2) as local:
        yield local


async def test_fleet_json_has_the_shape_of_the_contract(fleet: LocalFleet) -> None:
    api, worker = await asyncio.gather(fleet.api(), fleet.worker(max_concurrent=1))
    async with httpx.AsyncClient(base_url=api.url) as client:
        for _ in range(3):
            await client.post("/tasks", json={"prompt": script("x" * 4000, rate=50)})

        async def look() -> dict[str, Any] | None:
            view = (await client.get("/fleet.json")).json()
            return view if view["models"][0]["running"] == 1 else None

        view = await eventually(look, what="the running task")
    assert view.keys() == {"redis", "apis", "workers", "models"}
    assert view["redis"].keys() == {"url", "name", "version", "used_memory"}
    (row,) = view["workers"]
    fields = "id pid host model engine state slots running tokens_per_s attempts_reclaimed"
    assert set(fields.split()) <= row.keys()
    assert (row["pid"], row["model"], row["state"]) == (worker.pid, "fake", "ready")
    assert row["slots"] == 1
    (pod,) = view["apis"]
    assert {"id", "pid", "host", "url", "streams"} <= pod.keys()
    assert (pod["pid"], pod["url"]) == (api.pid, api.url)
    (model,) = view["models"]
    assert model.keys() == {"name", "waiting", "running", "oldest_wait_s", "tokens_per_s"}
    assert (model["name"], model["waiting"]) == ("fake", 2)


async def test_the_page_tells_what_happens(page: Page, fleet: LocalFleet) -> None:
    api, first, second = await asyncio.gather(fleet.api(), fleet.worker(), fleet.worker())
    await page.goto(f"{api.url}/fleet")
    rows = page.locator("#workers tr")
    await expect(rows).to_have_count(2)
    await expect(page.locator("#models td").first).to_have_text("fake")
    await expect(page.locator("#apis")).to_contain_text(api.url)
    await expect(page.locator("canvas")).to_have_count(3)
    nothing = page.get_by_text("Nothing yet.")
    await expect(nothing).to_be_visible()
    await expect(nothing).to_have_class("quiet")
    events = page.locator("#events")
    first.signal(signal.SIGKILL)
    await expect(events).to_contain_text("is gone", timeout=10_000)
    await expect(nothing).to_be_hidden()
    await expect(rows).to_have_count(1)
    await fleet.worker()
    await expect(events).to_contain_text("joined for fake", timeout=10_000)
    second.signal(signal.SIGTERM)
    await expect(rows).to_have_count(1, timeout=10_000)
    async with httpx.AsyncClient(base_url=api.url) as client:
        assert (await client.get("/fleet.json")).status_code == 200


async def test_drain_stays_in_sight_while_the_table_scrolls(
    page: Page, shared_fleet: LocalFleet
) -> None:
    await page.set_viewport_size({"width": 768, "height": 1024})
    await page.goto(f"{shared_fleet.url}/fleet")
    drain = page.get_by_role("button", name="Drain worker")
    table = page.locator(".wide", has=page.locator("#workers"))
    await expect(drain).to_be_in_viewport(ratio=1)
    width = await table.evaluate("(table) => table.scrollWidth - table.clientWidth")
    assert width > 0
    for left in (width / 2, width):
        await table.evaluate("(table, left) => { table.scrollLeft = left; }", left)
        await expect(drain).to_be_in_viewport(ratio=1)


async def test_a_fleet_with_keys_asks_for_one(page: Page, fleet: LocalFleet) -> None:
    secret = "admin-key-of-twenty-four-letters"
    api = await fleet.api(api_keys=f"admin:{secret}")
    await page.goto(f"{api.url}/fleet")
    head = page.locator("#link")
    dialog = page.get_by_role("dialog", name="This fleet needs an API key")
    why = dialog.get_by_role("paragraph")
    for words, key in (
        ("This fleet asks for a key.", "of-another-fleet"),
        ("Incorrect API key provided.", secret),
    ):
        await expect(why).to_have_text(words)
        await expect(head).to_have_text(words)
        await dialog.get_by_label("API key").fill(key)
        await dialog.get_by_role("button", name="Use this key").click()
    await expect(head).to_have_text("")
    await expect(page.locator("#apis")).to_contain_text(api.url)


async def test_who_would_rather_not_give_a_key_is_left_alone(page: Page, fleet: LocalFleet) -> None:
    secret = "admin-key-of-twenty-four-letters"
    api = await fleet.api(api_keys=f"admin:{secret}")
    await page.clock.install()
    await page.goto(f"{api.url}/fleet")
    dialog = page.get_by_role("dialog", name="This fleet needs an API key")
    await dialog.get_by_role("button", name="Cancel").click()
    await page.clock.run_for(10_000)
    await expect(dialog).to_be_hidden()
    await expect(page.locator("#link")).to_have_text("This fleet asks for a key.")
    await page.get_by_role("button", name="Key", exact=True).click()
    await dialog.get_by_label("API key").fill(secret)
    await dialog.get_by_role("button", name="Use this key").click()
    await page.clock.run_for(2_000)
    await expect(page.locator("#apis")).to_contain_text(api.url)


async def test_a_worker_is_drained_by_keyboard(page: Page, fleet: LocalFleet) -> None:
    """The button keeps the focus while the table is drawn anew; nothing happens without a yes."""
    api, worker = await asyncio.gather(fleet.api(), fleet.worker())
    await page.goto(f"{api.url}/fleet")
    drain = page.get_by_role("button", name="Drain worker")
    await drain.focus()
    rate = page.locator("#workers td").nth(4)
    async with httpx.AsyncClient(base_url=api.url) as client:
        await client.post("/tasks", json={"prompt": script("x" * 4000, rate=50)})
    await expect(rate).not_to_have_text("0", timeout=10_000)
    await expect(drain).to_be_focused()
    dialog = page.get_by_role("dialog", name="Drain this worker?")
    for no in ("Escape", "Enter"):  # on the button that has the focus: Cancel
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_visible()
        await _no_serious_fault(page)
        await page.keyboard.press(no)
        await expect(dialog).to_be_hidden()
        await expect(drain).to_be_focused()
    assert worker.popen.poll() is None
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    events = page.locator("#events")
    await expect(events).to_contain_text("was told to drain")
    assert await worker.ended() == 0
    await expect(events).to_contain_text(" left.", timeout=10_000)
    await expect(events).not_to_contain_text("is gone")


async def test_a_task_is_stopped_on_the_page(page: Page, fleet: LocalFleet) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker(max_concurrent=1))
    async with httpx.AsyncClient(base_url=api.url) as client:
        for _ in range(2):
            answer = await client.post("/tasks", json={"prompt": script("x" * 40_000, rate=50)})
        waiting = answer.json()["task_id"]
        await page.goto(f"{api.url}/fleet")
        await page.get_by_role("button", name="Tasks of fake").click()
        tasks = page.get_by_role("dialog", name="Tasks of fake")
        rows = tasks.locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("runs")
        await expect(rows.last).to_contain_text("waits (interactive)")
        await _no_serious_fault(page)
        await tasks.get_by_role("button", name=f"Stop task {waiting}").click()
        await page.get_by_role("button", name="Stop it").click()
        await expect(tasks.get_by_role("status")).to_have_text(f"{waiting} is cancelled.")
        await expect(rows).to_have_count(1)
        assert (await client.get(f"/tasks/{waiting}")).json()["status"] == "cancelled"
        await page.keyboard.press("Escape")
        await expect(tasks).to_be_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_finds_nothing_serious(page: Page, shared_fleet: LocalFleet, theme: str) -> None:
    """Deque's axe: contrast, names, roles, order. WCAG 2.2."""
    await page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    chat = await ChatPage(page).open(shared_fleet.url)
    await _no_serious_fault(page)
    await chat.ask(script("# Title\n\n- a\n- [x] b\n\n```\ncode\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n"))
    await chat.ended()
    await _no_serious_fault(page)
    for name in ("Settings", "Export"):
        await page.get_by_role("button", name=name, exact=True).click()
        await _no_serious_fault(page)
        await page.keyboard.press("Escape")
    await page.goto(f"{shared_fleet.url}/fleet")
    await expect(page.locator("#workers tr")).to_have_count(1)
    await _no_serious_fault(page)


async def _no_serious_fault(page: Page) -> None:
    found = (await Axe().run(page)).response["violations"]
    serious = [item for item in found if item["impact"] in ("serious", "critical")]
    assert [(item["id"], [node["html"] for node in item["nodes"]]) for item in serious] == []


async def test_all_of_the_chat_works_by_keyboard(page: Page, shared_fleet: LocalFleet) -> None:
    chat = await ChatPage(page).open(shared_fleet.url)
    await expect(chat.question).to_be_focused()
    await page.keyboard.type(script("By keyboard."))
    await page.keyboard.press("Enter")
    await chat.ended()
    await expect(page.get_by_role("status")).to_have_text("Answer finished.")
    focused: set[str] = set()
    for _ in range(30):
        await page.keyboard.press("Tab")
        focused.add(await page.evaluate("() => document.activeElement.textContent.trim()"))
    assert {"New conversation", "Export", "Theme", "Settings", "Edit", "Copy", "Retry"} <= focused
