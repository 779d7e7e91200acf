"""A fake engine that has been started."""

from collections.abc import AsyncIterator

import pytest
from tests.support.fake_running import SETTINGS, Running

from millstream.worker.engines.fake import FakeEngine


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    running = Running(FakeEngine(SETTINGS))
    await running.start()
    yield running
    await running.engine.stop()
