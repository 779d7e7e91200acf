"""The fleet's gauges: every pod shows the same, so they are joined by `max`, never added up.

They are what an autoscaler needs: they come from a pod, so they are there while no worker is.
"""

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric

from millstream.api.fleet_watch import FleetLook
from millstream.shared.metrics.families import gauge
from millstream.shared.states import WorkerState


def fleet_families(look: FleetLook) -> Iterator[Metric]:
    """What a look at the fleet has found."""
    waiting: dict[tuple[str, ...], float] = {}
    oldest: dict[tuple[str, ...], float] = {}
    for model, queue in look.queues.items():
        for priority, depth in queue.classes.items():
            waiting[model, priority] = depth.waiting
            oldest[model, priority] = depth.oldest_wait_s
    classes = ("model", "priority")
    yield gauge("queue_waiting_tasks", "Tasks that wait for a worker.", classes, waiting)
    yield gauge(
        "queue_oldest_wait_seconds", "How long the oldest of them has waited.", classes, oldest
    )
    yield gauge(
        "queue_running_tasks",
        "Tasks that some worker runs, or ran until it died.",
        ("model",),
        {(model,): queue.running for model, queue in look.queues.items()},
    )
    yield gauge(
        "dead_letters",
        "Tasks that were given up after MAX_ATTEMPTS workers, and are kept to be looked at.",
        ("model",),
        {(model,): queue.dead_letters for model, queue in look.queues.items()},
    )
    workers: dict[tuple[str, ...], float] = {
        (model, state): 0 for model in look.queues for state in WorkerState
    }
    slots: Counter[tuple[str, ...]] = Counter({(model,): 0 for model in look.queues})
    for worker in look.workers:
        workers[worker.model, worker.state] += 1
        slots[worker.model,] += worker.slots if worker.state == WorkerState.READY else 0
    yield gauge("fleet_workers", "Workers on the roster.", ("model", "state"), workers)
    yield gauge("fleet_slots", "Tasks that all ready workers can run at once.", ("model",), slots)
    yield gauge("fleet_pods", "API pods on the roster.", (), {(): len(look.apis)})
    yield gauge(
        "redis_memory_used_bytes",
        "What Redis holds, all its servers together.",
        (),
        {(): sum(int(info["used_memory"]) for info in look.servers)},
    )
    yield gauge(
        "redis_memory_max_bytes",
        "Beyond that it takes no more tasks; 0: it has no limit.",
        (),
        {(): sum(int(info.get("maxmemory", 0)) for info in look.servers)},
    )
    yield gauge(
        "fleet_view_age_seconds",
        "How old the fleet's gauges are: they stay as they were while Redis is away.",
        (),
        {(): time.monotonic() - look.at},
    )
