"""A machine is about to be taken away: its worker hands over in the time the notice leaves."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import (
    DRAIN_BAR_S,
    SLACK_S,
    held,
    submit,
    undisturbed,
    watch,
    written,
)
from tests.support.local_fleet import LocalFleet

SCRIPT = Path(__file__).parents[2] / "deploy" / "drain-on-notice.sh"
TOKENS = 40


@pytest.mark.fault("spot machine's notice", bar_s=DRAIN_BAR_S)
async def test_a_notice_drains_the_worker(
    fleet: LocalFleet, fault: FaultRun, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    launcher = ("env", f"NOTICE=test -e {notice}", "NOTICE_EVERY_S=0.1", str(SCRIPT))
    api, first = await asyncio.gather(fleet.api(), fleet.worker(ready=False, launcher=launcher))
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        await fleet.ready_workers(1)
        asked = held(20, tokens=TOKENS)
        task_id = await submit(http, asked)
        async with watch(http, task_id) as stream:
            await written(fleet, {task_id: 20})
            await fleet.worker()
            struck = time.monotonic()
            notice.touch()
            frames = await stream.end()
        assert await first.ended() == 0
        fault.gaps_s.append(stream.gap_after(struck))
        assert fault.gaps_s[0] < SLACK_S
        sse.check_native(frames)
        fault.stream(stream.numbers, tokens=TOKENS)
        assert sse.native_text(frames) == undisturbed(asked, tokens=TOKENS)
        assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 2
        fault.hits += 1
    await fleet.quiet()


async def test_signals_and_exit_codes_are_passed_on(fleet: LocalFleet) -> None:
    launcher = ("env", "NOTICE=false", "NOTICE_EVERY_S=0.1", str(SCRIPT))
    worker = await fleet.worker(ready=False, launcher=launcher)
    await fleet.ready_workers(1)
    worker.popen.terminate()
    assert await worker.ended() == 0
    refused = await fleet.worker(ready=False, launcher=launcher, lease_s="soon")
    assert await refused.ended() == 2
    assert "MILLSTREAM_LEASE_S" in refused.text()
