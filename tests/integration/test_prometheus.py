"""Dashboard and alerts against real metrics, in a real Prometheus (apt install prometheus)."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.exposition import scrape
from tests.support.local_fleet import LocalFleet
from tests.support.monitoring import ALERTS, alerts, expressions
from tests.support.native import read, submit
from tests.support.ports import free_port
from tests.support.readme import ROOT
from tests.support.waiting import eventually

FOLDER = ROOT / "deploy" / "prometheus"
UNBOUNDED = {"millstream_kv_cache_max_tokens"}
"""What the fake engine has not."""

with_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no Prometheus (apt install prometheus)",
)


def test_every_alert_says_what_to_do_there_and_in_the_docs() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    told = dict(re.findall(r"^\| `(Millstream\w+)` \(\w+\) \| .* \| (.*) \|$", page, re.MULTILINE))
    assert told == {rule["alert"]: rule["annotations"]["runbook"] for rule in alerts()}
    assert {rule["labels"]["severity"] for rule in alerts()} <= {"critical", "warning", "info"}


@with_prometheus
@pytest.mark.parametrize(
    "command",
    ["check rules alerts.yml", "test rules alerts_test.yml", "check config prometheus.yml"],
)
def test_promtool_finds_nothing(command: str) -> None:
    done = subprocess.run(
        ["promtool", *command.split()], cwd=FOLDER, capture_output=True, text=True, timeout=25,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[str]:
    """A Prometheus that scrapes them and has our rules; where it answers."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
            for job, url in targets.items()
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            process.kill()
            process.wait(10)


async def ask(http: httpx.AsyncClient, query: str) -> list[dict[str, Any]]:
    try:
        answer = await http.get("/query", params={"query": query})
    except httpx.TransportError:
        return []  # it is starting
    body = answer.json()
    assert body["status"] == "success", f"{query}: {body}"
    return body["data"]["result"]


@with_prometheus
async def test_dashboard_and_alerts_ask_for_what_there_is(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    worker_url = f"http://127.0.0.1:{(port := free_port())}"
    api, _ = await asyncio.gather(fleet.api(), fleet.worker(metrics_port=port))
    targets = {"millstream-api": api.url, "millstream-worker": worker_url}
    with prometheus(tmp_path, targets) as url:
        await compare(api.url, worker_url, prometheus_url=url)
    await fleet.quiet()


async def compare(pod_url: str, worker_url: str, *, prometheus_url: str) -> None:
    async with (
        httpx.AsyncClient(base_url=pod_url, timeout=20) as http,
        httpx.AsyncClient(base_url=prometheus_url) as metrics,
    ):
        await read(http, await submit(http, tokens=20))
        there = (await scrape(pod_url)).names | (await scrape(worker_url)).names
        declared = (await scrape(pod_url)).families | (await scrape(worker_url)).families
        asked = {name for text in expressions() for name in re.findall(r"millstream_\w+", text)}
        assert asked - there - declared == UNBOUNDED
        assert len(asked) > 30

        async def scraped() -> bool:
            up = await ask(metrics, "sum(up)")
            made = await ask(metrics, "sum(millstream_generation_tokens_total)")
            ended = await ask(metrics, 'sum(millstream_tasks_ended_total{state="completed"})')
            told = [found[0]["value"][1] for found in (up, made, ended) if found]
            return told == ["2", "20", "1"]

        await eventually(scraped, within_s=20, what="a scrape of both")
        for text in expressions():
            await ask(metrics, text)  # which fails at what is no query

        async def evaluated() -> bool:
            (group,) = (await metrics.get("/rules")).json()["data"]["groups"]
            health = {rule["name"]: rule["health"] for rule in group["rules"]}
            assert "err" not in health.values(), group
            assert health.keys() == {rule["alert"] for rule in alerts()}
            return set(health.values()) == {"ok"}

        await eventually(evaluated, what="all rules")
        firing = await ask(metrics, 'ALERTS{alertstate="firing"}')
        assert [found["metric"]["alertname"] for found in firing] == []
