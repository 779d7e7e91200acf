"""The bundled language model in 8 and in 16 bits: a failover changes no text there either."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.redis_servers import Servers

pytest.importorskip("torch")

from tests.support.transformers_kernels import where_packed

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(90),  # the first start may have to convert the weights
]

PATH = "/v1/chat/completions"
BODIES = [
    {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": f"Write a story about a {hero}."}],
        "max_tokens": 16,
        **sampling,
    }
    for hero, sampling in [
        ("miller", {"temperature": 0}),
        ("river", {"temperature": 0.8, "top_p": 0.95, "seed": 11}),
        ("millstone", {"temperature": 0.8, "seed": 12}),
        ("donkey that would not walk", {"temperature": 0}),
    ]
]


async def stream(
    http: httpx.AsyncClient, body: dict[str, object], underway: asyncio.Event
) -> tuple[str, str]:
    """Id and text of an answer; says when five of its frames have come."""
    frames: list[sse.Frame] = []
    async with http.stream("POST", PATH, json={**body, "stream": True}) as answer:
        async for frame in sse.frames(answer.aiter_lines()):
            frames.append(frame)
            if len(frames) == 5:
                underway.set()
    return answer.headers["x-task-id"], sse.chat_text(frames)


@where_packed("int8", "bfloat16")
async def test_kill_9_of_the_worker_changes_no_word(
    servers: Servers, tmp_path: Path, dtype: str
) -> None:
    """One at a time and undisturbed, or together and on two workers: the same texts."""
    async with (
        LocalFleet(servers.fresh_url(), tmp_path, engine="transformers", dtype=dtype) as fleet,
        httpx.AsyncClient(timeout=60) as http,
    ):
        http.base_url = (await fleet.api(keepalive_s=0.5)).url
        first = await fleet.worker(within_s=60)
        whole = [(await http.post(PATH, json=body)).json() for body in BODIES]

        underway = [asyncio.Event() for _ in BODIES]
        streams = [
            asyncio.create_task(stream(http, body, reached))
            for body, reached in zip(BODIES, underway, strict=True)
        ]
        await asyncio.gather(*(reached.wait() for reached in underway))
        first.signal(signal.SIGKILL)
        await first.ended()
        await fleet.worker(within_s=28)
        told = await asyncio.gather(*streams)
        tasks = [(await http.get(f"/tasks/{task_id}")).json() for task_id, _ in told]
    assert [task["attempts"] for task in tasks] == [2, 2, 2, 2]
    texts = [answer["choices"][0]["message"]["content"] for answer in whole]
    assert [text for _, text in told] == texts
    assert len(set(texts)) == 4
    assert [task["usage"] for task in tasks] == [answer["usage"] for answer in whole]
