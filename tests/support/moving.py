"""Watches metrics of a fleet, scrape by scrape, for those that change."""

import asyncio
from collections.abc import Iterable

import httpx
from tests.support.exposition import scrape
from tests.support.monitoring import Selector
from tests.support.waiting import eventually


class Moving:
    """Which of these selectors have been seen at two values in one process."""

    def __init__(self, selectors: Iterable[Selector]) -> None:
        self.still = set(selectors)
        """Those that have not moved."""
        self._first: dict[str, dict[Selector, float]] = {}

    async def follow(self, url: str) -> None:
        """Look at a process, and from now on whenever something is to be seen."""
        self._first[url] = {}
        await self._look(url)

    async def seen(self, *texts: str) -> None:
        """Look until the selectors that are written so, or of metrics of this name, have moved."""

        async def look() -> bool:
            await asyncio.gather(*map(self._look, self._first))
            return not self._left(texts)

        try:
            await eventually(look, within_s=15)
        except AssertionError:
            raise AssertionError(f"{self._left(texts)} did not move") from None

    def _left(self, texts: Iterable[str]) -> list[str]:
        return [str(item) for item in self.still if {str(item), item.name} & {*texts}]

    async def _look(self, url: str) -> None:
        try:
            found = await scrape(url)
        except httpx.TransportError:  # it has ended
            return
        for selector in list(self.still):
            value = selector.value(found)
            if value is not None and value != self._first[url].setdefault(selector, value):
                self.still.discard(selector)
