"""Each metric that the dashboard or an alert asks for moves when what it tells of happens."""

import asyncio
import signal

import httpx
from tests.support.faults import held, prompt, submit, watch, watch_chat, written
from tests.support.local_fleet import Api, LocalFleet, Process
from tests.support.monitoring import Selector, expressions, selectors
from tests.support.moving import Moving
from tests.support.native import read
from tests.support.ports import free_port
from tests.support.store import Store

from millstream.shared.keys import Keys

LEASE_S = 2.0
MAX_QUEUE = 2

CANNOT_MOVE = {
    "millstream_kv_cache_max_tokens": "a capacity, and the fake engine knows none; "
    "test_real_model.py looks at it",
}

CAUSES = {
    Selector(name, (("cause", "=", cause),))
    for name, causes in (
        ("millstream_attempts_total", ("first", "takeover", "handover", "fault")),
        ("millstream_stops_total", ("asked", "left")),
    )
    for cause in causes
}
"""What the dashboard adds up by cause: each of them."""


def asked_for() -> set[Selector]:
    found = CAUSES.union(*(selectors(text) for text in expressions()))
    assert {selector.name for selector in found} >= CANNOT_MOVE.keys()
    return {selector for selector in found if selector.name not in CANNOT_MOVE}


async def watched_worker(fleet: LocalFleet, moving: Moving) -> Process:
    port = free_port()
    worker = await fleet.worker(metrics_port=port)
    await moving.follow(f"http://127.0.0.1:{port}")
    return worker


async def test_every_metric_that_is_asked_for_moves(frail: LocalFleet, store: Store) -> None:
    frail.settings |= {"lease_s": LEASE_S, "max_queue": MAX_QUEUE, "max_attempts": 2}
    moving = Moving(asked_for())
    api = await frail.api(model="fake", keepalive_s=0.5)
    await moving.follow(api.url)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        ended = await tasks_wait_and_end(frail, http, moving)
        other = asyncio.create_task(frail.api(drain_s=20))
        await readers_come_back(frail, http, ended, moving)
        await callers_stop_leave_and_fail(frail, http, moving)
        await asyncio.gather(
            workers_freeze_die_and_drain(frail, http, moving), a_pod_goes(await other, moving)
        )
        await redis_fills_and_goes(store, moving)
    await moving.seen(*map(str, asked_for()))


async def tasks_wait_and_end(fleet: LocalFleet, http: httpx.AsyncClient, moving: Moving) -> str:
    """They queue while there is no worker, up to what the queue holds; one comes. An id."""
    task_ids = [await submit(http, prompt(tokens=20)) for _ in range(MAX_QUEUE)]
    full = await http.post("/tasks", json={"prompt": "one too many"})
    assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
    await moving.seen(
        "millstream_queue_waiting_tasks",
        "millstream_queue_oldest_wait_seconds",
        'millstream_queue_oldest_wait_seconds{priority="interactive"}',
        "millstream_tasks_accepted_total",
        'millstream_requests_refused_total{status="503"}',
    )
    await watched_worker(fleet, moving)
    for task_id in task_ids:
        assert len(await read(http, task_id)) == 21
    await moving.seen(
        'millstream_fleet_workers{state=~"ready|starting"}',
        "millstream_fleet_slots",
    )
    return task_ids[0]


async def readers_come_back(
    fleet: LocalFleet, http: httpx.AsyncClient, ended: str, moving: Moving
) -> None:
    await read(http, ended, after=10)
    running = await submit(http, held(10, tokens=20))
    async with watch(http, running) as stream:
        await stream.upto(10)
        await moving.seen(
            "millstream_streams_open",
            "millstream_queue_running_tasks",
            "millstream_kv_cache_used_tokens",
        )
        assert (await http.post(f"/tasks/{running}/stop")).json()["status"] == "cancelled"
        await stream.end()
    # Redis loses what a reader has seen of a task that has ended.
    assert await fleet.redis.delete(Keys(0).log(ended)) == 1
    torn = await http.get(f"/tasks/{ended}/stream", headers={"Last-Event-ID": "10"})
    assert (torn.status_code, torn.json()["error"]["code"]) == (410, "log_incomplete")
    await moving.seen("millstream_stream_resumes_total", "millstream_log_rewinds_total")


async def callers_stop_leave_and_fail(
    fleet: LocalFleet, http: httpx.AsyncClient, moving: Moving
) -> None:
    """One was stopped above; one leaves, and one has an engine fail twice."""
    async with watch_chat(http, held(3, tokens=9)) as chat:
        await written(fleet, {chat.task_id: 3})
    body = {"messages": [{"role": "user", "content": prompt(tokens=9, error_at=5)}]}
    failed = await http.post("/v1/chat/completions", json=body)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "max_attempts")
    await moving.seen(
        *(str(selector) for selector in CAUSES if selector.name == "millstream_stops_total"),
        'millstream_attempts_total{cause="fault"}',
        "millstream_dead_letters",
        'millstream_http_requests_total{status=~"5..",status!="503"}',
    )


async def workers_freeze_die_and_drain(
    fleet: LocalFleet, http: httpx.AsyncClient, moving: Moving
) -> None:
    """One freezes, and the one that took its tasks over is killed; a third comes, one drains."""
    task_ids = [await submit(http, held(10, 11, tokens=20)) for _ in range(2)]
    await written(fleet, dict.fromkeys(task_ids, 10))
    frozen = await fleet.owner(task_ids[0])
    killed = await watched_worker(fleet, moving)
    frozen.signal(signal.SIGSTOP)
    await written(fleet, dict.fromkeys(task_ids, 11))
    third = asyncio.create_task(watched_worker(fleet, moving))
    frozen.signal(signal.SIGCONT)
    await moving.seen("millstream_stale_writes_refused_total")
    killed.signal(signal.SIGKILL)
    for task_id in task_ids:
        assert (await read(http, task_id))[-1].event == "completed"
    await third
    await moving.seen(
        'millstream_attempts_total{cause="takeover"}', "millstream_replayed_tokens_total"
    )
    running = await submit(http, held(10, tokens=20))
    await written(fleet, {running: 10})
    drained = await fleet.owner(running)
    drained.signal(signal.SIGTERM)
    assert (await read(http, running))[-1].event == "completed"
    assert await drained.ended() == 0
    await moving.seen('millstream_attempts_total{cause="handover"}')


async def a_pod_goes(pod: Api, moving: Moving) -> None:
    await moving.seen("millstream_fleet_pods")
    await moving.follow(pod.url)
    async with (
        httpx.AsyncClient(base_url=pod.url, timeout=25) as http,
        watch_chat(http, prompt(tokens=1000, rate=20)),
    ):
        pod.signal(signal.SIGTERM)  # it waits for the end of the chat
        await moving.seen("millstream_pod_draining")
    assert await pod.ended() == 0


async def redis_fills_and_goes(store: Store, moving: Moving) -> None:
    store.configure("maxmemory", 2**30)
    await moving.seen("millstream_redis_memory_max_bytes", "millstream_redis_memory_used_bytes")
    store.end(signal.SIGKILL)
    await moving.seen(
        "millstream_redis_up",
        "millstream_redis_errors_total",
        "millstream_fleet_view_age_seconds",
    )
    store.start()
    await moving.seen("millstream_redis_reconnects_total")
