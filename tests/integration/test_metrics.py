"""Metrics of a real fleet: what happens to it is counted, exactly where it can be."""

import asyncio
import re
import shutil
import signal
import socket
import subprocess

import httpx
import pytest
from tests.support.exposition import Scrape, scrape
from tests.support.local_fleet import LocalFleet, Process
from tests.support.native import read, submit
from tests.support.ports import free_port
from tests.support.readme import ROOT
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

LABELS = {
    "model", "priority", "method", "route", "status", "code", "call", "kind", "cause", "state",
    "reason", "role", "version", "le",
}  # fmt: skip
"""None that could tell of a caller or a task, or take a value for each."""


async def watched_worker(fleet: LocalFleet, **settings: object) -> tuple[Process, str]:
    """A worker, and where its metrics are."""
    port = free_port()
    return await fleet.worker(metrics_port=port, **settings), f"http://127.0.0.1:{port}"


async def tokens_written(fleet: LocalFleet, task_id: str, count: int) -> None:
    async def look() -> bool:
        fields = await fleet.scripts.task_fields(Keys(0), task_id)
        return int(fields.get("tokens", 0)) >= count

    await eventually(look, what=f"{count} tokens")


async def test_what_happens_is_counted(fleet: LocalFleet) -> None:
    api, (first, first_url) = await asyncio.gather(fleet.api(), watched_worker(fleet))
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        task_id = await submit(http, tokens=20)
        assert len(await read(http, task_id)) >= 21
        await read(http, task_id, after=10)

        async def ended() -> Scrape | None:  # its worker hears of it after the reader
            found = await scrape(first_url)
            return found if found.value("tasks_ended_total") else None

        pod, worker = await scrape(api.url), await eventually(ended, what="end of the task")
        assert pod.value("tasks_accepted_total", model="fake", priority="interactive") == 1
        assert pod.value("events_relayed_total") == 21 + 11
        assert pod.value("stream_resumes_total") == 1
        assert pod.value("http_requests_total", route="/tasks", status="202") == 1
        stream = {"method": "GET", "route": "/tasks/{task_id}/stream", "status": "200"}
        assert pod.value("http_requests_total", **stream) == 2
        check_one_task(worker)

        follows = pod.value("redis_call_seconds_count", call="follow")
        chat = {"messages": [{"role": "user", "content": "x"}]}
        for stream in (True, False):  # whoever submits need not follow
            answer = await http.post("/v1/chat/completions", json=chat | {"stream": stream})
            assert answer.status_code == 200
        pod = await scrape(api.url)
        assert pod.value("redis_call_seconds_count", call="follow") == follows
        assert pod.value("redis_call_seconds_count", call="submit") == 3

        refused = await http.post("/v1/chat/completions", json={"model": "x", "messages": []})
        assert refused.status_code == 400
        refused = await http.post("/tasks", json={"model": "other", "prompt": "x"})
        assert refused.status_code == 404
        stopped = await submit(http, tokens=1000, rate=50)
        await tokens_written(fleet, stopped, 3)
        running = await scrape(first_url)
        assert running.value("running_tasks") == running.value("worker_state", state="ready") == 1
        assert running.value("kv_cache_used_tokens") >= 3
        for _ in range(2):  # one stop, asked for twice
            assert (await http.post(f"/tasks/{stopped}/stop")).json()["status"] == "cancelled"
        pod = await scrape(api.url)
        assert pod.value("stops_total", cause="asked") == 1
        assert pod.value("stops_total", cause="left") == 0
        assert pod.value("requests_refused_total", status="404", code="model_not_found") == 1
        assert pod.value("requests_refused_total", status="400") == 1
        await fleet.quiet()

        # From zero: the gauges that a scaler goes by are there while no worker is.
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
        await submit(http, tokens=1)
        await asyncio.sleep(1)  # so long a look at the fleet may be kept
        pod = await scrape(api.url)
        assert pod.value("queue_waiting_tasks", model="fake", priority="interactive") == 1
        assert pod.value("queue_waiting_tasks", model="fake", priority="batch") == 0
        assert pod.value("queue_oldest_wait_seconds", priority="interactive") > 0
        assert pod.value("fleet_slots", model="fake") == 0
        assert pod.value("fleet_workers", model="fake", state="ready") == 0
        assert pod.value("fleet_pods") == 1
        await fleet.worker()
        await fleet.quiet()


async def test_losses_are_counted_by_who_takes_over(fleet: LocalFleet) -> None:
    api, (first, first_url) = await asyncio.gather(fleet.api(), watched_worker(fleet))
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        # Frozen past its lease: another takes over, and what the first says afterwards is refused.
        held = await submit(http, tokens=30, rate=8, delay_at=[11], delay_s=60)
        await tokens_written(fleet, held, 10)
        _, second_url = await watched_worker(fleet)
        first.signal(signal.SIGSTOP)
        await tokens_written(fleet, held, 11)
        first.signal(signal.SIGCONT)

        async def refused_once() -> bool:
            return (await scrape(first_url)).value("stale_writes_refused_total") == 1

        await eventually(refused_once, what="a refusal")

        async def done() -> Scrape | None:
            found = await scrape(second_url)
            return found if found.value("tasks_ended_total") else None

        worker = await eventually(done, what="end of the task")
        assert worker.value("attempts_total", cause="takeover") == 1
        assert worker.value("attempts_total", cause="first") == 0
        assert worker.value("replayed_tokens_total") == 10
        assert worker.value("generation_tokens_total") == 20
        assert worker.value("inter_token_latency_seconds_count") == 19
        assert worker.value("time_to_first_token_seconds_count") == 0
        assert worker.value("tasks_ended_total", state="completed", reason="stop") == 1
        assert worker.value("e2e_latency_seconds_sum") > 3  # the lease

        # Drained.
        held = await submit(http, tokens=30, delay_at=[11], delay_s=60)
        await tokens_written(fleet, held, 10)
        owner = await fleet.owner(held)
        other_url = second_url if owner is first else first_url
        owner.signal(signal.SIGTERM)
        await read(http, held)
        assert await owner.ended() == 0
        assert (await scrape(other_url)).value("attempts_total", cause="handover") == 1
        await fleet.quiet()


def check_one_task(worker: Scrape) -> None:
    """One task of 20 tokens has run there, alone and undisturbed."""
    assert worker.value("attempts_total", cause="first") == 1
    assert worker.value("attempts_total") == 1
    assert worker.value("tasks_ended_total", state="completed", reason="stop") == 1
    assert worker.value("generation_tokens_total") == 20
    assert worker.value("request_generation_tokens_bucket", le="20.0") == 1
    assert worker.value("request_generation_tokens_bucket", le="10.0") == 0
    assert worker.value("prompt_tokens_total") == worker.value("request_prompt_tokens_sum") > 0
    assert worker.value("queue_wait_seconds_count", priority="interactive") == 1
    assert worker.value("queue_wait_seconds_count", priority="batch") == 0
    assert worker.value("time_to_first_token_seconds_count") == 1
    assert worker.value("prefill_seconds_count") == 1
    assert worker.value("inter_token_latency_seconds_count") == 19
    assert worker.value("e2e_latency_seconds_count") == 1
    waited = worker.value("queue_wait_seconds_sum")
    first = worker.value("time_to_first_token_seconds_sum")
    assert waited <= first <= worker.value("e2e_latency_seconds_sum") < 20
    assert worker.value("batch_size_tasks_sum") >= 20
    assert worker.value("replayed_tokens_total") == 0
    assert worker.value("stale_writes_refused_total") == 0
    assert worker.value("slots") == 32
    assert worker.value("build_info", role="worker") == 1


async def test_metrics_answer_while_redis_is_away(frail: LocalFleet, store: Store) -> None:
    api, (_, worker_url) = await asyncio.gather(frail.api(), watched_worker(frail))

    async def told(url: str, up: int) -> Scrape | None:
        found = await scrape(url)
        return found if found.value("redis_up") == up else None

    before = await scrape(api.url)
    assert before.value("fleet_workers", state="ready") == 1
    store.end(signal.SIGKILL)
    for url in (api.url, worker_url):
        away = await eventually(lambda url=url: told(url, 0), what="word of the loss")
        assert away.value("redis_errors_total", kind="away") > 0
    async with asyncio.timeout(3):  # asked, and not waited for
        pod = await scrape(api.url)
    assert pod.value("fleet_workers", state="ready") == 1  # as last known
    assert pod.value("fleet_view_age_seconds") > 0
    store.start()
    for url in (api.url, worker_url):
        back = await eventually(lambda url=url: told(url, 1), what="word of the return")
        assert back.value("redis_call_seconds_count") > 0

    async def reconnected() -> bool:
        return (await scrape(api.url)).value("redis_reconnects_total") == 1

    await eventually(reconnected, what="the subscription")


@pytest.mark.asyncio(loop_scope="module")
async def test_labels_are_few_and_tell_of_nobody(shared_fleet: LocalFleet) -> None:
    _, worker_url = await watched_worker(shared_fleet)
    before = await scrape(shared_fleet.url)
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        task_id = await submit(http, tokens=3)
        await read(http, task_id)
        await http.request("PATCH", f"/tasks/{task_id}")
        await http.get(f"/nowhere/{task_id}")
        for accept in ("application/openmetrics-text; version=1.0.0", "text/html", ""):
            answer = await http.get("/metrics", headers={"Accept": accept})
            kind = "application/openmetrics-text" if "openmetrics" in accept else "text/plain"
            assert answer.headers["content-type"].startswith(kind)
            assert answer.text.endswith("# EOF\n") == ("openmetrics" in accept)
    pod, worker = await scrape(shared_fleet.url), await scrape(worker_url)
    for sample in [*pod.samples, *worker.samples]:
        assert sample.labels.keys() <= LABELS, sample
        assert not any(task_id in value for value in sample.labels.values()), sample
    for labels in ({"method": "other", "status": "405"}, {"route": "none", "status": "404"}):
        counted = [told.value("http_requests_total", **labels) for told in (before, pod)]
        assert counted[1] - counted[0] == 1, labels


@pytest.mark.asyncio(loop_scope="module")
async def test_every_metric_is_described(shared_fleet: LocalFleet) -> None:
    _, worker_url = await watched_worker(shared_fleet)
    told = (await scrape(shared_fleet.url)).families | (await scrape(worker_url)).families
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8").partition("## Under other names")[0]
    described = re.findall(r"^\| `(millstream_\w+)` \|", page, re.MULTILINE)
    assert len(described) == len(set(described))
    told = {name for name in told if not name.startswith("process_")}
    assert told | {"millstream_kv_cache_max_tokens"} == set(described)  # the fake engine has none


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (apt install prometheus)")
@pytest.mark.asyncio(loop_scope="module")
async def test_metrics_are_as_prometheus_wants_them(shared_fleet: LocalFleet) -> None:
    _, worker_url = await watched_worker(shared_fleet)
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        await read(http, await submit(http, tokens=3))
        await http.get("/nowhere")
    for url in (shared_fleet.url, worker_url):
        told = (await scrape(url)).text
        checked = await asyncio.to_thread(
            subprocess.run, ["promtool", "check", "metrics"], input=told, text=True,
            capture_output=True, timeout=20, check=False,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stdout + checked.stderr


async def test_a_taken_port_ends_a_worker_with_a_word(fleet: LocalFleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = await fleet.worker(ready=False, metrics_port=taken.getsockname()[1])
        assert await worker.ended(within_s=20) == 1
    assert "is taken by another program" in worker.text()
    assert "Traceback" not in worker.text()
