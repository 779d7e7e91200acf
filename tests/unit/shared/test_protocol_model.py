"""The protocol against a model: any order of steps by any number of workers, on a real Valkey.

The clock is virtual: "a lease goes by" makes every pending entry idle for that long. A frozen
worker is one whose steps come later; a dead one is one whose steps come no more. Redis can lose
what was written since its file was synced; then pods put back what they have shown, or they died
too. Each claim makes a text of its own, so that bytes that come otherwise again are seen.
"""

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.exceptions import ResponseError

from millstream.shared.connection import open_redis
from millstream.shared.events import Event
from millstream.shared.keys import Keys
from millstream.shared.scripts import MISSING, AppendRow, Claim, LogPage, Scripts, Submitted

SHARD = Keys(0)
LEASE_S = 600.0  # far beyond the run of an example
LENGTH = 5
MAX_QUEUE = 4
MAX_ATTEMPTS = 3
WORKERS = ("w0", "w1", "w2")
EXAMPLES = int(os.environ.get("PROTOCOL_MODEL_EXAMPLES", "60"))  # nightly: 10000


@dataclass
class Task:
    """What we know of a task from outside."""

    seen: list[Event] = field(default_factory=list)
    """What a pod has shown, which all readers have read."""
    attempt: int = 0
    terminal: str | None = None
    stopped: bool = False


@dataclass
class Held:
    """What a worker believes it runs."""

    claim: Claim
    events: list[tuple[str, str]]
    """Of the whole log: those of the claim, then its own."""
    written: int


class Protocol(RuleBasedStateMachine):
    """Three workers, any number of tasks."""

    loop: asyncio.AbstractEventLoop
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.run(self.client.flushdb())
        self.scripts = Scripts(self.client)
        self.tasks: dict[str, Task] = {}
        self.deleted: set[str] = set()
        self.submitted = 0
        self.claims = 0
        self.memory: dict[bytes, bytes] = {}
        self.attempts: dict[str, int] = {}
        """Both as Redis's file has them."""
        self.held: dict[str, dict[str, Held]] = {worker: {} for worker in WORKERS}

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def token(self, claim: int, seq: int) -> tuple[str, str]:
        """Token `seq` of a task, as this claim makes it."""
        return str(seq), f'"{claim} {seq}"'

    @rule()
    def submit(self) -> None:
        task_id = f"t0-{self.submitted:02d}"  # not random, so that an example can be repeated
        self.submitted += 1
        answer = self.run(
            self.scripts.submit(
                SHARD, task_id=task_id, model="m", caller="c", request=b"{}",
                max_queue=MAX_QUEUE, live_ttl_s=1000,
            )
        )  # fmt: skip
        if isinstance(answer, Submitted):
            self.tasks[task_id] = Task()

    @rule(
        worker=st.sampled_from(WORKERS),
        free=st.integers(1, 3),
        sweep=st.booleans(),
        recover=st.booleans(),
        heard=st.booleans(),
    )
    def claim(self, worker: str, free: int, sweep: bool, recover: bool, heard: bool) -> None:
        claims, _ = self.run(
            self.scripts.claim(
                SHARD, worker=worker, model="m", free=free, running=0, lease_s=LEASE_S,
                max_attempts=MAX_ATTEMPTS, live_ttl_s=1000, result_ttl_s=1000, max_task_s=10_000,
                sweep=sweep, recover=recover,
            )
        )  # fmt: skip
        for claim in claims:
            task = self.tasks[claim.task_id]
            assert not task.stopped, "a stopped task was started (I7)"
            assert claim.attempt >= task.attempt
            task.attempt = claim.attempt
            known = self.held[worker].get(claim.task_id)
            if known and known.claim.attempt == claim.attempt:
                continue  # it runs already
            self.claims += 1
            if heard:  # else the answer was lost
                events = [(event.ids, event.data) for event in claim.log]
                self.held[worker][claim.task_id] = Held(claim, events, len(events))

    @rule(worker=st.sampled_from(WORKERS), tokens=st.integers(0, 3), twice=st.booleans())
    def step(self, worker: str, tokens: int, twice: bool) -> None:
        """One decode step of all that a worker believes it runs, maybe sent twice."""
        rows: list[AppendRow] = []
        for task_id, held in self.held[worker].items():
            last = min(held.written + tokens, LENGTH)
            while len(held.events) < last:
                held.events.append(self.token(self.claims, len(held.events) + 1))
            events = held.events[held.written : last]
            ends = ("completed", "stop") if last == LENGTH else ("", "")
            rows.append(AppendRow(task_id, held.claim.attempt, 7, held.written + 1, events, *ends))
        for _ in range(1 + twice):
            answers = self.run(
                self.scripts.append(
                    SHARD, worker=worker, model="m", result_ttl_s=1000, rows=rows
                )
            )  # fmt: skip
        for row, answer in zip(rows, answers, strict=True):
            held = self.held[worker][row.task_id]
            if row.task_id in self.deleted:
                assert answer == MISSING
                del self.held[worker][row.task_id]
                continue
            task = self.tasks[row.task_id]
            assert answer < 0 or held.claim.attempt >= task.attempt, "an old attempt wrote (I4)"
            if answer >= 0:
                task.attempt = held.claim.attempt
            if answer < 0 or answer == LENGTH + 1:
                del self.held[worker][row.task_id]
            else:
                held.written = answer

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        from millstream.shared.script_runner import script_text

        args: list[Any] = [worker, 1000, 1000, 10_000_000]
        held = list(self.held[worker].values())
        for one in held:
            args += [one.claim.task_id, one.claim.attempt]
        script = self.client.register_script(script_text("renew"))
        for one, answer in zip(
            held, self.run(script(keys=[SHARD.queue("m")], args=args)), strict=True
        ):
            if one.claim.task_id in self.deleted:
                assert answer != 1
                continue
            task = self.tasks[one.claim.task_id]
            ours = one.claim.attempt >= task.attempt and not task.terminal
            assert (answer == 1) <= ours, "an old attempt renewed (B20)"

    @rule(worker=st.sampled_from(WORKERS), blame=st.sampled_from(["", "engine"]))
    def release(self, worker: str, blame: str) -> None:
        held, self.held[worker] = self.held[worker], {}
        tasks = [(o.claim.task_id, o.claim.attempt) for o in held.values()]
        self.run(
            self.scripts.release(
                SHARD, worker=worker, model="m", lease_s=LEASE_S, blame=blame, tasks=tasks
            )
        )

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        self.held[worker] = {}

    @rule()
    def a_lease_goes_by(self) -> None:
        queue = SHARD.queue("m")
        try:
            pending = self.run(self.client.xpending_range(queue, "workers", "-", "+", 1000))
        except ResponseError:  # no group
            return
        for entry in pending:
            self.run(
                self.client.xclaim(
                    queue, "workers", entry["consumer"], 0, [entry["message_id"]],
                    idle=int(LEASE_S * 1000), justid=True,
                )
            )  # fmt: skip

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        task = self.tasks[task_id]
        state, _, completion = self.run(
            self.scripts.stop(SHARD, task_id=task_id, caller="c", result_ttl_s=1000)
        )
        assert state in ("completed", "cancelled", "failed")
        if task.terminal is None:
            assert state == "cancelled"
            assert completion == len(task.seen)
            task.stopped = True
        else:
            assert state == task.terminal

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        assert self.run(self.delete_of(task_id))
        assert not self.run(self.delete_of(task_id))
        del self.tasks[task_id]
        self.deleted.add(task_id)

    def delete_of(self, task_id: str) -> Any:
        return self.scripts.delete(SHARD, task_id=task_id, caller="c", result_ttl_s=1000)

    @rule()
    def forget_the_group(self) -> None:
        queue = SHARD.queue("m")
        if self.run(self.client.exists(queue)):
            self.run(self.client.xgroup_destroy(queue, "workers"))

    @rule()
    def sync(self) -> None:
        """Redis's file holds all that there is."""
        self.memory = self.run(self._dump())
        self.attempts = {task_id: task.attempt for task_id, task in self.tasks.items()}

    async def _dump(self) -> dict[bytes, bytes]:
        return {key: await self.client.dump(key) async for key in self.client.scan_iter("*")}

    @rule(pod_lives=st.booleans())
    def redis_lose_tail(self, pod_lives: bool) -> None:
        """Redis restarts from its file; I15: what a pod has shown stays, or is told to be lost."""
        self.run(self.client.flushdb())
        for key, value in self.memory.items():
            self.run(self.client.restore(key, 1_000_000, value))
        for task_id in self.tasks.keys() - self.attempts.keys():
            del self.tasks[task_id]  # a submit that was lost: 404
            for held in self.held.values():
                held.pop(task_id, None)
        for task_id in self.deleted & self.attempts.keys():  # it is there again
            if pod_lives:
                assert self.run(self.delete_of(task_id))
            else:
                self.deleted.remove(task_id)
                self.tasks[task_id] = Task()
        for task_id, task in self.tasks.items():
            task.attempt = self.attempts[task_id]
            if pod_lives:
                if task.seen:
                    answer = self.run(
                        self.scripts.restore(
                            SHARD, task_id=task_id, result_ttl_s=1000, events=task.seen
                        )
                    )
                    assert answer == "whole"  # nobody has written since
                elif task.stopped:
                    self.run(
                        self.scripts.stop(SHARD, task_id=task_id, caller="c", result_ttl_s=1000)
                    )
            else:  # its readers are gone with it
                task.seen, task.terminal, task.stopped = [], None, False

    @invariant()
    def logs_only_grow(self) -> None:
        for task_id, task in self.tasks.items():
            page = self.run(
                self.scripts.follow(SHARD, task_id=task_id, caller="c", pod="", after=0, count=100)
            )
            assert isinstance(page, LogPage)
            events = page.events
            assert [event.seq for event in events] == list(range(1, len(events) + 1))  # I1
            assert events[: len(task.seen)] == task.seen  # I2
            terminal = [event for event in events if event.terminal]
            assert terminal == events[len(events) - len(terminal) :]  # I3: last,
            assert len(terminal) <= 1  # and once
            for event in events:
                assert event.terminal or event.ids == str(event.seq)
            task.seen = events
            if terminal:
                assert task.terminal in (None, terminal[0].kind)
                task.terminal = terminal[0].kind
                if task.terminal == "completed":
                    assert len(events) == LENGTH + 1
                    usage = terminal[0].body["usage"]
                    assert usage["completion_tokens"] == LENGTH  # I8
            assert page.state.terminal == bool(terminal)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Submitted == ended + in the queue (I5)."""
        unfinished = sum(task.terminal is None for task in self.tasks.values())
        assert self.run(self.client.xlen(SHARD.queue("m"))) == unfinished


@pytest.mark.timeout(int(30 + EXAMPLES * 0.4))
def test_any_order_of_steps(redis_url: str) -> None:
    with asyncio.Runner() as runner:
        Protocol.loop = runner.get_loop()
        context = open_redis(redis_url)
        Protocol.client = runner.run(context.__aenter__())
        run_state_machine_as_test(
            Protocol,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],  # shrinking takes minutes; the steps are short anyway
            ),
        )
        runner.run(context.__aexit__(None, None, None))
