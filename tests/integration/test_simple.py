"""`/chat` and `/generate` through a real pod, Valkey and worker."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVENTS = {"Accept": "text/event-stream"}


def directed(prompt: str = "hello", **directive: object) -> str:
    return f"@fake {json.dumps(directive)}\n{prompt}"


def client(fleet: LocalFleet) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=fleet.url, timeout=25)


async def tasks(fleet: LocalFleet) -> set[bytes]:
    return {key async for key in fleet.redis.scan_iter("*:task:*")}


def simple_text(frames: list[sse.Frame]) -> str:
    """The text of a stream that ended well; checks its shape on the way."""
    values = [frame.json for frame in frames]
    assert [value["finished"] for value in values] == [False] * (len(values) - 1) + [True]
    assert values[-1]["token"] == ""
    assert all(frame.event == "message" for frame in frames)
    return "".join(value["token"] for value in values)


@pytest.mark.parametrize("route", ["/chat", "/generate"])
async def test_stream_and_whole_give_the_same_text(shared_fleet: LocalFleet, route: str) -> None:
    body: dict[str, Any] = {"prompt": directed(tokens=30), "seed": 5, "max_new_tokens": 20}
    async with client(shared_fleet) as http:
        whole = await http.post(route, json={**body, "stream": False})
        assert whole.status_code == 200, whole.text
        answer = whole.json()
        assert set(answer) == {"task_id", "model", "text", "finish_reason", "usage"}
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 20
        assert whole.headers["x-task-id"] == answer["task_id"]
        stream = await http.post(route, json={**body, "stream": True})
        frames = sse.parse(stream.text)
        task_id = stream.headers["x-task-id"]
        assert stream.headers["cache-control"] == "no-store, no-transform"
        assert frames[0].json == {"task_id": task_id, "token": "", "finished": False}
        assert [frame.id for frame in frames] == [f"{task_id}/{n}" for n in range(22)]
        assert simple_text(frames) == answer["text"]
        ending = {"token": "", "finished": True, "finish_reason": "length"}
        assert frames[-1].json == {**ending, "usage": answer["usage"]}


async def test_defaults_and_what_prompt_means(shared_fleet: LocalFleet) -> None:
    """`/chat` streams and takes a prompt for a message; `/generate` does neither."""
    async with client(shared_fleet) as http:
        body = {"prompt": directed("one two", echo=True)}
        chat = await http.post("/chat", json=body)
        assert chat.headers["content-type"] == "text/event-stream"
        message = {"role": "user", "content": body["prompt"]}
        same = await http.post("/chat", json={"messages": [message], "stream": False})
        assert simple_text(sse.parse(chat.text)) == same.json()["text"] == "one two"
        plain = await http.post("/generate", json=body)
        assert plain.json()["text"] == "one two"
        stream = await http.post("/generate/stream", json=body)
        assert simple_text(sse.parse(stream.text)) == "one two"
        # A chat's template has tokens of its own.
        counts = [answer.json()["usage"]["prompt_tokens"] for answer in (same, plain)]
        assert counts[0] > counts[1]


async def test_get_is_for_event_sources_only(shared_fleet: LocalFleet) -> None:
    """What a browser sends by itself, or for `<img src>`, makes no task."""
    before = await tasks(shared_fleet)
    query = {"prompt": directed(tokens=3)}
    async with client(shared_fleet) as http:
        for route in ("/generate/stream", "/chat"):
            for headers, param in (
                ({}, "Accept"),
                ({"Accept": "text/html,*/*"}, "Accept"),
                ({"Accept": "image/avif,image/webp,*/*;q=0.8"}, "Accept"),
                ({**EVENTS, "Sec-Fetch-Mode": "no-cors"}, "Sec-Fetch-Mode"),
                ({**EVENTS, "Sec-Fetch-Mode": "navigate"}, "Sec-Fetch-Mode"),
            ):
                answer = await http.get(route, params=query, headers=headers)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert (await http.head(route, params=query, headers=EVENTS)).status_code == 405
        assert await tasks(shared_fleet) == before
        answer = await http.get("/generate/stream", params=query, headers=EVENTS)
        assert answer.headers["cache-control"] == "no-store, no-transform"
        assert len(simple_text(sse.parse(answer.text)).split()) == 3


async def test_the_query_takes_what_the_body_takes(shared_fleet: LocalFleet) -> None:
    fields = {"prompt": directed(texts=["a", "b c", "dd"]), "seed": 7, "temperature": 0.5}
    fields |= {"top_p": 0.9, "top_k": 5, "max_new_tokens": 9, "stop": ["zz", "dd"]}
    async with client(shared_fleet) as http:
        whole = await http.post("/generate", json={**fields, "model": "fake"})
        streamed = await http.get("/generate/stream", params=fields, headers=EVENTS)
    text = simple_text(sse.parse(streamed.text))
    assert text == whole.json()["text"]
    assert text.startswith("ab c")
    assert "dd" not in text


WRONG = {
    "neither": ({}, "messages"),
    "both": ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
    "unknown": ({"prompt": "x", "max_tokens": 5}, "max_tokens"),
    "too many tokens": ({"prompt": "x", "max_new_tokens": 10**9}, "max_new_tokens"),
    "too long": ({"prompt": "x" * 300_000}, "prompt"),
    "text for number": ({"prompt": "x", "top_k": "5"}, "top_k"),
    "no stream": ({"prompt": "x", "stream": False}, "stream"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_bad_field_is_named(shared_fleet: LocalFleet, case: str) -> None:
    body, param = WRONG[case]
    before = await tasks(shared_fleet)
    async with client(shared_fleet) as http:
        for route in ("/generate/stream", *(["/chat", "/generate"] * (case != "no stream"))):
            answer = await http.post(route, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
    assert await tasks(shared_fleet) == before


async def test_a_bad_parameter_is_named(shared_fleet: LocalFleet) -> None:
    async with client(shared_fleet) as http:
        for query, param in (
            ("", "prompt"),
            ("prompt=", "prompt"),
            ("prompt=a&prompt=b", "prompt"),
            ("prompt=x&max_new_tokens=1.5", "max_new_tokens"),
            ("prompt=x&temperature=nan", "temperature"),
            ("prompt=x&seed=" + "9" * 400, "seed"),
            ("prompt=x&stream=true", "stream"),
            ("prompt=x&idempotency_key=", "Idempotency-Key"),
        ):
            answer = await http.get(f"/generate/stream?{query}", headers=EVENTS)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), query


async def test_stop_and_failure_are_never_called_finished(shared_fleet: LocalFleet) -> None:
    async with client(shared_fleet) as http:
        body = {"prompt": directed(tokens=9, rate=20, error_at=6)}
        frames = sse.parse((await http.post("/generate/stream", json=body)).text)
        assert frames[-1].json["error"]["code"] == "max_attempts"
        assert not any(frame.json.get("finished") for frame in frames)
        assert len("".join(frame.json.get("token", "") for frame in frames).split()) == 5

        body = {"prompt": directed(tokens=100_000, rate=20), "stream": True}
        seen: list[sse.Frame] = []
        async with http.stream("POST", "/generate", json=body) as stream:
            async for frame in sse.frames(stream.aiter_lines()):
                seen.append(frame)
                if len(seen) == 4:
                    task_id = seen[0].json["task_id"]
                    stopped = await http.post(f"/generate/stream/{task_id}/stop")
                    assert stopped.json()["status"] == "cancelled"
        assert seen[-1].json["error"]["code"] == "cancelled"
        assert not any(frame.json.get("finished") for frame in seen)
        again = await http.post(f"/generate/stream/{task_id}/stop")
        assert again.json() == stopped.json()
    await shared_fleet.quiet()


async def test_resume_goes_on_with_the_same_task(shared_fleet: LocalFleet) -> None:
    """The last id stands for the whole request, whatever the query says; after the end: 204."""
    async with client(shared_fleet) as http:
        query = {"prompt": directed(tokens=12)}
        whole = sse.parse((await http.get("/chat", params=query, headers=EVENTS)).text)
        before = await tasks(shared_fleet)
        for route in ("/chat", "/generate/stream"):
            for at in (0, 1, 5, 12):
                headers = {**EVENTS, "Last-Event-ID": whole[at].id or ""}
                answer = await http.get(route, params=query, headers=headers)
                rest = sse.parse(answer.text)
                assert [f.id for f in rest if f.json["token"]] == [f.id for f in whole[at + 1 : -1]]
                assert simple_text(whole[: at + 1] + rest) if at == 0 else True
                assert rest[-1].json == whole[-1].json
            over = {**EVENTS, "Last-Event-ID": whole[-1].id or ""}
            assert (await http.get(route, params=query, headers=over)).status_code == 204
        # A library that repeats its POST, as fetch-event-source does.
        headers = {"Last-Event-ID": whole[4].id or ""}
        answer = await http.post("/generate/stream", json=query, headers=headers)
        assert [frame.id for frame in sse.parse(answer.text)] == [f.id for f in whole[5:]]
        assert await tasks(shared_fleet) == before


async def test_a_wrong_id_starts_nothing(shared_fleet: LocalFleet) -> None:
    async with client(shared_fleet) as http:
        query = {"prompt": directed(tokens=3)}
        first = sse.parse((await http.get("/chat", params=query, headers=EVENTS)).text)
        task_id = first[0].json["task_id"]
        before = await tasks(shared_fleet)
        for given, status, code in (
            ("t0-" + "a" * 26 + "/3", 404, "task_not_found"),
            ("nonsense/3", 404, "task_not_found"),
            (f"{task_id}/5", 400, "invalid_event_id"),
            (f"{task_id}/", 400, "invalid_event_id"),
            (task_id, 400, "invalid_event_id"),
            ("7", 400, "invalid_event_id"),
            ("/7", 400, "invalid_event_id"),
            ("x" * 9_000, 400, "invalid_event_id"),
        ):
            headers = {**EVENTS, "Last-Event-ID": given}
            answer = await http.get("/chat", params=query, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), given
        assert await tasks(shared_fleet) == before


async def test_a_key_in_the_query_makes_one_task(shared_fleet: LocalFleet) -> None:
    """For those who are cut before the first frame: no id, and still no second generation."""
    query = {"prompt": directed(tokens=5), "idempotency_key": "page 1"}
    async with client(shared_fleet) as http:
        answers = [await http.get("/chat", params=query, headers=EVENTS) for _ in range(2)]
        assert answers[0].headers["x-task-id"] == answers[1].headers["x-task-id"]
        other = {**query, "max_new_tokens": 2}
        conflict = await http.get("/chat", params=other, headers=EVENTS)
        assert conflict.status_code == 409


@pytest.mark.parametrize(("route", "stream"), [("/chat", True), ("/generate", False)])
async def test_a_client_that_goes_away_stops_its_task(
    shared_fleet: LocalFleet, route: str, stream: bool
) -> None:
    before = await tasks(shared_fleet)
    async with client(shared_fleet) as http:
        body = {"prompt": directed(tokens=100_000, rate=20), "stream": stream}
        request = asyncio.create_task(http.post(route, json=body))

        async def new() -> set[bytes]:
            return await tasks(shared_fleet) - before

        (key,) = await eventually(new, what="task")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    async def ended() -> bool:
        return await shared_fleet.redis.hget(key, "state") == b"cancelled"

    await eventually(ended, what="stop")
    await shared_fleet.quiet()
