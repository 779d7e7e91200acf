"""Readers against a model: any order of writes, messages heard or lost, and pages of the log.

The part of a pod that no test of whole processes can drive step by step; the rest of the protocol
has a model in tests/unit/shared/test_protocol_model.py.
"""

import asyncio
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.support.model_pod import ModelPod, ModelReader

from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow

SHARD = Keys(0)
TASKS = ("t0-a", "t0-b")
EXAMPLES = int(os.environ.get("PROTOCOL_MODEL_EXAMPLES", "60")) // 2


class Reading(RuleBasedStateMachine):
    """Two running tasks, one pod, any number of readers."""

    loop: asyncio.AbstractEventLoop
    client: Any
    url: str

    @initialize()
    def begin(self) -> None:
        self.run(self.client.flushdb())
        self.scripts = Scripts(self.client)
        self.log: dict[str, list[str]] = {task_id: [] for task_id in TASKS}
        self.ended: set[str] = set()
        self.pod = ModelPod(self.url, self.client, self.scripts, SHARD)
        self.run(self.pod.open())
        for task_id in TASKS:
            self.pod.readers.append(ModelReader(task_id, 0, expected=True))
            self.run(
                self.scripts.submit(
                    SHARD, task_id=task_id, model="m", caller="c", request=b"{}",
                    max_queue=9, live_ttl_s=1000, pod=self.pod.id,
                )
            )  # fmt: skip
        claims, _ = self.run(
            self.scripts.claim(
                SHARD, worker="w", model="m", free=2, running=0, lease_s=600, max_attempts=3,
                live_ttl_s=1000, result_ttl_s=1000, max_task_s=1000, sweep=False,
            )
        )  # fmt: skip
        assert len(claims) == 2

    def teardown(self) -> None:
        self.run(self.pod.close())

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    @rule(task_id=st.sampled_from(TASKS), tokens=st.integers(1, 3), ends=st.booleans())
    def write(self, task_id: str, tokens: int, ends: bool) -> None:
        if task_id in self.ended:
            return
        log = self.log[task_id]
        events = [("1", f'"{task_id} {len(log) + at}"') for at in range(1, tokens + 1)]
        end = ("completed", "stop") if ends and len(log) > 6 else ("", "")
        row = AppendRow(task_id, 1, 7, len(log) + 1, events, *end)
        self.run(self.scripts.append(SHARD, worker="w", model="m", result_ttl_s=1000, rows=[row]))
        log += [data for _, data in events]
        if end[0]:
            log.append("completed")
            self.ended.add(task_id)

    @rule(task_id=st.sampled_from(TASKS), data=st.data())
    def connect(self, task_id: str, data: st.DataObject) -> None:
        after = data.draw(st.integers(0, len(self.log[task_id])))
        self.pod.readers.append(ModelReader(task_id, after))

    @precondition(lambda self: len(self.pod.readers) > 2)
    @rule()
    def disconnect(self) -> None:
        self.pod.readers.pop(0)

    @rule(hear_between=st.booleans())
    def read_logs(self, hear_between: bool) -> None:
        self.run(self.pod.read_logs(hear_between=hear_between))

    @rule()
    def deliver(self) -> None:
        self.run(self.pod.deliver())
        for reader in self.pod.readers:
            if not reader.place.behind:  # it has heard all there is
                assert self.sent(reader) == self.log[reader.task_id][reader.after :]

    @rule()
    def drop_pubsub(self) -> None:
        self.run(self.pod.lose())

    def sent(self, reader: ModelReader) -> list[str]:
        return [event.kind if event.terminal else event.data for event in reader.sent]

    @invariant()
    def readers_get_a_run_of_the_log(self) -> None:
        """From where each began: no gap, no event twice, none out of order (I1)."""
        for reader in self.pod.readers:
            sent = self.sent(reader)
            assert sent == self.log[reader.task_id][reader.after :][: len(sent)]
            first = reader.after + 1
            assert [event.seq for event in reader.sent] == [*range(first, first + len(sent))]


@pytest.mark.timeout(int(30 + EXAMPLES * 0.4))
def test_any_order_of_hearing_and_reading(redis_url: str) -> None:
    with asyncio.Runner() as runner:
        Reading.loop = runner.get_loop()
        Reading.url = redis_url
        context = open_redis(redis_url)
        Reading.client = runner.run(context.__aenter__())
        run_state_machine_as_test(
            Reading,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            ),
        )
        runner.run(context.__aexit__(None, None, None))
