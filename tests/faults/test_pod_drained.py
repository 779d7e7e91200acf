"""A pod is told to go: it says so first, and answers whatever it has taken."""

import asyncio
import signal

import pytest
from tests.support.fault_report import FaultRun
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually


async def get(port: int, path: str) -> bytes:
    """Ask on a connection of its own; whatever comes until it is closed."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionResetError as error:  # before it was there for the client: not taken
        raise ConnectionRefusedError from error
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


@pytest.mark.fault("pod drained under a burst of connections")
async def test_every_connection_that_was_taken_is_answered(
    fleet: LocalFleet, fault: FaultRun
) -> None:
    first, second, _ = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
    ports = [int(pod.url.rpartition(":")[2]) for pod in (first, second)]
    answered = dict.fromkeys(ports, 0)
    readiness: list[bytes] = []
    stop = asyncio.Event()

    async def ask() -> None:
        """What a balancer does: a pod that refuses is passed over, one that accepts is trusted."""
        for port in ports:
            try:
                answer = await get(port, "/health")
            except ConnectionRefusedError:
                continue
            assert answer.startswith(b"HTTP/1.1 200 OK"), answer
            answered[port] += 1
            return
        raise AssertionError("no pod takes connections")

    async def keep_asking() -> None:
        while not stop.is_set():
            await ask()

    async def probe() -> None:
        while not stop.is_set():
            try:
                readiness.append((await get(ports[0], "/ready"))[:12])
            except ConnectionRefusedError:
                return

    async def ready() -> bool:
        return (await get(ports[0], "/ready")).startswith(b"HTTP/1.1 200")

    await eventually(ready, what="the first pod to be ready")
    clients = [asyncio.create_task(keep_asking()) for _ in range(16)]
    clients.append(asyncio.create_task(probe()))

    async def warm() -> bool:
        return answered[ports[0]] > 50 and len(readiness) > 0

    await eventually(warm, what="answers of the first pod")
    first.signal(signal.SIGTERM)
    assert await first.ended() == 0

    async def moved() -> bool:
        return answered[ports[1]] > 50

    await eventually(moved, what="answers of the second pod")
    stop.set()
    await asyncio.gather(*clients)
    # It took connections for a while after it had said that it goes.
    closing = readiness.index(b"HTTP/1.1 503")
    assert set(readiness[:closing]) == {b"HTTP/1.1 200"}
    assert set(readiness[closing:]) == {b"HTTP/1.1 503"}
    fault.hits += len(readiness) - closing
