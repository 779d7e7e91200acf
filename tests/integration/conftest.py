"""Who asks a fleet that several tests share: the official client, and one that sees the bytes."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest_asyncio
from tests.support.local_fleet import LocalFleet


@pytest_asyncio.fixture(loop_scope="module")
async def client(shared_fleet: LocalFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{shared_fleet.url}/v1", api_key="none", max_retries=0
    ) as session:
        yield session


@pytest_asyncio.fixture(loop_scope="module")
async def http(shared_fleet: LocalFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=25) as session:
        yield session
