"""The chat page as its reader uses it."""

import json
from typing import Any

from playwright.async_api import Page, expect


def script(text: str, *, size: int = 4, **options: Any) -> str:
    """A question that the fake engine answers with this text, some letters a token."""
    texts = [text[at : at + size] for at in range(0, len(text), size)]
    return "@fake " + json.dumps({"texts": texts, "tokens": len(texts), **options})


class ChatPage:
    """The chat page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.question = page.get_by_label("Message")
        self.answer = page.locator(".turn.assistant").last
        self.text = self.answer.locator(".answer")
        self.marks = self.answer.locator(".mark")
        self.stop = page.get_by_role("button", name="Stop", exact=True)

    async def open(self, url: str) -> "ChatPage":
        await self.page.goto(url)
        await self.page.wait_for_selector("#model option", state="attached")
        return self

    async def ask(self, text: str) -> None:
        await self.question.fill(text)
        await self.question.press("Enter")

    async def ended(self, within_s: float = 20) -> None:
        await expect(self.answer).to_have_attribute("aria-busy", "false", timeout=within_s * 1000)

    async def has(self, text: str, within_s: float = 20) -> None:
        await expect(self.text).to_contain_text(text, timeout=within_s * 1000)

    async def stored(self) -> list[dict[str, Any]]:
        """The turns of the conversations kept in the browser, of the newest one."""
        return await self.page.evaluate(
            """async () => {
              const result = (request) => new Promise((done) => {
                request.onsuccess = () => done(request.result);
              });
              const db = await result(indexedDB.open("millstream"));
              const all = db.transaction("conversations").objectStore("conversations").getAll();
              const rows = await result(all);
              db.close();
              return rows.sort((a, b) => b.updated - a.updated)[0].turns;
            }"""
        )
