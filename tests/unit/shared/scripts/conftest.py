"""The scripts on a real Valkey, and its channels."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.script_bench import SHARD, Bench

from millstream.shared.connection import open_subscriber
from millstream.shared.scripts import Scripts


@pytest.fixture
async def pubsub(redis_url: str) -> AsyncIterator[Any]:
    """Where the shard's channels are."""
    async with open_subscriber(redis_url, SHARD.tag) as client:
        yield client.pubsub()


@pytest.fixture
def bench(scripts: Scripts) -> Bench:
    return Bench(scripts)
