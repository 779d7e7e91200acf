"""The protocol against a model: any order of steps by any number of workers, on a real Valkey.

The clock is virtual: "a lease goes by" makes every pending entry idle for that long. A frozen
worker is one whose steps come later; a dead one is one whose steps come no more. A new task may be
started for a worker with room, which may miss that. Redis can lose
what was written since its file was synced; then pods put back what they have shown, or they died
too. Each claim makes a text of its own, so that bytes that come otherwise again are seen. New tasks
start in the order of the fair queue, which is known beforehand. Poison tasks end each worker that
takes a step with them; in the end all others work, and every task ends as it should.
"""

import time
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from redis.exceptions import ResponseError
from tests.support.model_task import MAX_ATTEMPTS, Held, Task
from tests.support.protocol_invariants import LENGTH, SHARD, WORKERS, Watched
from tests.support.script_bench import CALLED

from millstream.shared.fair_order import serving_order
from millstream.shared.keys import LEVELS
from millstream.shared.states import Priority
from millstream.shared.steps import MISSING, AppendRow, Claim, Submitted

LEASE_S = 600.0  # far beyond the run of an example
CALLERS = ("ann", "bob", "cy")
PREPAID = len(b"{}") / 4 + 2 * 64  # what a task costs before its first token
MAX_QUEUE = 4
ROUNDS = 40  # far more than the last tasks of an example take


class Protocol(Watched):
    """Three workers, any number of tasks."""

    def token(self, claim: int, seq: int) -> tuple[str, str]:
        """Token `seq` of a task, as this claim makes it."""
        return str(seq), f'"{claim} {seq}"'

    def new_id(self) -> str:
        """Not random, so that an example can be repeated."""
        self.submitted += 1
        return f"t0-{self.submitted:02d}"

    @rule(
        caller=st.sampled_from(CALLERS),
        priority=st.sampled_from(Priority),
        poison=st.sampled_from([False, False, False, True]),
        heard=st.booleans(),
    )
    def submit(self, caller: str, priority: Priority, poison: bool, heard: bool) -> None:
        task_id, takes = self.new_id(), self.who_takes_the_next()
        self.run(self.listen())
        answer = self.run(
            self.scripts.submit(
                SHARD, task_id=task_id, model="m", caller=caller, request=b"{}",
                max_queue=MAX_QUEUE, live_ttl_s=1000, priority=priority,
            )
        )  # fmt: skip
        if isinstance(answer, Submitted):
            self.tasks[task_id] = Task(caller=caller)
            if poison:
                self.poison.add(task_id)
            assert 1 <= answer.position <= MAX_QUEUE
            assert (self.state(task_id) == "running") == (takes is not None)
            if takes is not None:
                self.sent(takes, task_id, heard=heard)
        else:
            assert self.view().waiting >= MAX_QUEUE
        self.run(self.listening.aclose())  # whoever is lost is dead, not frozen

    def who_takes_the_next(self) -> str | None:
        """The worker for which a new task is started as it is submitted."""
        idle = self.run(self.client.zrange(SHARD.idle("m"), 0, -1, withscores=True))
        ready = [name for name, score in idle if int(score) < score % 1 * 4096 and score < CALLED]
        return ready[0].decode() if ready and not self.view().waiting else None

    def sent(self, worker: str, task_id: str, *, heard: bool) -> None:
        """A worker is sent a task; it may miss that."""
        message = self.run(self.listening.get_message(timeout=5))
        assert message["channel"].decode() == SHARD.run(worker)
        claim = Claim.sent(message["data"])
        assert (claim.task_id, claim.request) == (task_id, b"{}")
        self.note_claim(worker, claim)
        self.claims += 1
        if heard:
            self.held[worker][task_id] = Held(claim, [], 0)

    @rule(
        worker=st.sampled_from(WORKERS),
        free=st.integers(1, 3),
        sweep=st.booleans(),
        recover=st.booleans(),
        heard=st.booleans(),
        sendable=st.booleans(),
    )
    def claim(
        self, worker: str, *, free: int, sweep: bool, recover: bool, heard: bool,
        sendable: bool = False,
    ) -> None:  # fmt: skip
        view, owned = self.view(), 0
        if sendable and not recover:  # what it was sent and has not heard of takes slots
            owned = len(self.run(self.entries_of(worker)))
        order = serving_order(view.line, view.counters, cost=PREPAID)
        ended = self.letters()
        claims = self.claimed(worker, free=free, sweep=sweep, recover=recover, sendable=sendable)
        started = [claim.task_id for claim in claims if claim.task_id in order]
        if self.letters() == ended:  # else its caller got back what was paid in advance
            assert started == order[: len(started)], "not the one whose turn it was"
        assert len(claims) >= min(free - owned, len(order)), "a slot is free while a task waits"
        for claim in claims:
            self.note_claim(worker, claim)
            known = self.held[worker].get(claim.task_id)
            if known and known.claim.attempt == claim.attempt:
                continue  # it runs already
            self.claims += 1
            if heard:  # else the answer was lost
                events = [(event.ids, event.data) for event in claim.log]
                self.held[worker][claim.task_id] = Held(claim, events, len(events))

    def note_claim(self, worker: str, claim: Claim) -> None:
        task = self.tasks[claim.task_id]
        assert not task.stopped, "a stopped task was started (I7)"
        assert claim.attempt >= task.attempt
        if claim.attempt > task.attempt:
            task.losses.give(worker, len(claim.log), first=task.attempt == 0)
            counted = self.run(self.scripts.task_fields(SHARD, claim.task_id)).get("lost", "0")
            assert int(counted) == task.losses.count, "losses were miscounted"
        task.attempt = claim.attempt

    def claimed(
        self, worker: str, *, free: int, sweep: bool, recover: bool = False,
        sendable: bool = False,
    ) -> list[Claim]:  # fmt: skip
        claims, _ = self.run(
            self.scripts.claim(
                SHARD, worker=worker, model="m", free=free, running=0, lease_s=LEASE_S,
                max_attempts=MAX_ATTEMPTS, live_ttl_s=1000, result_ttl_s=1000, max_task_s=10_000,
                sweep=sweep, recover=recover, sendable=sendable,
                suspects=sum(held.claim.suspect for held in self.held[worker].values()),
            )
        )  # fmt: skip
        return claims

    @rule(worker=st.sampled_from(WORKERS), tokens=st.integers(0, 3), twice=st.booleans())
    def step(self, worker: str, tokens: int, twice: bool) -> None:
        """One decode step of all that a worker believes it runs, maybe sent twice."""
        if tokens and self.poison & self.held[worker].keys():
            self.held[worker] = {}  # it ends with the step, and nothing of it was written
        else:
            self.write(worker, tokens, twice=twice)

    def write(self, worker: str, tokens: int, *, twice: bool = False) -> None:
        """Of all tasks but poison ones, which never get so far."""
        rows: list[AppendRow] = []
        for task_id, held in self.held[worker].items():
            if task_id in self.poison:
                continue
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
            if answer >= 0 and held.claim.attempt > task.attempt:  # Redis had lost the claim
                task.attempt = held.claim.attempt
                task.losses.owner, task.losses.drained = worker, False
            if answer < 0 or answer == LENGTH + 1:
                del self.held[worker][row.task_id]
            else:
                held.written = answer

    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        held = list(self.held[worker].values())
        answers = self.run(
            self.scripts.renew(
                SHARD, worker=worker, model="m", live_ttl_s=1000, result_ttl_s=1000,
                tasks=[(one.claim.task_id, one.claim.attempt) for one in held],
            )
        )  # fmt: skip
        for one, answer in zip(held, answers, strict=True):
            if one.claim.task_id in self.deleted:
                assert answer != 1
                continue
            task = self.tasks[one.claim.task_id]
            ours = one.claim.attempt >= task.attempt and not task.terminal
            assert (answer == 1) <= ours, "an old attempt renewed (B20)"

    @rule(
        worker=st.sampled_from(WORKERS),
        blame=st.sampled_from(["", "engine"]),
        unheard=st.booleans(),
    )
    def release(self, worker: str, blame: str, unheard: bool) -> None:
        held, self.held[worker] = self.held[worker], {}
        tasks = [(o.claim.task_id, o.claim.attempt) for o in held.values()]
        given = self.run(
            self.scripts.release(
                SHARD, worker=worker, model="m", lease_s=LEASE_S, blame=blame, tasks=tasks,
                unheard=unheard,
            )
        )  # fmt: skip
        for task_id, attempt in tasks:
            task = self.tasks.get(task_id)
            ours = (attempt, worker, None)
            if task and ours == (task.attempt, task.losses.owner, task.terminal):
                task.losses.let_go(blame)
                given -= 1
        for task_id, task in self.tasks.items():
            theirs = task.losses.owner == worker and task.terminal is None
            if unheard and theirs and not self.owner_of(task_id):
                task.losses.let_go("")  # where the group was lost, its lease lapses instead
                given -= 1
        assert given == 0

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
        state, _, completion, now = self.run(
            self.scripts.stop(SHARD, task_id=task_id, caller=task.caller, result_ttl_s=1000)
        )
        assert state in ("completed", "cancelled", "failed")
        assert now == (task.terminal is None)
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
        self.deleted[task_id] = self.tasks.pop(task_id).caller
        assert self.run(self.delete_of(task_id))
        assert not self.run(self.delete_of(task_id))

    def delete_of(self, task_id: str) -> Any:
        caller = self.deleted[task_id]
        return self.scripts.delete(SHARD, task_id=task_id, caller=caller, result_ttl_s=1000)

    @rule()
    def forget_the_group(self) -> None:
        queue = SHARD.queue("m")
        if self.run(self.client.exists(queue)):
            self.run(self.client.xgroup_destroy(queue, "workers"))

    @rule(what=st.sampled_from(["queue", "line", "turns"]))
    def lose_a_key(self, what: str) -> None:
        """Somebody deletes a key of the queue; who looks, and the next sweep, mend it."""
        lost = {
            "queue": [SHARD.queue("m")],
            "line": [SHARD.line("m")],
            "turns": [SHARD.turns(level, "m") for level in LEVELS],
        }
        self.run(self.client.delete(*lost[what]))
        self.logs_only_grow()  # a reader of each task
        waits = [t for t in self.tasks if self.state(t) == "queued"]
        if what == "turns":  # nothing but a claim misses them
            claims = self.claimed("w0", free=1, sweep=False)
            assert bool(claims) == bool(waits)
            for claim in claims:
                self.note_claim("w0", claim)
                self.claims += 1
        self.claimed("w0", free=0, sweep=True)

    @rule(caller=st.sampled_from(CALLERS))
    def submit_by_an_older_pod(self, caller: str) -> None:
        """One that knows no fair queue, during an upgrade."""
        task_id = self.new_id()
        self.run(self.client.hset(SHARD.task(task_id), mapping={
            "request": "{}", "model": "m", "caller": caller, "state": "queued", "attempt": 0,
            "seq": 0, "tokens": 0, "created": int(time.time() * 1000), "orphan_ms": 0,
        }))  # fmt: skip
        entry = self.run(self.client.xadd(SHARD.queue("m"), {"task": task_id}))
        self.run(self.client.hset(SHARD.task(task_id), "entry", entry))
        self.run(self.client.expire(SHARD.queue("m"), 1000))
        self.tasks[task_id] = Task(caller=caller)
        self.claimed("w0", free=0, sweep=True)

    @rule()
    def sync(self) -> None:
        """Redis's file holds all that there is."""
        self.memory = self.run(self._dump())
        self.counts = {
            task_id: (task.attempt, replace(task.losses)) for task_id, task in self.tasks.items()
        }

    async def _dump(self) -> dict[bytes, bytes]:
        return {key: await self.client.dump(key) async for key in self.client.scan_iter("*")}

    @rule(pod_lives=st.booleans())
    def redis_lose_tail(self, pod_lives: bool) -> None:
        """Redis restarts from its file; I15: what a pod has shown stays, or is told to be lost."""
        self.run(self.client.flushdb())
        for key, value in self.memory.items():
            self.run(self.client.restore(key, 1_000_000, value))
        for task_id in self.tasks.keys() - self.counts.keys():
            del self.tasks[task_id]  # a submit that was lost: 404
            for held in self.held.values():
                held.pop(task_id, None)
        for task_id in self.deleted.keys() & self.counts.keys():  # it is there again
            if pod_lives:
                assert self.run(self.delete_of(task_id))
            else:
                self.tasks[task_id] = Task(caller=self.deleted.pop(task_id))
        for task_id, task in self.tasks.items():
            task.attempt, losses = self.counts[task_id]
            task.losses = replace(losses)
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
                        self.scripts.stop(
                            SHARD, task_id=task_id, caller=task.caller, result_ttl_s=1000
                        )
                    )
            else:  # its readers are gone with it
                task.seen, task.terminal, task.stopped = [], None, False

    def teardown(self) -> None:
        """From now on nobody dies but by poison: all tasks end, and as they should (I5, I14)."""
        left = {task_id for task_id, task in self.tasks.items() if task.terminal is None}
        doomed = {
            task_id
            for task_id in left
            if task_id in self.poison
            or self.tasks[task_id].losses.with_one_more(len(self.tasks[task_id].seen))
            >= MAX_ATTEMPTS
        }
        for _ in range(ROUNDS):
            if all(task.terminal for task in self.tasks.values()):
                break
            self.a_lease_goes_by()
            for worker in WORKERS:
                self.held[worker] = {}
                self.claim(worker, free=3, sweep=True, recover=False, heard=True)
            for worker in WORKERS:
                self.write(worker, 1)
                self.step(worker, LENGTH, twice=False)
            self.logs_only_grow()
        ends = {task_id: self.tasks[task_id].terminal for task_id in left}
        assert ends == {task_id: "failed" if task_id in doomed else "completed" for task_id in left}
