"""Traces of a real fleet, as a collector sees them: one from a request to its last worker."""

import asyncio
import json
import os
import signal

import httpx
import pytest
from tests.support.collector import Collector, Span
from tests.support.local_fleet import LocalFleet, Process
from tests.support.native import read, submit
from tests.support.ports import free_port
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
SERVER, CONSUMER = 2, 5


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of OpenTelemetry but those a test sets; children inherit them."""

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


async def has_tokens(fleet: LocalFleet, task_id: str, count: int) -> None:
    async def look() -> bool:
        fields = await fleet.scripts.task_fields(Keys(0), task_id)
        return int(fields.get("tokens", 0)) >= count

    await eventually(look, what=f"{count} tokens")


async def sent(collector: Collector, name: str, count: int = 1) -> list[Span]:
    async def look() -> list[Span] | None:
        found = collector.named(name)
        return found if len(found) == count else None

    return await eventually(look, what=f"{count} of {name}")


async def ended(*processes: Process) -> None:
    for process in processes:
        process.signal(signal.SIGTERM)
    assert await asyncio.gather(*(process.ended() for process in processes)) == [0, 0]


async def test_one_trace_goes_from_the_request_to_both_workers(
    fleet: LocalFleet, clean: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        api, first, _ = await asyncio.gather(fleet.api(), fleet.worker(), fleet.worker())
        headers = {"traceparent": TRACEPARENT}
        async with httpx.AsyncClient(base_url=api.url, timeout=20, headers=headers) as http:
            task_id = await submit(http, "a secret word", tokens=40, delay_at=[6], delay_s=60)
            await has_tokens(fleet, task_id, 5)
            first = await fleet.owner(task_id)
            ids = {worker.pid: worker.id for worker in await fleet.workers()}
            first.kill()
            lost = ids.pop(first.pid)
            (heir,) = ids.values()
            assert (await read(http, task_id))[-1].event == "completed"

        (answer,) = await sent(collector, "text_completion fake")
        (pod,) = await sent(collector, "POST /tasks")
        assert {span.trace for span in collector.spans} == {TRACE}

        assert (pod.parent, pod.kind, pod.service) == (CALLER, SERVER, "millstream-api")
        assert pod.attributes["http.response.status_code"] == 202
        assert pod.attributes["http.route"] == "/tasks"
        assert pod.attributes["gen_ai.request.model"] == "fake"
        assert pod.attributes["millstream.task.ids"] == [task_id]

        (gone,) = await sent(collector, "lost attempt")
        assert gone.attributes["millstream.worker.id"] == lost
        assert gone.attributes["millstream.attempt.number"] == 1
        assert (gone.parent, gone.failed) == (pod.id, True)

        assert (answer.parent, answer.kind, answer.failed) == (pod.id, CONSUMER, False)
        assert (answer.service, answer.instance) == ("millstream-worker", heir)
        assert answer.attributes["millstream.worker.id"] == heir
        assert answer.attributes["millstream.attempt.number"] == 2
        assert answer.attributes["millstream.attempt.outcome"] == "completed"
        assert answer.attributes["millstream.attempt.replayed_tokens"] == 5
        assert answer.attributes["gen_ai.usage.output_tokens"] == 40
        assert answer.attributes["gen_ai.operation.name"] == "text_completion"
        assert answer.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        (prefill,), (decode,) = await sent(collector, "prefill"), await sent(collector, "decode")
        assert {prefill.parent, decode.parent} == {answer.id}
        assert answer.start_ns == prefill.start_ns <= prefill.end_ns == decode.start_ns
        assert decode.start_ns < decode.end_ns == answer.end_ns
        assert b"secret word" not in collector.raw


async def test_who_has_a_task_is_told_before_it_ends(
    fleet: LocalFleet, clean: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        clean.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/here")
        clean.setenv("OTEL_SERVICE_NAME", "mine")
        api, worker = await asyncio.gather(fleet.api(), fleet.worker())
        body = {"messages": [{"role": "user", "content": "@fake " + json.dumps({"rate": 5})}]}
        headers = {"traceparent": "00-malformed", "idempotency-key": "k"}
        async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
            asked = {"model": "fake", "stream": True, **body}
            async with http.stream(
                "POST", "/v1/chat/completions", json=asked, headers=headers
            ) as answer:
                task_id = answer.headers["x-task-id"]
                (queue,) = await sent(collector, "queue")
                (pod,) = await sent(collector, "POST /v1/chat/completions")  # while it goes on

                # The same body under another traceparent is the same request.
                again = {"traceparent": TRACEPARENT, "idempotency-key": "k"}
                async with http.stream(
                    "POST", "/v1/chat/completions", json=asked, headers=again
                ) as same:
                    assert same.headers["x-task-id"] == task_id
                assert (await http.post(f"/tasks/{task_id}/stop")).json()["status"] == "cancelled"
            (left,) = await sent(collector, "chat fake")
            spans = await sent(collector, "POST /v1/chat/completions", 2)
            assert pod.parent == ""  # a trace of its own
            assert (queue.parent, queue.service) == (pod.id, "mine")
            assert queue.start_ns <= queue.end_ns == left.start_ns
            assert queue.attributes["millstream.worker.id"] == queue.instance
            assert left.attributes["millstream.attempt.outcome"] == "left"
            assert next(span for span in spans if span is not pod).trace == TRACE

            # Not sampled: neither told nor continued.
            quiet = {"traceparent": f"00-{'7' * 32}-{CALLER}-00"}
            await http.post("/tasks", json={"prompt": "x"}, headers=quiet)

            # A drain hands the task over, and says so before the process goes.
            held = await submit(http, tokens=500, rate=5)
            await has_tokens(fleet, held, 1)
            worker.signal(signal.SIGTERM)
            assert await worker.ended() == 0
            (handed,) = [
                span
                for span in collector.named("text_completion fake")
                if span.attributes["millstream.task.id"] == held
            ]
            assert handed.attributes["millstream.attempt.outcome"] == "handed_over"
            assert not any(span.trace == "7" * 32 for span in collector.spans)
        assert set(collector.seen) == {"/here"}
        assert collector.named("lost attempt") == []


async def test_off_makes_no_connection_and_keeps_nothing(
    fleet: LocalFleet, clean: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        clean.setenv("OTEL_SDK_DISABLED", "true")
        clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        api, worker = await asyncio.gather(fleet.api(), fleet.worker())
        headers = {"traceparent": TRACEPARENT}
        async with httpx.AsyncClient(base_url=api.url, timeout=20, headers=headers) as http:
            task_id = await submit(http, tokens=3)
            assert (await read(http, task_id))[-1].event == "completed"
            request = await fleet.redis.hget(Keys(0).task(task_id), "request")
            assert b"traceparent" not in request
        await ended(api, worker)
        assert not collector.seen


async def test_a_collector_that_is_away_holds_nothing_up(
    fleet: LocalFleet, clean: pytest.MonkeyPatch
) -> None:
    clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    api, worker = await asyncio.gather(fleet.api(), fleet.worker())
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        for _ in range(3):
            assert (await read(http, await submit(http, tokens=3)))[-1].event == "completed"

    async def told() -> bool:
        return "traces: " in worker.text()

    await eventually(told, what="a line of the trouble")
    await ended(api, worker)
    for process in (api, worker):
        assert "Traceback" not in process.text()
        assert process.text().count("traces: ") <= 3
