"""A real Chromium, Debian's, for the pages. Where there is none, these tests are skipped."""

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright
from tests.pages.chat import ChatPage
from tests.support.local_fleet import LocalFleet

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/pages/" in item.nodeid and CHROMIUM is None:
            item.add_marker(pytest.mark.skip(reason="no chromium: apt install chromium"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Root may not use its sandbox; the pages come from this machine.
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(loop_scope="module")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A browser that has never been here before; an error in a script of a tab fails the test."""
    fresh = await browser.new_context(viewport={"width": 1200, "height": 800})
    errors: list[str] = []
    fresh.on("weberror", lambda error: errors.append(str(error.error)))
    yield fresh
    await fresh.close()
    assert errors == []


@pytest_asyncio.fixture(loop_scope="module")
async def page(context: BrowserContext) -> Page:
    """A tab."""
    return await context.new_page()


@pytest_asyncio.fixture(loop_scope="module")
async def chat(page: Page, shared_fleet: LocalFleet) -> ChatPage:
    """The chat page of the module's fleet, ready to be asked."""
    return await ChatPage(page).open(shared_fleet.url)


@pytest_asyncio.fixture(loop_scope="module")
async def phone(browser: Browser) -> AsyncIterator[Page]:
    """A tab as wide as a phone."""
    context = await browser.new_context(
        viewport={"width": 390, "height": 780}, device_scale_factor=2, has_touch=True
    )
    yield await context.new_page()
    await context.close()
