"""F1 and F4 under `/v1/responses`: pod and worker are killed; the official client goes on."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from tests.support.fault_report import FaultRun
from tests.support.faults import fields_of, held, prompt, undisturbed, written
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

TOKENS, STRUCK_AT = 24, 10
DELTA = "response.output_text.delta"
AHEAD = 4  # a background response's numbers are ahead of its log's by so many
ENDING = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
LAST = TOKENS + 1 + AHEAD + len(ENDING) - 1


class Client:
    """The official client, asynchronous or not, with one way to read a stream."""

    def __init__(self, url: str, *, blocking: bool) -> None:
        kind = openai.OpenAI if blocking else openai.AsyncOpenAI
        self.blocking = blocking
        self.openai: Any = kind(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)

    async def call(self, method: Any, *args: Any, **fields: Any) -> Any:
        if self.blocking:
            return await asyncio.to_thread(method, *args, **fields)
        return await method(*args, **fields)

    async def events(self, stream: Any) -> AsyncIterator[Any]:
        if not self.blocking:
            async for event in stream:
                yield event
            return
        events = iter(stream)
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            yield event

    async def close(self) -> None:
        await self.call(self.openai.close)


class Reading:
    """One background response, read over as many connections as it takes."""

    def __init__(self, client: Client, asked: str) -> None:
        self.client = client
        self.asked = asked
        self.events: list[Any] = []
        self.reading = asyncio.create_task(self._create())

    @property
    def id(self) -> str:
        return self.events[0].response.id

    @property
    def last(self) -> int:
        return self.events[-1].sequence_number if self.events else -1

    async def _create(self) -> None:
        client = self.client
        stream = await client.call(
            client.openai.responses.create,
            model="fake", input=self.asked, background=True, stream=True,
        )  # fmt: skip
        await self._read(client, stream)

    async def _read(self, client: Client, stream: Any) -> None:
        async for event in client.events(stream):
            self.events.append(event)

    async def upto(self, number: int) -> None:
        async def look() -> bool:
            assert not self.reading.done(), self.reading
            return self.last >= number

        await eventually(look, within_s=20, what=f"event {number}")

    async def resume(self, client: Client) -> None:
        stream = await client.call(
            client.openai.responses.retrieve, self.id, stream=True, starting_after=self.last
        )
        await self._read(client, stream)

    @property
    def tokens(self) -> list[int]:
        """Numbers in the log of the deltas that came."""
        return [event.sequence_number - AHEAD for event in self.events if event.type == DELTA]

    def check(self) -> None:
        """The whole sequence, as an undisturbed stream has it."""
        assert [event.sequence_number for event in self.events] == list(range(LAST + 1))
        assert [event.type for event in self.events] == [
            "response.created",
            "response.queued",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *[DELTA] * TOKENS,
            *ENDING,
        ]
        expected = undisturbed(self.asked, tokens=TOKENS, chat=True)
        assert "".join(event.delta for event in self.events if event.type == DELTA) == expected
        assert self.events[-1].response.output_text == expected
        assert self.events[-1].response.status == "completed"


@pytest.mark.fault("F1, F4 pod and worker killed under responses")
async def test_the_official_client_goes_on_at_another_pod(
    fleet: LocalFleet, fault: FaultRun
) -> None:
    first, second, worker = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
    before = [Client(first.url, blocking=blocking) for blocking in (False, True)]
    after = [Client(second.url, blocking=blocking) for blocking in (False, True)]
    standing = held(STRUCK_AT, tokens=TOKENS)
    readings = [
        Reading(client, f"{standing} {number}")
        for number, client in enumerate([*before, *before, before[0]])
    ]
    polled = await before[0].openai.responses.create(
        model="fake", input=f"{standing} polled", background=True
    )
    doomed = await before[0].openai.responses.create(
        model="fake", input=prompt(tokens=TOKENS, delay_s=60, delay_at=[STRUCK_AT + 1]),
        background=True,
    )  # fmt: skip
    for reading in readings:
        await reading.upto(STRUCK_AT + AHEAD)
    ids = [reading.id for reading in readings] + [polled.id]
    tasks = [response_id.removeprefix("resp_") for response_id in ids]
    await written(fleet, dict.fromkeys(tasks, STRUCK_AT))
    await fleet.worker()
    first.signal(signal.SIGKILL)
    worker.signal(signal.SIGKILL)
    for reading in readings:
        with pytest.raises(openai.APIConnectionError):
            await reading.reading
        assert reading.last == STRUCK_AT + AHEAD
    assert (await first.ended(), await worker.ended()) == (-signal.SIGKILL, -signal.SIGKILL)

    # One is cancelled while nobody runs it, twice; it is never run again.
    responses = after[0].openai.responses
    cancelled = await responses.cancel(doomed.id)
    assert (cancelled.status, cancelled.usage.output_tokens) == ("cancelled", STRUCK_AT)
    assert await after[1].call(after[1].openai.responses.cancel, doomed.id) == cancelled
    # Two go on with each client, before their new worker has them; the helper reads from the start.
    resumed = [
        asyncio.create_task(reading.resume(client))
        for reading, client in zip(readings[:4], [*after, *reversed(after)], strict=True)
    ]
    helped = responses.stream(response_id=readings[4].id, starting_after=readings[4].last)
    async with helped as stream:
        readings[4].events += [event async for event in stream]
        final = await stream.get_final_response()
    await asyncio.gather(*resumed)
    assert final.output_text == readings[4].events[-1].response.output_text
    for reading in readings:
        reading.check()
        fault.stream(reading.tokens, tokens=TOKENS)

    async def ended() -> Any:
        response = await responses.retrieve(polled.id)
        return response if response.status == "completed" else None

    response = await eventually(ended, within_s=15, what="the polled response")
    assert response.output_text == undisturbed(f"{standing} polled", tokens=TOKENS, chat=True)
    assert (await responses.retrieve(doomed.id)) == cancelled
    for task_id in tasks:
        assert (await fields_of(fleet, task_id))["attempt"] == "2"
        fault.hits += 1
    assert (await fields_of(fleet, doomed.id.removeprefix("resp_")))["attempt"] == "1"
    for client in (*before, *after):
        await client.close()
    await fleet.quiet()


@pytest.mark.fault("F4 pod drained under responses")
async def test_a_pod_that_must_go_sends_its_readers_on(fleet: LocalFleet, fault: FaultRun) -> None:
    """At once, by a cut that the official client raises, and with all numbers those of the log."""
    first, second, _ = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
    asked = prompt(tokens=TOKENS, delay_s=1.5, delay_at=[STRUCK_AT + 1])
    clients = [Client(pod.url, blocking=False) for pod in (first, second)]
    reading = Reading(clients[0], asked)
    await reading.upto(STRUCK_AT + AHEAD)
    first.signal(signal.SIGTERM)
    with pytest.raises(openai.APIConnectionError):
        await reading.reading
    fault.hits += 1
    await reading.resume(clients[1])
    reading.check()
    assert await first.ended() == 0
    for client in clients:
        await client.close()
    async with httpx.AsyncClient(base_url=second.url) as http:
        url = f"/v1/responses/{reading.id}"
        assert (await http.delete(url)).json()["deleted"] is True
        assert (await http.get(url)).status_code == 404
    fault.stream(reading.tokens, tokens=TOKENS)
    await fleet.quiet()
