"""Bad input gets OpenAI's error body naming the field, stores nothing, and harms no one."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.routes import asking, making_routes

USER = [{"role": "user", "content": "x"}]

CHAT_CASES: dict[str, tuple[Any, int, str | None, str | None]] = {
    "no messages": ({}, 400, "messages", "missing_required_parameter"),
    "empty messages": ({"messages": []}, 400, "messages", None),
    "messages no list": ({"messages": "hi"}, 400, "messages", None),
    "no role": ({"messages": [{"content": "x"}]}, 400, "messages[0].role", None),
    "bad role": ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", None),
    "content number": ({"messages": [{"role": "user", "content": 5}]}, 400,
                       "messages[0].content", None),
    "content null": ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0]", None),
    "image part": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
                   "messages[0].content[0].type", None),
    "unknown model": ({"messages": USER, "model": "gpt-9"}, 404, "model", "model_not_found"),
    "model number": ({"messages": USER, "model": 3}, 400, "model", None),
    "model forged": ({"messages": USER, "model": "x\ndata: evil"}, 404, "model", None),
    "temperature text": ({"messages": USER, "temperature": "1"}, 400, "temperature", None),
    "temperature high": ({"messages": USER, "temperature": 2.5}, 400, "temperature", None),
    "temperature bool": ({"messages": USER, "temperature": True}, 400, "temperature", None),
    "top_p zero": ({"messages": USER, "top_p": 0}, 400, "top_p", None),
    "max_tokens zero": ({"messages": USER, "max_tokens": 0}, 400, "max_tokens", None),
    "max_tokens huge": ({"messages": USER, "max_tokens": 10**9}, 400, "max_tokens", None),
    "completion tokens": ({"messages": USER, "max_completion_tokens": 10**9}, 400,
                          "max_completion_tokens", None),
    "max_tokens float": ({"messages": USER, "max_tokens": 1.5}, 400, "max_tokens", None),
    "seed huge": ({"messages": USER, "seed": 2**63}, 400, "seed", None),
    "n seventeen": ({"messages": USER, "n": 17}, 400, "n", None),
    "n zero": ({"messages": USER, "n": 0}, 400, "n", None),
    "stop empty": ({"messages": USER, "stop": ""}, 400, "stop", None),
    "stop too many": ({"messages": USER, "stop": ["a"] * 17}, 400, "stop", None),
    "tools": ({"messages": USER, "tools": [{"type": "function"}]}, 400, "tools", "invalid_value"),
    "tools zero": ({"messages": USER, "tools": 0}, 400, "tools", "invalid_value"),
    "audio false": ({"messages": USER, "audio": False}, 400, "audio", "invalid_value"),
    "no such field": ({"messages": USER, "tols": []}, 400, "tols", "unknown_parameter"),
    "tool calls": ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400,
                   "messages[0].tool_calls", None),
    "a tool's answer": ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role",
                        None),
    "top_logprobs alone": ({"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", None),
    "bias huge": ({"messages": USER, "logit_bias": {"1": 1e9}}, 400, "logit_bias.1", None),
    "biases": ({"messages": USER, "logit_bias": {str(at): 1 for at in range(1025)}}, 400,
               "logit_bias", "invalid_value"),
    "json mode": ({"messages": USER, "response_format": {"type": "json_object"}}, 400,
                  "response_format", None),
    "options without stream": ({"messages": USER, "stream_options": {}}, 400,
                               "stream_options", None),
    "prompt too long": ({"messages": [{"role": "user", "content": "x" * 300_000}]}, 400,
                        "messages", "prompt_too_long"),
    "n true": ({"messages": USER, "n": True}, 400, "n", None),
    "stop object": ({"messages": USER, "stop": {}}, 400, "stop", None),
    "message number": ({"messages": [5]}, 400, "messages[0]", None),
    "not an object": ([1], 400, None, "invalid_json"),
}  # fmt: skip

RAW_CASES: dict[str, tuple[bytes, int, str | None]] = {
    "nan": (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, "temperature"),
    "bias nan": (b'{"messages":[],"logit_bias":{"1":NaN}}', 400, "logit_bias"),
    "infinity": (b'{"messages":[],"top_p":-Infinity}', 400, "top_p"),
    "overflow": (b'{"messages":[],"temperature":1e400}', 400, "temperature"),
    "surrogate": (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "messages"),
    "surrogate key": (b'{"\\ud800":"\\ud800"}', 400, "?"),
    "deep": (b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "messages"),
    "deep open": (b"[" * 20_000, 400, None),
    "cut": (b'{"messages":[', 400, None),
    "empty": (b"", 400, None),
    "not utf-8": (b'{"messages":"\xff"}', 400, "messages"),
    "a line break in a string": (b'{"stream":false,"messages":"a\nb"}', 400, "messages"),
    "four hundred digits": (b'{"messages":[],"seed":' + b"9" * 400 + b"}", 400, "seed"),
    "five thousand digits": (b'{"messages":[],"seed":' + b"9" * 5_000 + b"}", 400, "seed"),
    "a comma too many": (b'{"messages":[],"seed":NaN,,}', 400, "seed"),
    "single quotes": (b"{'seed':NaN}", 400, None),
    # Each of these held a pod up for seconds while every fault in it was written down.
    "crowd of parts": (
        b'{"messages":[{"role":"user","content":[' + b'{"a":1},' * 60_000 + b'{"a":1}]}]}',
        400,
        "messages[0].content[0].type",
    ),
    "crowd of stops": (b'{"messages":[],"stop":[' + b"1," * 120_000 + b"1]}", 400, "?"),
    # And these while the values were made.
    "multitude of messages": (b'{"messages":[' + b"[]," * 1_000_000 + b"[]]}", 400, "messages"),
    "multitude of names": (
        b'{"messages":[' + b'{"\\"a":"[],"},' * 200_000 + b"{}]}",
        400,
        "messages",
    ),
    "multitude that ends early": (b'{"messages":[' + b"[]," * 1_000_000, 400, None),
    "crowd of fields": (
        b"{" + b",".join(b'"f%d":1' % number for number in range(120_000)) + b"}",
        400,
        None,
    ),
    "crowd of fields, the last no number": (
        b"{" + b",".join(b'"f%d":1' % number for number in range(60_000)) + b',"seed":NaN}',
        400,
        None,
    ),
    "crowd in a message": (
        b'{"messages":[{' + b",".join(b'"f%d":1' % number for number in range(120_000)) + b"}]}",
        400,
        "messages",
    ),
    "ten megabytes": (b'{"messages":"' + b"x" * 10_000_000 + b'"}', 413, None),
}


@pytest.mark.timeout(90)  # some 30 cases to each route
async def test_every_bad_request_is_told_its_fault(fleet: LocalFleet) -> None:
    api = await fleet.api()
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=10) as http:
        for name, (body, status, param, code) in CHAT_CASES.items():
            answer = await http.post("/v1/chat/completions", content=json.dumps(body))
            check(name, answer, status, param, code)
        routes = await making_routes(http)
        for name, (raw, status, param) in RAW_CASES.items():
            for path in routes:
                named = param if path in ("/v1/chat/completions", "/tasks") else "?"
                answer = await http.post(path, content=raw)
                check(f"{name} to {path}", answer, status, named, None)

        async def endless():
            for _ in range(64):
                yield b"x" * 1_000_000

        for path in routes:
            answer = await http.post(path, content=endless())
            check("chunked", answer, 413, None, "request_too_large")
            answer = await http.post(path, files={"file": b"x"})
            check("multipart", answer, 400, "Content-Type", "unsupported_content_type")
            answer = await http.post(
                path, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}
            )
            check("gzip", answer, 400, "Content-Encoding", "unsupported_content_encoding")
            for key in (b"", b"a" * 256, b"a\x01b", b"\x7f", b"a\tb"):
                headers = [(b"Idempotency-Key", key)]
                answer = await http.post(path, json=asking(path, "a"), headers=headers)
                assert answer.status_code == 400, (path, key)
            # A deep value where text is meant, and what only looks like a number.
            text = "[" * 500 + "]" * 500
            for value in (f'{{"prompt": {text}}}', '{"prompt": 1e999}', '{"prompt": -0.0}'):
                answer = await http.post(path, content=value)
                check(f"{value[:20]} to {path}", answer, 400, "?", None)
        answer = await http.post("/v1/responses", json={"input": []})
        check("no input", answer, 400, "input", None)
        assert "at least 1 item" in answer.json()["error"]["message"]
        answer = await http.post("/tasks", json={"prompt": "a", "messages": USER})
        check("both", answer, 400, "prompt", None)
        answer = await http.post("/tasks", json={})
        check("neither", answer, 400, "messages", None)

        assert [key async for key in fleet.redis.scan_iter("*:task:*")] == []
        good = await http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2})
        assert good.json()["usage"]["completion_tokens"] == 2


def check(
    name: str, answer: httpx.Response, status: int, param: str | None, code: str | None
) -> None:
    assert answer.status_code == status, f"{name}: {answer.text}"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, name
    assert error["type"] == "invalid_request_error", name
    assert param == "?" or error["param"] == param, f"{name}: {error}"
    assert answer.elapsed.total_seconds() < 5, name
    assert error["message"], name
    assert code is None or error["code"] == code, f"{name}: {error}"


async def test_what_a_worker_refuses_is_named_as_it_was_asked(fleet: LocalFleet) -> None:
    pod, _ = await asyncio.gather(fleet.api(), fleet.worker())
    # What `/chat` is given as a prompt is a message to its worker.
    named = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/chat": "messages"}
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        for path in await making_routes(http):
            answer = await http.post(path, json=asking(path, "@fake {no json}\nx"))
            told = await http.get(f"/tasks/{answer.headers['x-task-id']}/stream")
            error = sse.parse(told.text)[-1].json["error"]
            assert error["param"] == named.get(path, "prompt"), path
            if path in ("/v1/chat/completions", "/v1/completions", "/generate"):
                assert (answer.status_code, answer.json()["error"]) == (400, error), path
    await fleet.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_beyond_the_context_is_a_400(fleet: LocalFleet, stream: bool) -> None:
    # A million words of two characters: the fake engine's context holds as many tokens.
    api = await fleet.api(max_prompt_chars=3_000_000)
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        body = {"messages": [{"role": "user", "content": "a " * 1_000_001}], "stream": stream}
        answer = await http.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:  # the worker took longer than the headers may wait
            assert stream
            error = json.loads(answer.text.split("data: ")[-1])["error"]
        else:
            assert answer.status_code == 400
            error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    await fleet.quiet()


async def test_errors_outside_routes_have_the_same_shape_and_cors(fleet: LocalFleet) -> None:
    api = await fleet.api()
    async with httpx.AsyncClient(base_url=api.url) as http:
        origin = {"Origin": "http://localhost:3000"}
        for answer, status in (
            (await http.get("/nowhere", headers=origin), 404),
            (await http.put("/tasks", headers=origin), 405),
            (await http.post("/tasks", content=b"{", headers=origin), 400),
            (await http.get("/tasks/nope", headers=origin), 404),
            (await http.post("/tasks", json={"prompt": "x"}, headers=origin), 503),
            (await http.get("/ready", headers=origin), 503),
        ):
            assert answer.status_code == status, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers
            assert (status != 503) or int(answer.headers["retry-after"]) >= 1
        preflight = await http.options(
            "/tasks", headers={**origin, "Access-Control-Request-Method": "POST"}
        )
        assert preflight.status_code == 200


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/responses/resp_x", "DELETE, GET"),
        ("/tasks", "POST"),
        ("/v1/chat/completions", "POST"),
        ("/chat", "GET, POST"),
        ("/static/none.js", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    fleet: LocalFleet, path: str, allowed: str
) -> None:
    """All of the path's, where several routes share it."""
    api = await fleet.api()
    async with httpx.AsyncClient(base_url=api.url) as http:
        answer = await http.put(path)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.headers["allow"] == allowed


async def test_what_is_no_http_gets_the_same_shape_and_a_bound(fleet: LocalFleet) -> None:
    api = await fleet.api()
    host, port = "127.0.0.1", int(api.url.rpartition(":")[2])

    async with httpx.AsyncClient(base_url=api.url) as http:
        usual = (await http.get("/nowhere", headers={"Origin": "http://localhost"})).headers
    # What differs by the request and the moment, and what is only read by who was let in.
    varying = {"content-length", "connection", "date", "vary", "access-control-expose-headers"}
    expected = {name: value for name, value in usual.items() if name not in varying}
    assert {"x-content-type-options", "content-security-policy"} < set(expected)

    async def say(data: bytes) -> tuple[str, dict[str, Any]]:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        assert {name: headers.get(name) for name in expected} == expected
        return head.split(b"\r\n")[0].decode(), json.loads(body)["error"]

    status, error = await say(b"nonsense\r\n\r\n")
    assert (status, error["code"]) == ("HTTP/1.1 400 Bad Request", "invalid_http")
    status, error = await say(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000)
    assert (status, error["code"]) == (
        "HTTP/1.1 431 Header Fields Too Large", "headers_too_large",
    )  # fmt: skip
    # Two requests on one connection, each with a head of some size: counted one by one.
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000 + b"\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request + b"\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b'"ok"}'), 10)).startswith(b"HTTP/1.1 200")
    writer.write(request + b"Connection: close\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_taken_port_is_told_in_one_line(fleet: LocalFleet) -> None:
    api = await fleet.api()
    port = api.url.rpartition(":")[2]
    second = fleet.start_api(port=port)
    assert await second.ended() == 1
    (line,) = second.text().splitlines()
    assert port in line
    assert len(await fleet.scripts.roster("{ms}:apis", ttl_s=60)) <= 1
