"""The lease thread, against a Redis that is not there."""

import logging
from typing import Any

import pytest
from tests.support.ports import free_port
from tests.support.waiting import until

from millstream.shared.metrics.calls import CallStats
from millstream.shared.registry import WorkerInfo
from millstream.shared.settings import Settings
from millstream.shared.states import WorkerState
from millstream.worker.engines.base import EngineHealth
from millstream.worker.lease import LeaseKeeper


@pytest.mark.parametrize(
    ("state", "level"),
    [(WorkerState.STARTING, logging.DEBUG), (WorkerState.READY, logging.WARNING)],
)
async def test_a_missed_beat_is_news_once_there_is_something_to_lose(
    state: WorkerState, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "millstream")

    info = WorkerInfo(id="w", pid=1, host="h", model="m", engine="fake", state=state, slots=1)

    def ignore(*_: Any) -> None:
        """Nobody is told of anything."""

    keeper = LeaseKeeper(
        settings=Settings(redis_url=f"redis://127.0.0.1:{free_port()}/0", lease_s=0.5),
        jobs=list,
        health=lambda: EngineHealth(active=0, steps=0),
        describe=lambda: info,
        calls=CallStats(),
        on_lost=ignore,
        on_engine_failed=ignore,
        on_drain=ignore,
    )
    keeper.start()

    def complaints() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "the lease thread" in record.message]

    await until(complaints)
    keeper.close()
    assert {record.levelno for record in complaints()} == {level}
