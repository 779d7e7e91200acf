"""F5: a reader that takes a byte a second costs nobody anything, is cut, and can go on."""

import asyncio
import json
import re
import socket
from contextlib import suppress
from itertools import pairwise

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import prompt, submit, undisturbed, watch
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

from millstream.shared.keys import APIS

MANY = 100_000
FAST = 20_000
TOKENS, RATE, NORMAL = 60, 30, 20
SEND_TIMEOUT_S = 2
CUT_WITHIN_S = 60  # a busy machine takes long to generate what fills the buffers on the way
SLACK_MB = 5  # what twenty normal readers take
WHOLE_EVENT = re.compile(rb"^id: (\d+)\nevent: token\ndata: .*\n\n", re.MULTILINE)


async def byte_by_byte(port: int, path: str, cut: asyncio.Event) -> bytes:
    """Read a byte a second, until the server has cut the connection; what came."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        got = b""
        while not cut.is_set():
            got += await loop.sock_recv(client, 1)
            with suppress(TimeoutError):
                await asyncio.wait_for(cut.wait(), 1)
        while True:  # what had been sent to us before
            try:
                more = await loop.sock_recv(client, 65536)
            except ConnectionResetError:
                return got
            if not more:
                return got
            got += more


@pytest.mark.fault("F5 reader of a byte a second")
@pytest.mark.timeout(CUT_WITHIN_S + 30)
async def test_a_slow_reader_is_cut_and_goes_on(fleet: LocalFleet, fault: FaultRun) -> None:
    api, _ = await asyncio.gather(fleet.api(send_timeout_s=SEND_TIMEOUT_S), fleet.worker())
    port = int(api.url.rpartition(":")[2])
    asked = prompt(tokens=TOKENS, rate=RATE)
    async with httpx.AsyncClient(base_url=api.url, timeout=28, limits=httpx.Limits()) as http:
        assert (await http.get("/tasks/nope")).status_code == 404
        slow = await submit(http, prompt(tokens=MANY, rate=FAST))
        before = api.memory_mb()
        cut = asyncio.Event()
        reading = asyncio.create_task(byte_by_byte(port, f"/tasks/{slow}/stream", cut))
        normal = [await submit(http, asked) for _ in range(NORMAL)]
        streams = [watch(http, task_id) for task_id in normal]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        for stream in streams:
            frames = await stream.end()
            sse.check_native(frames)
            fault.stream(stream.numbers, tokens=TOKENS)
            assert sse.native_text(frames) == undisturbed(asked, tokens=TOKENS)
            fault.gaps_s.append(max(later - one for one, later in pairwise(stream.times)))

        async def is_cut() -> bool:
            (pod,) = await fleet.scripts.roster(APIS, ttl_s=60)
            return json.loads(pod)["streams"] == 0

        # By the pod, or by the kernel, which tells the client no sooner than it reads on.
        await eventually(is_cut, within_s=CUT_WITHIN_S, what="the end of the slow stream")
        cut.set()
        got = await asyncio.wait_for(reading, 20)
        assert "Traceback" not in api.text()
        assert api.memory_mb(peak=True) - before < 10 + SLACK_MB
        fault.hits += 1

        seen = [int(number) for number in WHOLE_EVENT.findall(got)]
        async with watch(http, slow, seen[-1]) as rest:
            await rest.upto(1000)
            stopped = (await http.post(f"/tasks/{slow}/stop")).json()
            frames = await rest.end()
        # Nobody waited for that reader: the log is where the writer's own pace had brought it.
        written = stopped["usage"]["completion_tokens"]
        assert written > 10 * len(seen)
        sse.check_native(frames, first=seen[-1] + 1)
        fault.stream(seen + rest.numbers, tokens=written)
        assert (await http.get(f"/tasks/{slow}")).json()["attempts"] == 1
    await fleet.quiet()
