"""More tabs than a browser opens connections of HTTP/1.1 to a host (FAULTS B63)."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, expect
from tests.pages.chat import ChatPage, script
from tests.support.compose_cluster import ComposeCluster
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

# A minute beyond the usual limit: a machine without nginx installs it first.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

TABS = 7
STREAMS = 4  # as chat/reading.js has it
WORDS = " ".join(f"word-{at}" for at in range(150))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ComposeCluster]:
    """A pod and a worker behind the nginx of the profile `tls`."""
    async with ComposeCluster(MILLSTREAM_ENGINE="fake") as started:
        yield await started.up(nginx="nginx-tls")


@pytest_asyncio.fixture(loop_scope="module")
async def http(shared_fleet: LocalFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as session:
        yield session


async def _streams(http: httpx.AsyncClient, expected: int) -> None:
    """Wait until the fleet has so many streams open."""

    async def look() -> bool:
        fleet = (await http.get("/fleet.json")).json()
        return sum(api["streams"] for api in fleet["apis"]) == expected

    await eventually(look, within_s=5, what=f"{expected} open streams")


async def _ask(tab: ChatPage, text: str) -> str:
    """Ask it in this tab; the task that was made of it."""
    async with tab.page.expect_response("**/tasks") as taken:
        await tab.ask(text)
    return (await (await taken.value).json())["task_id"]


async def _says(tab: ChatPage, words: str) -> None:
    await expect(tab.answer.locator(".state")).to_contain_text(words)


async def test_seven_tabs_answer_at_once_over_http2(
    browser: Browser, cluster: ComposeCluster
) -> None:
    context = await browser.new_context(ignore_https_errors=True)
    try:
        tabs: list[ChatPage] = []
        for number in range(TABS):  # each is opened while those before it answer
            tab = await ChatPage(await context.new_page()).open(cluster.doors[0].tls_url)
            await tab.ask(script(f"tab{number} " * 600, rate=20))
            await tab.has(f"tab{number}")
            tabs.append(tab)
        for tab in tabs:
            assert await tab.answer.get_attribute("aria-busy") == "true"
        await asyncio.gather(*(tab.stop.click() for tab in tabs))
        await asyncio.gather(*(tab.ended() for tab in tabs))
    finally:
        await context.close()


async def test_seven_tabs_ask_and_four_are_answered_at_once_over_http1(
    context: BrowserContext, shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    tabs: list[ChatPage] = []
    tasks: list[str] = []
    for number in range(TABS):  # each is opened while those before it answer
        tab = await ChatPage(await context.new_page()).open(shared_fleet.url)
        tasks.append(await _ask(tab, script(f"tab{number} " * 600, rate=20)))
        if number < STREAMS:
            await tab.has(f"tab{number}")
        else:
            await _says(tab, "Four other answers are being read in this browser.")
        tabs.append(tab)
    await _streams(http, STREAMS)
    assert len(set(tasks)) == TABS
    for task_id in tasks:
        assert (await http.get(f"/tasks/{task_id}")).json()["status"] == "running"
    # A place is given back by a stop and by a tab that closes; the first who waits has it.
    await tabs[0].stop.click()
    await tabs[0].ended()
    await tabs[4].has("tab4 tab4")
    await tabs[1].page.close()
    await tabs[5].has("tab5 tab5")
    # Who waits can stop its answer, and reads what there is of it.
    await tabs[6].stop.click()
    await tabs[6].ended()
    await tabs[6].has("tab6 tab6")
    # What the closed tab has asked is read by another, when there is a place for it.
    for tab in (*tabs[2:4], *tabs[4:6]):
        assert await tab.answer.get_attribute("aria-busy") == "true"
    await asyncio.gather(*(tabs[number].stop.click() for number in (2, 3, 4, 5)))
    await asyncio.gather(*(tabs[number].ended() for number in (2, 3, 4, 5)))
    await _streams(http, 1)
    await http.post(f"/tasks/{tasks[1]}/stop")
    await _streams(http, 0)


async def test_an_answer_is_read_by_one_tab_and_kept_for_the_others(
    context: BrowserContext, shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    first = await ChatPage(await context.new_page()).open(shared_fleet.url)
    await first.ask(script(WORDS, rate=100))
    await first.has("word-3")
    second = ChatPage(await context.new_page())
    asked: list[str] = []
    second.page.on("request", lambda request: asked.append(request.url))
    await second.open(first.page.url)
    await _says(second, "Another tab is reading this answer.")
    await _streams(http, 1)
    await first.ended()
    await second.ended()
    for tab in (first, second):
        await expect(tab.text).to_have_text(WORDS)
        await expect(tab.marks).to_have_count(0)
    assert not any(url.endswith("/stream") for url in asked)


async def test_an_answer_is_read_on_when_its_tab_closes(
    context: BrowserContext, shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    first = await ChatPage(await context.new_page()).open(shared_fleet.url)
    await first.ask(script(WORDS, rate=50))
    await first.has("word-3")
    second = await ChatPage(await context.new_page()).open(first.page.url)
    third = await ChatPage(await context.new_page()).open(first.page.url)
    for tab in (second, third):
        await _says(tab, "Another tab is reading this answer.")
    await first.page.close()
    await second.has("word-40 ")
    await _streams(http, 1)
    for tab in (second, third):
        await tab.ended()
        await expect(tab.text).to_have_text(WORDS)


async def test_a_stop_in_the_tab_that_waits_ends_it_in_both(
    context: BrowserContext, shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    first = await ChatPage(await context.new_page()).open(shared_fleet.url)
    await first.ask(script(WORDS * 4, rate=20))
    await first.has("word-3")
    second = await ChatPage(await context.new_page()).open(first.page.url)
    await _says(second, "Another tab is reading this answer.")
    await second.stop.click()
    for tab in (first, second):
        await tab.ended()
        await expect(tab.answer).to_contain_text("stopped")
    await _streams(http, 0)


async def test_without_locks_each_tab_reads(
    context: BrowserContext, shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    """Plain HTTP from another machine: a page has them on https and localhost only."""
    await context.add_init_script("delete Navigator.prototype.locks;")
    first = await ChatPage(await context.new_page()).open(shared_fleet.url)
    await first.ask(script(WORDS, rate=50))
    await first.has("word-3")
    second = await ChatPage(await context.new_page()).open(first.page.url)
    await _streams(http, 2)
    for tab in (first, second):
        await tab.ended()
        await expect(tab.text).to_have_text(WORDS)
