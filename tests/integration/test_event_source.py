"""EventSource and `fetch` in a real browser, and the reconnects that an EventSource makes."""

import asyncio
import json
import signal
from functools import partial
from urllib.parse import urlencode, urlsplit

import httpx
from tests.support import sse
from tests.support.browser import Browser, needs_browser
from tests.support.link import Way
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually, until

from millstream.fleet.chaos.link import Link

EVENTS = {"Accept": "text/event-stream"}


def directed(prompt: str = "hello", **directive: object) -> str:
    return f"@fake {json.dumps(directive)}\n{prompt}"


async def tasks(fleet: LocalFleet) -> set[bytes]:
    return {key async for key in fleet.redis.scan_iter("*:task:*")}


def text_of(frames: list[sse.Frame]) -> str:
    return "".join(frame.json["token"] for frame in frames)


SCRIPT = """
    const base = %s, query = %s;
    const seen = [], ids = [];
    let opened = 0, errors = 0;
    const source = new EventSource(base + "/chat?" + query);
    source.onopen = () => opened++;
    source.onmessage = event => { seen.push(JSON.parse(event.data)); ids.push(event.lastEventId); };
    // It never closes by itself: only the 204 after the end makes it give up.
    await new Promise(done => source.onerror = () => {
        errors++;
        if (source.readyState === EventSource.CLOSED) done();
    });

    const stopping = new AbortController();
    const answer = await fetch(base + "/generate/stream", {
        method: "POST",
        headers: {"Content-Type": "application/json"},
        body: JSON.stringify({prompt: '@fake {"tokens": 100000, "rate": 20}\\nlong'}),
        signal: stopping.signal,
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    while (!text.includes("/3\\n")) text += (await reader.read()).value;
    stopping.abort();

    // What a page of another site can do without asking first.
    await fetch(base + "/chat?prompt=forged", {
        mode: "no-cors", headers: {Accept: "text/event-stream"}
    }).catch(() => {});  // it may not even see that it was refused
    await new Promise(done => {
        const image = new Image();
        image.onerror = done;
        image.src = base + "/chat?prompt=forged";
    });
    return {seen, ids, opened, errors, stopped: answer.headers.get("x-task-id")};
"""


@needs_browser
async def test_chromium_resumes_the_same_task_until_its_end(fleet: LocalFleet) -> None:
    """Cut twice, once by the death of its pod: one task, each token once, and then it stops."""
    # The page is of another origin, which a fleet without keys lets in only if told so.
    pods = await asyncio.gather(*(fleet.api(cors_origins="*") for _ in range(2)))
    await fleet.worker()
    ports = [urlsplit(pod.url).port for pod in pods]
    way = Way(partial(asyncio.open_connection, "127.0.0.1", ports[0]))
    texts = [f" word{n}" for n in range(60)]
    fields = {"prompt": directed(texts=texts, rate=15)}
    async with (
        httpx.AsyncClient(base_url=pods[1].url, timeout=25) as http,
        Link(way) as link,
    ):
        before = await tasks(fleet)
        base = link.url.replace("redis", "http")
        browser = Browser(SCRIPT % (json.dumps(base), json.dumps(urlencode(fields))))
        looking = asyncio.create_task(browser.run())

        async def new() -> set[bytes]:
            return await tasks(fleet) - before

        async def grown(to: int) -> bool:
            return int(await fleet.redis.hget(key, "seq") or 0) >= to

        (key,) = await eventually(new, within_s=25, what="task of the EventSource")
        await eventually(lambda: grown(10), what="ten tokens")
        connections = way.made
        assert link.connections >= 1
        link.reset()
        await until(lambda: way.made > connections)
        count = int(await fleet.redis.hget(key, "seq") or 0)
        await eventually(lambda: grown(count + 5), what="some tokens more")
        way.connect = partial(asyncio.open_connection, "127.0.0.1", ports[1])
        pods[0].signal(signal.SIGKILL)
        report = await looking
        made = {name.decode().rpartition(":")[2] for name in await new()}

        async def ended() -> bool:
            state = (await http.get(f"/tasks/{report['stopped']}")).json()["status"]
            return state == "cancelled"

        await eventually(ended, what="the aborted fetch's end")
    task_id = key.decode().rpartition(":")[2]
    assert made == {task_id, report["stopped"]}
    assert report["opened"] == 3
    assert report["ids"] == [f"{task_id}/{n}" for n in range(62)]
    assert "".join(value["token"] for value in report["seen"]) == "".join(texts)
    assert [value["finished"] for value in report["seen"]] == [False] * 61 + [True]
    await fleet.quiet()


async def test_who_does_not_come_back_ends_the_task(fleet: LocalFleet) -> None:
    """One closes its EventSource, one comes back to another pod: only the first task ends."""
    pods = await asyncio.gather(fleet.api(), fleet.api())
    await fleet.worker()
    params = {"prompt": directed(tokens=250, rate=20)}
    async with httpx.AsyncClient(timeout=25) as http:

        async def first_frames(url: str) -> list[sse.Frame]:
            seen: list[sse.Frame] = []
            async with http.stream("GET", f"{url}/chat", params=params, headers=EVENTS) as answer:
                async for frame in sse.frames(answer.aiter_lines()):
                    seen.append(frame)
                    if len(seen) == 5:
                        break
            return seen

        gone, cut = await asyncio.gather(*(first_frames(pods[0].url) for _ in range(2)))
        headers = {**EVENTS, "Last-Event-ID": cut[-1].id or ""}
        answer = await http.get(f"{pods[1].url}/chat", params=params, headers=headers)
        frames = cut + sse.parse(answer.text)
        task_id = cut[0].json["task_id"]
        assert [frame.id for frame in frames] == [f"{task_id}/{n}" for n in range(252)]
        assert frames[-1].json["finished"]

        async def ended() -> bool:
            state = await http.get(f"{pods[1].url}/tasks/{gone[0].json['task_id']}")
            assert state.json()["status"] in ("running", "cancelled")
            return state.json()["status"] == "cancelled"

        await eventually(ended, what="end of the task that was left")
    await fleet.quiet()


async def test_a_pod_that_goes_sends_event_sources_on(fleet: LocalFleet) -> None:
    """It asks them to come back, which they do elsewhere; the task is not ended."""
    pods = await asyncio.gather(fleet.api(), fleet.api())
    await fleet.worker()
    params = {"prompt": directed(tokens=60, rate=20)}
    async with httpx.AsyncClient(timeout=25) as http:
        frames: list[sse.Frame] = []
        url = f"{pods[0].url}/generate/stream"
        lines: list[str] = []
        async with http.stream("GET", url, params=params, headers=EVENTS) as answer:
            parser = sse.Parser()
            async for line in answer.aiter_lines():
                lines.append(line)
                if frame := parser.feed(line):
                    frames.append(frame)
                if len(frames) == 5 and pods[0].popen.poll() is None:
                    pods[0].signal(signal.SIGTERM)
        assert parser.retry == 500
        assert lines[-2:] == ["retry: 500", ""]
        assert await pods[0].ended() == 0
        headers = {**EVENTS, "Last-Event-ID": frames[-1].id or ""}
        url = f"{pods[1].url}/generate/stream"
        frames += sse.parse((await http.get(url, params=params, headers=headers)).text)
    assert [(frame.id or "").partition("/")[2] for frame in frames] == [str(n) for n in range(62)]
    assert frames[-1].json["finished"]
    assert len(text_of(frames).split()) == 60
    await fleet.quiet()
