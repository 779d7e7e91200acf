"""Typed callers of a task's atomic steps; each is one script in `lua/`, and may be sent again."""

from collections.abc import Sequence
from typing import Any

import msgspec
import redis.asyncio

from millstream.shared import keys
from millstream.shared.events import Event, decode_log, gapless
from millstream.shared.keys import Keys
from millstream.shared.metrics.calls import CallStats
from millstream.shared.queue_depth import ClassDepth, QueueDepth
from millstream.shared.redis_check import Info, read_infos
from millstream.shared.script_runner import ScriptRunner
from millstream.shared.states import Priority, TaskState
from millstream.shared.steps import (
    AppendRow,
    Claim,
    LogPage,
    QueueView,
    Refused,
    StopAnswer,
    Submitted,
    submit_answer,
)

_pack = msgspec.msgpack.Encoder().encode


class Scripts:
    """The atomic steps on one Redis.

    Every call ends within `CALL_S`, with a `RedisError` where Redis is away.
    """

    def __init__(self, client: redis.asyncio.Redis, stats: CallStats | None = None) -> None:
        self.runner = ScriptRunner(client, stats)
        self._client = self.runner.client
        self._run = self.runner.run
        self._bounded = self.runner.bounded

    async def submit(
        self,
        shard: Keys,
        *,
        task_id: str,
        model: str,
        caller: str,
        request: bytes,
        max_queue: int,
        live_ttl_s: int,
        idempotency_key: str | None = None,
        body_hash: str = "",
        idempotency_ttl_s: int = 86_400,
        orphan_s: float = 0,
        more: Sequence[tuple[str, bytes]] = (),
        admitted_ms: int | None = None,
        reserved: Sequence[str] = (),
        life_s: float = 3600,
        priority: Priority = Priority.INTERACTIVE,
        weight: float = 1,
        promise: bool = True,
        max_waiting: int | None = None,
        pod: str = "",
    ) -> Submitted | Refused:
        """Accept a task, or say why not; no task is stored in the second case.

        With `more`, further tasks (id, request) of the same shard are accepted with it or not at
        all.

        It ends `life_s` from now at the latest. Its caller's share of its class goes by `weight`.
        Without `promise` a refusal tells no time to come back, which no other is told.
        With `orphan_s` the answer belongs to a connection: should its pod die, the task is stopped
        once it has run for so long without any pod that follows it.

        For a limited caller, `admitted_ms` is when the request was counted, `reserved` names for
        each task what is settled at its end, and `max_waiting` of its tasks may wait here.

        All that the tasks bring goes to the channel of `pod`, as after `follow`.
        """
        script_keys = [shard.task(task_id), shard.queue(model)]
        if idempotency_key is not None:
            script_keys.append(shard.idempotency(caller, idempotency_key))
        answer = await self._run(
            "submit",
            script_keys,
            [
                task_id,
                model,
                caller,
                request,
                max_queue,
                live_ttl_s,
                body_hash,
                idempotency_ttl_s,
                int(orphan_s * 1000),
                # Lua's msgpack knows no bytes.
                _pack([part for task_id, body in more for part in (task_id, body.decode())]),
                admitted_ms or "",
                " ".join(reserved),
                priority,
                weight,
                int(life_s * 1000),
                int(promise),
                "" if max_waiting is None else max_waiting,
                pod,
            ],
        )
        return submit_answer(answer)

    async def claim(
        self,
        shard: Keys,
        *,
        worker: str,
        model: str,
        free: int,
        running: int,
        lease_s: float,
        max_attempts: int,
        live_ttl_s: int,
        result_ttl_s: int,
        max_task_s: int,
        sweep: bool,
        suspects: int = 0,
        recover: bool = False,
        rung: bool = False,
        sendable: bool = False,
    ) -> tuple[list[Claim], int]:
        """Take up to `free` tasks; also tells how many still wait.

        A worker that is `sendable` listens for tasks that are started for it as they are submitted.
        With `sweep`, tasks whose lease has lapsed come first. With `recover`, also those that an
        earlier claim gave us in an answer that was lost; ones that run already may be among them.
        With `rung`, no more new ones than level the load over the workers with free slots.
        """
        rows, waiting = await self._run(
            "claim",
            [shard.queue(model)],
            [
                worker,
                model,
                free,
                running,
                int(lease_s * 1000),
                max_attempts,
                int(sweep),
                int(recover),
                int(rung),
                live_ttl_s,
                result_ttl_s,
                max_task_s * 1000,
                suspects,
                int(sendable),
            ],
        )
        return [Claim.of(row) for row in rows], waiting

    async def append(
        self,
        shard: Keys,
        *,
        worker: str,
        model: str,
        result_ttl_s: int,
        rows: Sequence[AppendRow],
    ) -> list[int]:
        """Write new events of many tasks; per row the last number in the log, or a refusal."""
        packed = _pack([row.flatten() for row in rows])
        return await self._run("append", [shard.queue(model)], [worker, result_ttl_s, packed])

    async def restore(
        self, shard: Keys, *, task_id: str, result_ttl_s: int, events: Sequence[Event]
    ) -> str:
        """Put back what was shown of a log and that Redis lost.

        `whole`: it is all there now. `short`: the log lacks more than this. `other`: it went on
        otherwise meanwhile, and whoever has read so far is refused. `unknown`: the task is gone.
        """
        parts = [part for event in events for part in (event.kind, event.ids, event.data)]
        answer = await self._run(
            "restore",
            [shard.task(task_id)],
            [task_id, result_ttl_s, events[0].seq, _pack(parts)],
        )
        return answer.decode()

    async def renew(
        self,
        shard: Keys,
        *,
        worker: str,
        model: str,
        live_ttl_s: int,
        result_ttl_s: int,
        tasks: Sequence[tuple[str, int]],
    ) -> list[int]:
        """Renew the leases of tasks (id, attempt): 1 kept, else STALE or ENDED."""
        args: list[Any] = [worker, live_ttl_s, result_ttl_s]
        for task in tasks:
            args.extend(task)
        return await self._run("renew", [shard.queue(model)], args)

    async def release(
        self,
        shard: Keys,
        *,
        worker: str,
        model: str,
        lease_s: float,
        blame: str,
        tasks: Sequence[tuple[str, int]],
        unheard: bool = False,
    ) -> int:
        """Hand tasks (id, attempt) over at once; how many were still ours.

        With a reason in `blame` the loss counts against the tasks as a dead worker's would. With
        `unheard`, whatever else is ours goes too, without blame: we do not know of it.
        """
        args: list[Any] = [worker, model, int(lease_s * 1000), blame, int(unheard)]
        for task in tasks:
            args.extend(task)
        return await self._run("release", [shard.queue(model)], args)

    async def retry(
        self,
        shard: Keys,
        *,
        model: str,
        entry: str,
        task_id: str,
        max_queue: int,
        live_ttl_s: int,
        life_s: float = 3600,
    ) -> str:
        """Make a new task of a dead letter, which goes with it: `queued`, `unknown` or `full`."""
        answer = await self._run(
            "retry",
            [shard.dead(model), shard.queue(model), shard.task(task_id)],
            [entry, task_id, model, max_queue, live_ttl_s, int(life_s * 1000)],
        )
        return answer.decode()

    async def stop(
        self,
        shard: Keys,
        *,
        task_id: str,
        caller: str,
        result_ttl_s: int,
        left_by: str = "",
        least_tokens: int = 0,
    ) -> StopAnswer:
        """End a task as cancelled if it has not ended; how it stands then.

        With `left_by`, the pod whose reader has gone, it goes on if another pod follows it, or if
        its answer belongs to no connection. With fewer than `least_tokens` in its log it goes on,
        and the answer is `SHORT`. The state is `unknown` or `expired` where there is no such task
        of this caller.
        """
        answer = await self._run(
            "stop",
            [shard.task(task_id)],
            [task_id, caller, result_ttl_s, left_by, least_tokens],
        )
        if len(answer) == 1:
            return StopAnswer(answer[0].decode())
        return StopAnswer(answer[0].decode(), int(answer[1]), int(answer[2]), bool(answer[3]))

    async def delete(
        self,
        shard: Keys,
        *,
        task_id: str,
        caller: str,
        result_ttl_s: int,
        withdraw: bool = False,
    ) -> bool:
        """End and forget a task, as if it had never been; whether there was one of this caller.

        With `withdraw` its submit had no answer: should it come yet, it makes no task.
        """
        answer = await self._run(
            "delete", [shard.task(task_id)], [task_id, caller, result_ttl_s, int(withdraw)]
        )
        return answer == b"deleted"

    async def follow(
        self, shard: Keys, *, task_id: str, caller: str, pod: str, after: int, count: int
    ) -> LogPage | str:
        """Events after number `after`, and from now on the rest on the pod's channel.

        An empty `pod` only reads. Answers `unknown` or `expired` where there is no such task,
        `rewound` if events up to `after` were lost by Redis and came otherwise again, and `torn` if
        one of those asked for is missing.
        """
        answer = await self._run(
            "follow", [shard.task(task_id)], [task_id, caller, pod, after, count]
        )
        if answer[0] != b"ok":
            return answer[0].decode()
        # Where none are asked for, XRANGE answers nil.
        seq, events = int(answer[2]), decode_log(answer[4] or ())
        if not gapless(events, after=after, upto=min(seq, after + count)):
            return "torn"
        return LogPage(TaskState(answer[1].decode()), seq, answer[3].decode(), events)

    async def unfollow(self, shard: Keys, *, pod: str, task_ids: Sequence[str]) -> None:
        """Stop the pod's channel from carrying these tasks."""
        await self._run("unfollow", [shard.task(task_ids[0])], [pod, *task_ids])

    async def end_due(self, shard: Keys, *, result_ttl_s: int) -> float | None:
        """End the tasks whose deadline has passed; seconds until the next one, None: there is none.

        0 where more of them are due at once than one call ends.
        """
        answer = await self._run("due", [shard.due()], [result_ttl_s])
        return None if answer < 0 else answer / 1000

    async def waiting(self, shard: Keys, *, model: str, count: int = 0) -> QueueView:
        """How a model's queue stands, with `count` (at least 1) of those who wait."""
        answer = await self._run("waiting", [shard.queue(model)], [model, max(1, count)])
        return QueueView.of(answer)

    async def depth(self, shard: Keys, *, model: str) -> QueueDepth:
        """How deep a model's queue is on a shard."""
        running, dead, flat = await self._run("depth", [shard.queue(model)], [model])
        return QueueDepth(
            running,
            dead,
            {
                Priority(name.decode()): ClassDepth(waiting, oldest / 1000)
                for name, waiting, oldest in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
            },
        )

    async def publish(self, channel: str, payload: bytes) -> int:
        """Send a message on a sharded channel; how many are subscribed where its slot lies."""
        return await self._bounded(
            self._client.execute_command("SPUBLISH", channel, payload), "publish"
        )

    async def infos(self) -> dict[str, Info]:
        """What each server says of itself, by its address."""
        return await self._bounded(read_infos(self._client), "info")

    async def remembered_models(self) -> dict[str, float]:
        """Models a worker was ready for within the last week, with the Unix time of the last."""
        rows: dict[bytes, bytes] = await self._bounded(self._client.hgetall(keys.MODELS))
        return {model.decode(): int(seen) / 1000 for model, seen in rows.items()}

    async def forget_fleet(self, *, keep_models: Sequence[str], shards: int) -> dict[str, int]:
        """Forget all processes of the roster, and all models that had a worker but these.

        A model that has unfinished tasks is kept too: how many, by model.
        """
        for registry in (keys.WORKERS, keys.APIS):
            await self._bounded(self._client.delete(registry))
        waiting: dict[str, int] = {}
        for model in (await self.remembered_models()).keys() - set(keep_models):
            queues = [keys.Keys(shard).queue(model) for shard in range(shards)]
            if tasks := sum([await self._bounded(self._client.xlen(queue)) for queue in queues]):
                waiting[model] = tasks
            else:
                await self._bounded(self._client.hdel(keys.MODELS, model))
        return waiting

    async def task_fields(self, shard: Keys, task_id: str) -> dict[str, str]:
        """All of a task's state but its request; empty where there is no such task."""
        rows: dict[bytes, bytes] = await self._bounded(self._client.hgetall(shard.task(task_id)))
        return {name.decode(): value.decode() for name, value in rows.items() if name != b"request"}

    async def request_of(self, shard: Keys, task_id: str) -> bytes | None:
        """What a task's caller asked for; None where there is no such task."""
        return await self._bounded(self._client.hget(shard.task(task_id), "request"))

    async def knows(self, shard: Keys, *, caller: str, idempotency_key: str) -> bool:
        """Whether an idempotency key stands for a task."""
        key = shard.idempotency(caller, idempotency_key)
        return await self._bounded(self._client.exists(key)) == 1

    async def leave(self, registry: str, member: str) -> None:
        """Take a process off the roster at once."""
        await self._bounded(self._client.hdel(registry, member))

    async def ready(self) -> None:
        """Answer if Redis takes writes; else raise what a write would."""
        await self._run("ready", [keys.WORKERS], [])

    async def roster(self, registry: str, *, ttl_s: float) -> list[bytes]:
        """The JSON of every process whose last heartbeat is no older than `ttl_s`."""
        return await self._run("roster", [registry], [int(ttl_s * 1000)])

    async def heartbeat(
        self, registry: str, *, member: str, json: bytes, ttl_s: float, model: str = ""
    ) -> bool:
        """Say that a process lives, and for which model it is ready; whether it is to drain."""
        names = [registry, keys.MODELS, keys.drain(member)]
        return await self._run("heartbeat", names, [member, json, int(ttl_s + 1), model]) == 1
