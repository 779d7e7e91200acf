"""Several workers and models in one fleet."""

import asyncio

import httpx
import openai
import pytest
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually


async def test_two_workers_share_the_load(fleet: LocalFleet) -> None:
    await fleet.api()
    await asyncio.gather(fleet.worker(), fleet.worker())
    async with httpx.AsyncClient(base_url=fleet.url, timeout=20) as http:
        requests = [
            asyncio.create_task(
                http.post(
                    "/v1/chat/completions",
                    json={
                        "messages": [
                            {"role": "user", "content": '@fake {"tokens": 20, "rate": 10}'}
                        ]
                    },
                )
            )
            for _ in range(12)
        ]

        async def both() -> list[int]:
            running = [worker.running for worker in await fleet.workers()]
            return running if sum(running) == 12 else []

        shares = await eventually(both, what="twelve running tasks")
        assert len(shares) == 2
        assert min(shares) >= 3
        assert [answer.status_code for answer in await asyncio.gather(*requests)] == [200] * 12


async def test_models_are_those_of_live_workers(fleet: LocalFleet) -> None:
    api = await fleet.api()
    await asyncio.gather(fleet.worker(), fleet.worker(model="other/name:v2"))
    client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)

    async def listed() -> bool:
        return {model.id async for model in client.models.list()} == {"fake", "other/name:v2"}

    await eventually(listed, what="both models")
    assert (await client.models.retrieve("other/name:v2")).id == "other/name:v2"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("third")
    with pytest.raises(openai.BadRequestError) as two:
        await client.chat.completions.create(
            model=openai.omit,
            messages=[{"role": "user", "content": "x"}],  # type: ignore[arg-type]
        )
    assert two.value.param == "model"
    await client.close()
