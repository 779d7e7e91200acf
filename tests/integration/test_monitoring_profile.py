"""The profile `monitoring`: a real Prometheus, by the compose file's command, reads a fleet."""

import asyncio
import re
from typing import Any

import httpx
import pytest
import yaml
from tests.support.chart import EXAMPLES, render
from tests.support.compose_cluster import ComposeCluster
from tests.support.compose_prometheus import find_prometheus
from tests.support.ports import free_port
from tests.support.waiting import eventually

pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this system")


def autoscaler_query(model: str) -> str:
    """What the chart lets KEDA ask, for a model of a fleet that is in no namespace."""
    values = yaml.safe_load(EXAMPLES[0].read_text())
    values["workers"] = [{"name": "one", "model": model, "source": "bundled"}]
    (scaled,) = [item for item in render(values) if item["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    return re.sub(r',namespace="[^"]*"', "", query)


@pytest.mark.timeout(90)
async def test_an_autoscaler_sees_one_waiting_task() -> None:
    find_prometheus()
    variables = {
        "MILLSTREAM_ENGINE": "fake",
        "MILLSTREAM_MODEL": "small",
        "MILLSTREAM_ON_DEMAND_MODELS": "small",
    }
    async with ComposeCluster(**variables) as cluster, httpx.AsyncClient(timeout=20) as http:
        await cluster.start_redis()
        ports = [free_port(), free_port()]
        await asyncio.gather(*(cluster.start_api(port) for port in ports))
        worker_port = free_port()
        targets = {
            "api": [f"127.0.0.1:{port}" for port in ports],
            "worker": [f"127.0.0.1:{worker_port}"],
        }
        url = await cluster.start_prometheus(targets, interval="500ms")

        async def ask(query: str) -> dict[tuple[str, ...], float]:
            answer = await http.get(f"{url}/api/v1/query", params={"query": query})
            found: list[dict[str, Any]] = answer.json()["data"]["result"]
            return {tuple(sorted(row["metric"].values())): float(row["value"][1]) for row in found}

        async def becomes(query: str, value: float) -> None:
            async def look() -> bool:
                return list((await ask(query)).values()) == [value]

            await eventually(look, within_s=25, what=f"{query} = {value}")

        # A fleet of none: the worker is down, the queue is known and empty.
        await becomes("sum(up)", 2)
        query = autoscaler_query("small")
        await becomes(query, 0)
        pod = f"http://127.0.0.1:{ports[0]}"
        answer = await http.post(
            f"{pod}/tasks", json={"prompt": '@fake {"tokens": 5, "delay_s": 2}'}
        )
        assert answer.status_code == 202
        await becomes(query, 1)
        # As KEDA would.
        await cluster.start_worker(worker_port)
        await becomes("sum(up)", 3)
        await becomes("sum(millstream_generation_tokens_total)", 5)
        await becomes(query, 0)
        groups = (await http.get(f"{url}/api/v1/rules")).json()["data"]["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
