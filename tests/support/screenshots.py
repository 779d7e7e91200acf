"""The pictures of the documents, made of a running fleet: `python -m tests.support.screenshots`.

Two pods and two workers with the bundled model on a Valkey of their own, a real Chromium, and
`millstream` itself. It takes some minutes on two cores; docs/img is written only when all is done.
"""

import asyncio
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx
from playwright.async_api import Browser, Page, async_playwright, expect
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from tests.pages.chat import ChatPage
from tests.pages.conftest import CHROMIUM
from tests.support.local_fleet import Api, LocalFleet, clean_environment
from tests.support.readme import ROOT
from tests.support.redis_servers import SingleServer

from millstream.fleet.top import draw

IMAGES = ROOT / "docs" / "img"
MOST_BYTES = 200_000
ANSWER_S = 240

CAPITAL = "What is the capital of France?"
CODE = "Write a Python function that adds two numbers."
STORY = "Write a story about a miller and a river."
SETTINGS = {"engine": "transformers", "max_concurrent": 8, "lease_s": 8, "keepalive_s": 0.5}


async def _chat(page: Page, url: str, *questions: str) -> ChatPage:
    """A conversation, with answers that are the same each time."""
    chat = await ChatPage(page).open(url)
    await page.get_by_role("button", name="Settings", exact=True).click()
    await page.get_by_label("Temperature").fill("0")
    await page.get_by_label("Most tokens").fill("80")
    await page.get_by_role("button", name="Save", exact=True).click()
    for question in questions:
        await chat.ask(question)
        await chat.ended(within_s=ANSWER_S)
    return chat


async def _chats(browser: Browser, url: str, folder: Path) -> None:
    for name, theme, size in (
        ("chat-light", "light", (1100, 820)),
        ("chat-dark", "dark", (1100, 820)),
        ("chat-phone", "light", (390, 720)),
    ):
        page = await browser.new_page(
            color_scheme=theme,  # type: ignore[arg-type]
            viewport={"width": size[0], "height": size[1]},
        )
        await _chat(page, url, CAPITAL, CODE)
        await page.screenshot(path=folder / f"{name}.png")
        await page.close()


async def _resumed(browser: Browser, fleet: LocalFleet, folder: Path) -> None:
    """Worker and pod are killed in the middle of an answer, which shows that it went on."""
    pod = next(process for process in fleet.processes if isinstance(process, Api))
    page = await browser.new_page(viewport={"width": 1100, "height": 720})
    chat = await _chat(page, pod.url)
    await chat.ask(STORY)
    await expect(chat.text).to_have_text(re.compile(r"(\S+\s+){10}"), timeout=ANSWER_S * 1000)
    (await fleet.owner((await chat.stored())[-1]["task"])).signal(signal.SIGKILL)
    pod.signal(signal.SIGKILL)
    await pod.ended()
    await fleet.api(port=pod.url.rpartition(":")[2])
    await chat.ended(within_s=ANSWER_S)
    await expect(chat.marks).to_have_text(["rejoined", "moved to another worker"])
    await page.screenshot(path=folder / "chat-resumed.png")
    await page.close()


async def _fleet(browser: Browser, fleet: LocalFleet, folder: Path) -> None:
    """The fleet page and `top` under a load that comes and goes, and a worker that is drained."""
    url = next(p.url for p in fleet.processes if isinstance(p, Api) and p.popen.poll() is None)
    page = await browser.new_page(viewport={"width": 1100, "height": 1060})
    await page.goto(f"{url}/fleet")
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for count in (6, 14, 10):
            for _ in range(count):
                await http.post("/tasks", json={"prompt": STORY, "max_tokens": 60})
            await page.wait_for_timeout(8_000)
        await page.get_by_role("button", name="Drain worker").first.click()
        await page.get_by_role("button", name="Drain it").click()
        await expect(page.locator("#events")).to_contain_text("left.", timeout=20_000)
        await fleet.worker(within_s=ANSWER_S)  # as a supervisor would
        for _ in range(10):
            await http.post("/tasks", json={"prompt": STORY, "max_tokens": 60})
        await page.wait_for_timeout(5_000)
        view = (await http.get("/fleet.json")).json()
    await page.screenshot(path=folder / "fleet.png")
    await page.close()
    console = _console(112)
    console.print(Text("$ millstream top", "bold"))
    console.print(draw(view, url, time.time()))
    _save(console, folder / "top.svg", "millstream top")


async def _terminal(url: str, folder: Path) -> None:
    words = ("chat", "--url", url, "--temperature", "0")
    asking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millstream", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=clean_environment(),
    )
    out, _ = await asking.communicate(CAPITAL.encode())
    assert asking.returncode == 0
    console = _console(88)
    console.print(Text(f'$ echo "{CAPITAL}" | millstream chat', "bold"))
    console.print(Text(out.decode().strip()))
    _save(console, folder / "terminal-chat.svg", "millstream chat")


def _console(width: int) -> Console:
    return Console(record=True, width=width, file=Path("/dev/null").open("w"), force_terminal=True)


def _save(console: Console, path: Path, title: str) -> None:
    svg = console.export_svg(title=title, theme=MONOKAI)
    # Rich names fonts of a CDN; the reader's own will do.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), "utf-8")


async def main() -> None:
    """Make them all, then put them in their place."""
    assert CHROMIUM is not None, "no chromium: apt install chromium"
    with tempfile.TemporaryDirectory() as name:
        folder, pictures = Path(name), Path(name) / "img"
        pictures.mkdir()
        valkey = SingleServer(folder / "valkey")
        valkey.start()
        try:
            async with (
                LocalFleet(valkey.fresh_url(), folder, **SETTINGS) as fleet,
                async_playwright() as playwright,
            ):
                await asyncio.gather(fleet.api(), fleet.api())
                for _ in range(2):
                    await fleet.worker(within_s=ANSWER_S)
                browser = await playwright.chromium.launch(
                    executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
                )
                try:
                    await _chats(browser, fleet.url, pictures)
                    await _terminal(fleet.url, pictures)
                    await _resumed(browser, fleet, pictures)
                    await fleet.worker(within_s=ANSWER_S)
                    await _fleet(browser, fleet, pictures)
                except BaseException:
                    print(fleet.logs())  # noqa: T201
                    raise
                finally:
                    await browser.close()
        finally:
            valkey.kill()
        for picture in sorted(pictures.iterdir()):
            assert picture.stat().st_size < MOST_BYTES, picture
            shutil.copy(picture, IMAGES / picture.name)
            print(f"{picture.name}: {picture.stat().st_size // 1000} kB")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
