"""The chat page in a real browser: what its readers do, and what models may not do to them."""

import re

import pytest
from playwright.async_api import BrowserContext, Page, Route, expect
from tests.pages.chat import ChatPage, script
from tests.support.local_fleet import LocalFleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

MARKDOWN = """# A title

Some **bold** and `code`, [a link](https://example.com).

1. one
2. two

```python
def f(x):
    return x < 1
```

| a | b |
|---|---|
| 1 | 2 |

It costs $5 and $6, says my_price_of(a__b__c) and _not_ d_e."""


async def test_an_answer_is_drawn_from_its_markdown(chat: ChatPage) -> None:
    await chat.ask(script(MARKDOWN, rate=200))
    await chat.ended()
    answer = chat.text
    await expect(answer.locator("h1")).to_have_text("A title")
    await expect(answer.locator("strong")).to_have_text("bold")
    await expect(answer.locator("a")).to_have_attribute("href", "https://example.com")
    await expect(answer.locator("ol > li")).to_have_text(["one", "two"])
    await expect(answer.locator("pre code")).to_have_text("def f(x):\n    return x < 1")
    await expect(answer.locator("td")).to_have_text(["1", "2"])
    await expect(answer.locator("p").last).to_have_text(
        "It costs $5 and $6, says my_price_of(a__b__c) and not d_e."
    )
    await expect(answer.locator("em")).to_have_text(["not"])
    turn = (await chat.stored())[-1]
    assert turn["content"] == MARKDOWN  # exactly, whatever it looks like
    assert turn["state"] == "completed"
    tokens = -(-len(MARKDOWN) // 4)
    assert turn["usage"]["completion_tokens"] == tokens
    await expect(chat.answer).to_contain_text(f"{tokens} tokens · ")


HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "![x](https://elsewhere.example/secret.png)",
    "![x](javascript:window.hit=1)",
    "<svg/onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<a href='javascript:window.hit=1'>x</a>",
    "```\n<script>window.hit = 1</script>\n```",
    "`<img src=x onerror=window.hit=1>`",
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <script>window.hit=1</script> | 2 |",
    '<https://example.com/"onmouseover="window.hit=1>',
    "$$<img src=x onerror=window.hit=1>$$",
    "> " * 40 + "<img src=x onerror=window.hit=1>",
    "- " * 40 + "deep",
    "*_" * 60 + "[x](javascript:window.hit=1)",
    "\u0000\u202e<b>x</b>",
]


async def test_what_a_model_writes_never_runs(chat: ChatPage, shared_fleet: LocalFleet) -> None:
    asked: list[str] = []
    chat.page.on("request", lambda request: asked.append(request.url))
    await chat.ask(script("\n\n".join(HOSTILE), size=3))
    await chat.ended()
    turn = (await chat.stored())[-1]
    assert turn["content"] == "\n\n".join(HOSTILE)
    for tag in ("script", "img", "iframe", "svg", "b"):
        assert await chat.text.locator(tag).count() == 0
    links = await chat.text.locator("a[href]").all()
    for link in links:
        assert re.match("https?://", await link.get_attribute("href") or "")
        assert await link.get_attribute("rel") == "noopener noreferrer nofollow"
    for name in await chat.text.evaluate(
        "root => [...root.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())"
    ):
        assert not name.startswith("on")
    assert await chat.page.evaluate("() => window.hit") is None
    assert all(url.startswith(shared_fleet.url) for url in asked)
    # A question is the reader's own text, and a title made of it no more than text.
    await chat.ask("<img src=x onerror=window.hit=1>")
    await chat.ended()
    assert await chat.page.evaluate("() => window.hit") is None


async def test_a_stop_ends_the_answer_and_keeps_its_beginning(chat: ChatPage) -> None:
    words = " ".join(f"w{at}" for at in range(400))
    await chat.ask(script(words, rate=40))
    await chat.has("w3")
    await chat.page.keyboard.press("Escape")
    await chat.ended()
    await expect(chat.answer).to_contain_text("stopped")
    turn = (await chat.stored())[-1]
    assert turn["state"] == "cancelled"
    assert words.startswith(turn["content"])
    assert 0 < len(turn["content"]) < len(words)
    assert turn["usage"]["completion_tokens"] == len(turn["content"]) // 4


async def test_ten_more_are_asked_after_a_stop(chat: ChatPage) -> None:
    """A browser keeps six connections to a host: none may be left behind by a stop."""
    for number in range(10):
        await chat.ask(script(f"n{number} " * 400, rate=40))
        await chat.has(f"n{number}")
        await chat.stop.click()
        await chat.ended()
    await chat.ask(script("the last"))
    await chat.ended()
    await chat.has("the last")


async def test_a_conversation_goes_on_is_edited_and_retried(chat: ChatPage) -> None:
    bodies: list[dict[str, object]] = []
    chat.page.on(
        "request",
        lambda request: (
            bodies.append(request.post_data_json)
            if request.method == "POST" and request.url.endswith("/tasks")
            else None
        ),
    )
    await chat.ask(script("Untouched."))
    await chat.ended()
    assert bodies.pop()["temperature"] == 0.7
    await chat.page.get_by_role("button", name="New conversation").click()
    await chat.page.get_by_role("button", name="Settings").click()
    await chat.page.get_by_label("System prompt").fill("Be brief.")
    temperature = chat.page.get_by_label("Temperature")
    await expect(temperature).to_have_attribute("placeholder", "0.7")
    await temperature.fill("0.5")
    await chat.page.get_by_role("button", name="Save").click()
    await chat.ask(script("First answer."))
    await chat.ended()
    await chat.ask(script("Second answer."))
    await chat.ended()
    assert bodies[1]["temperature"] == 0.5  # it was 0.7, which is suggested
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": script("First answer.")},
        {"role": "assistant", "content": "First answer."},
        {"role": "user", "content": script("Second answer.")},
    ]
    await chat.page.get_by_role("button", name="Retry").last.click()
    await chat.ended()
    assert bodies[2] == bodies[1]
    await chat.page.get_by_role("button", name="Edit").first.click()
    await chat.ask(script("Another answer."))
    await chat.ended()
    assert [turn["content"] for turn in await chat.stored()] == [
        script("Another answer."),
        "Another answer.",
    ]


async def test_a_network_that_comes_and_goes(chat: ChatPage, context: BrowserContext) -> None:
    words = " ".join(f"w{at}" for at in range(200))
    await chat.ask(script(words, rate=40))
    await chat.has("w3")
    await context.set_offline(True)
    await expect(chat.answer).to_contain_text("Connection lost")
    await context.set_offline(False)
    await chat.ended()
    await expect(chat.text).to_have_text(words)
    await expect(chat.marks).to_have_text(["rejoined"])


async def test_a_question_sent_twice_is_one_task(chat: ChatPage) -> None:
    """The answer to the POST is lost, and it is sent again with the same key."""
    keys: list[str | None] = []

    async def lose_the_first(route: Route) -> None:
        keys.append(route.request.headers.get("idempotency-key"))
        if len(keys) == 1:
            await route.fetch()  # it arrives
            await route.abort()
        else:
            await route.continue_()

    await chat.page.route("**/tasks", lose_the_first)
    await chat.ask(script("Once."))
    await chat.ended()
    assert len(keys) == 2
    assert keys[0] == keys[1] is not None
    await expect(chat.text).to_have_text("Once.")


async def test_a_refused_question_says_why(chat: ChatPage) -> None:
    await chat.page.get_by_role("button", name="Settings").click()
    await chat.page.get_by_label("Most tokens").fill("100000000")
    await chat.page.get_by_role("button", name="Save").click()
    await chat.ask("Too much.")
    await chat.ended()
    await expect(chat.answer.locator(".error")).to_contain_text("tokens may be asked for")


async def test_conversations_are_kept_exported_and_deleted(
    chat: ChatPage, shared_fleet: LocalFleet
) -> None:
    await chat.ask(script("Kept."))
    await chat.ended()
    await chat.page.get_by_role("button", name="New conversation").click()
    await chat.ask(script("Newer."))
    await chat.ended()
    await ChatPage(chat.page).open(shared_fleet.url)
    titles = chat.page.locator("#conversations .title")
    await expect(titles).to_have_count(2)
    await titles.nth(1).click()
    await expect(chat.text).to_have_text("Kept.")
    await chat.page.get_by_role("button", name="Export").click()
    async with chat.page.expect_download() as download:
        await chat.page.get_by_role("button", name="This one as Markdown").click()
    saved = await (await download.value).path()
    assert saved.read_text().endswith("**fake**\n\nKept.\n")
    chat.page.on("dialog", lambda dialog: dialog.accept())
    await chat.page.get_by_role("button", name="Delete").first.click()
    await expect(titles).to_have_count(1)


async def test_a_long_answer_stays_smooth(chat: ChatPage) -> None:
    """10,000 tokens as fast as they come, in one list and one code block: no frame takes long.

    With `-s` it prints the figures of docs/pages.md.
    """
    await chat.page.evaluate(
        """() => {
          window.frames_ms = [];
          let last = performance.now();
          const look = (now) => {
            frames_ms.push(now - last);
            last = now;
            requestAnimationFrame(look);
          };
          requestAnimationFrame(look);
        }"""
    )
    lines = "".join(f"- item {at} **x** `y`\n" for at in range(1000))
    code = "```\n" + "".join(f"x{at} = {at}\n" for at in range(800)) + "```\n"
    text = (lines + "\n" + code + "\nThe end.")[:40_000]
    await chat.ask(script(text, rate=2000))
    await chat.ended(within_s=25)
    assert (await chat.stored())[-1]["content"] == text
    frames = sorted(await chat.page.evaluate("() => window.frames_ms"))
    p50, p90, p99 = (frames[int(len(frames) * share)] for share in (0.5, 0.9, 0.99))
    print(f"\n{len(frames)} frames: p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms")  # noqa: T201
    assert len(frames) > 20
    # Two shared cores: a bound on what would be a stall, not a measure of smoothness.
    assert p90 < 500


async def test_phone(phone: Page, shared_fleet: LocalFleet) -> None:
    chat = await ChatPage(phone).open(shared_fleet.url)
    await phone.evaluate("() => { document.querySelector('#model option').text = 'm'.repeat(40); }")
    await chat.ask(script("Narrow " * 40 + "\n\n```\n" + "x" * 300 + "\n```"))
    await chat.ended()
    page = phone
    assert await page.evaluate("() => document.documentElement.scrollWidth") <= 390
    await page.get_by_role("button", name="Menu").click()
    await expect(page.get_by_role("button", name="New conversation")).to_be_in_viewport()
    await expect(page.get_by_role("button", name="Delete")).to_be_in_viewport()
