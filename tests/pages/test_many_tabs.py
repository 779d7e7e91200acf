"""More tabs than a browser opens connections of HTTP/1.1 to a host (FAULTS B63)."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser
from tests.pages.chat import ChatPage, script
from tests.support.compose_cluster import ComposeCluster

# A minute beyond the usual limit: a machine without nginx installs it first.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

TABS = 7


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ComposeCluster]:
    """A pod and a worker behind the nginx of the profile `tls`."""
    async with ComposeCluster(MILLSTREAM_ENGINE="fake") as started:
        yield await started.up(nginx="nginx-tls")


async def test_seven_tabs_answer_at_once_over_http2(
    browser: Browser, cluster: ComposeCluster
) -> None:
    context = await browser.new_context(ignore_https_errors=True)
    try:
        tabs: list[ChatPage] = []
        for number in range(TABS):  # each is opened while those before it answer
            tab = await ChatPage(await context.new_page()).open(cluster.doors[0].tls_url)
            await tab.ask(script(f"tab{number} " * 300, rate=20))
            await tab.has(f"tab{number}")
            tabs.append(tab)
        for tab in tabs:
            assert await tab.answer.get_attribute("aria-busy") == "true"
        await asyncio.gather(*(tab.stop.click() for tab in tabs))
        await asyncio.gather(*(tab.ended() for tab in tabs))
    finally:
        await context.close()
