"""What `millstream doctor` looks at in Redis: one finding a check."""

import asyncio
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import redis.asyncio
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from millstream.shared.address import mask_password
from millstream.shared.cluster import BoundedCluster
from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys, keys_of_queue
from millstream.shared.redis_check import (
    Finding,
    Info,
    Verdict,
    check_eviction,
    check_topology,
    check_version,
    read_infos,
)
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow, LogPage
from millstream.shared.subscription import Subscription

SHARD = Keys(0)
SLOTS = 16_384
CLOCK_S = 1.0
SLOW_MS = 10.0
"""A worker writes once a decode step, which takes 20 ms or more."""
FULL = 0.8
_HEARD_S = 2.0


async def examine_redis(url: str) -> list[Finding]:
    """All that can be found out; the first finding alone if Redis does not answer."""
    shown = mask_password(url)
    async with open_redis(url, pool_size=2) as client:
        anything: Any = client  # redis-py does not type what it answers
        try:
            await anything.ping()
        except AuthenticationError as error:
            return [_fault("redis", f"{shown} refuses the login ({error}): correct the URL")]
        except (RedisError, OSError) as error:
            return [_fault("redis", f"{shown} does not answer ({error}): start it, or change it")]
        findings = [_ok("redis", f"{shown} answers")]
        try:
            infos = await read_infos(client)
        except ResponseError as error:
            findings.append(_warning("setup", f"cannot be looked at ({error}): allow INFO"))
        except RedisError as error:
            findings.append(_fault("setup", f"no primary answers ({error}): bring them back"))
        else:
            configs = await _read_configs(client)
            for server, info in infos.items():
                findings += _check_server(server, info, configs.get(server, {}))
            one = next(iter(infos))
            findings.append(await _check_cluster(anything, infos[one], configs.get(one, {}), url))
        findings += [
            await _check_clock(anything),
            await _check_task(client),
            await _check_scripts(client),
            await _check_channel(url, client),
        ]
    return findings


def _check_server(server: str, info: Info, config: dict[str, str]) -> list[Finding]:
    """What one server says of itself; of a cluster's, each finding names it."""
    findings = [
        check_version(info),
        check_eviction(info),
        check_memory(info),
        check_persistence(info, config),
        check_replication(info, config),
        check_timeout(config),
    ]
    if not server:
        return findings
    return [Finding(f"{item.check} {server}", item.verdict, item.text) for item in findings]


def check_memory(info: Info) -> Finding:
    """How much is left before writes are refused."""
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most:
        return _warning(
            "memory",
            f"{_mib(used)} used and no limit, so the system may kill Redis: set maxmemory",
        )
    text = f"{_mib(used)} of {_mib(most)} used"
    if used >= most:
        return _fault("memory", f"{text}, and no write is taken: raise maxmemory")
    if used >= FULL * most:
        return _warning("memory", f"{text}: raise maxmemory before new tasks are refused")
    return _ok("memory", text)


def check_persistence(info: Info, config: dict[str, str]) -> Finding:
    """What a restart and a crash lose."""
    if not int(info.get("aof_enabled", 0)):
        return _warning(
            "persistence",
            "no append-only file, so a restart loses every task: set appendonly yes",
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return _fault("persistence", "the append-only file cannot be written: look at its disk")
    match config.get("appendfsync"):
        case "always":
            return _ok(
                "persistence", "append-only file, synced at each write: a crash loses nothing"
            )
        case "no":
            return _warning(
                "persistence",
                "append-only file, synced when the system likes to, so a crash of the machine can "
                "lose half a minute: set appendfsync everysec",
            )
        case "everysec":
            return _ok(
                "persistence",
                "append-only file, synced each second: a crash of the machine loses the last one",
            )
        case _:
            return _ok("persistence", "append-only file; the server does not say how it is synced")


def check_replication(info: Info, config: dict[str, str]) -> Finding:
    """Whether it is a primary, and what its replicas are good for."""
    if info.get("role") == "slave":
        return _fault(
            "replication", "this is a replica and takes no writes: give its primary's URL"
        )
    count = int(info.get("connected_slaves", 0))
    least = config.get("min-replicas-to-write", "0")
    text = f"a primary with {count} replica{'' if count == 1 else 's'}"
    if count and least == "0":
        return _warning(
            "replication",
            f"{text}; a primary that is cut off from all of them goes on taking writes, which a "
            "failover undoes: set min-replicas-to-write 1",
        )
    return _ok("replication", f"{text}, min-replicas-to-write {least}" if count else text)


def check_timeout(config: dict[str, str]) -> Finding:
    """Whether the server closes idle connections."""
    seconds = config.get("timeout")
    if seconds is None:
        return _ok("timeout", "the server does not say whether it closes idle connections")
    if seconds != "0":
        return _warning(
            "timeout",
            f"idle connections are closed after {seconds} s and made anew: set timeout 0",
        )
    return _ok("timeout", "idle connections stay open")


def check_clock(ahead_s: float) -> Finding:
    """Whether Redis's clock and this machine's, which is so far behind it, tell the same time."""
    if abs(ahead_s) > CLOCK_S:
        return _warning(
            "clock",
            f"Redis is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this "
            "machine; leases do not mind, times that are shown do: run NTP on both",
        )
    return _ok("clock", f"{abs(ahead_s) * 1000:.0f} ms apart from this machine's")


async def _read_configs(client: redis.asyncio.Redis) -> dict[str, dict[str, str]]:
    """What CONFIG tells, by server as in `read_infos`; hosted servers forbid it."""
    untyped: Any = client
    names = ("appendfsync", "min-replicas-to-write", "timeout", "cluster-require-full-coverage")
    try:
        if not isinstance(client, BoundedCluster):
            return {"": await untyped.config_get(*names)}
        return {
            str(node.name): await untyped.config_get(*names, target_nodes=node)
            for node in await client.primaries()
        }
    except RedisError:
        return {}


async def _check_cluster(client: Any, info: Info, config: dict[str, str], url: str) -> Finding:
    if not int(info.get("cluster_enabled", 0)):
        return _ok("cluster", "one server, no cluster mode")
    topology = check_topology(info, url)
    if topology.verdict is Verdict.FAULT:
        return _fault("cluster", topology.text)
    try:
        state: dict[str, str] = await client.cluster_info()
    except RedisError as error:
        return _fault("cluster", f"CLUSTER INFO fails ({error}): allow it, or bring the node back")
    covered = int(state.get("cluster_slots_ok", 0))
    if state.get("cluster_state") != "ok" or covered != SLOTS:
        return _fault(
            "cluster",
            f"state {state.get('cluster_state')}, {covered} of {SLOTS} slots served: bring its "
            "primaries back, or assign the slots anew",
        )
    if config.get("cluster-require-full-coverage") == "yes":
        return _warning(
            "cluster",
            f"all {SLOTS} slots are served, but all stop while one primary is away: set "
            "cluster-require-full-coverage no",
        )
    return _ok("cluster", f"all {SLOTS} slots are served")


async def _check_clock(client: Any) -> Finding:
    before = time.time()
    try:
        seconds, micros = await client.time()
    except RedisError as error:
        return _fault("clock", f"TIME fails ({error}): allow the command")
    return check_clock(seconds + micros / 1e6 - (before + time.time()) / 2)


async def _check_task(client: Any) -> Finding:
    """Take a task through its life, under a model's name that nobody has: so all is permitted."""
    scripts = Scripts(client)
    model = f"doctor-{secrets.token_hex(8)}"
    task_id = new_task_id(0)
    try:
        await scripts.submit(
            SHARD, task_id=task_id, model=model, caller=model, request=b"{}", max_queue=1,
            live_ttl_s=60,
        )  # fmt: skip
        (claim,), _ = await scripts.claim(
            SHARD, worker=model, model=model, free=1, running=0, lease_s=60, max_attempts=3,
            max_task_s=60, sweep=True, live_ttl_s=60, result_ttl_s=60,
        )  # fmt: skip
        row = AppendRow(task_id, claim.attempt, 1, 1, [("1", '"x"')], "completed", "stop")
        await scripts.append(SHARD, worker=model, model=model, result_ttl_s=60, rows=[row])
        page = await scripts.follow(
            SHARD, task_id=task_id, caller=model, pod=model, after=0, count=9
        )
        whole = isinstance(page, LogPage) and [event.kind for event in page.events]
        await scripts.delete(SHARD, task_id=task_id, caller=model, result_ttl_s=60)
        await client.delete(*keys_of_queue(SHARD, model))
        day = (await client.time())[0] // 86_400
        await client.delete(SHARD.usage(model, day))
        await client.srem(SHARD.callers(day), model)
    except (RedisError, OSError) as error:
        return _fault(
            "permissions",
            f"a task does not go through ({error}): the user needs all keys `{{ms*`, all channels "
            "`{ms*`, and the commands that docs/deployment.md names",
        )
    if whole != ["t", "completed"]:
        return _fault("permissions", f"a task came out as {whole}: is this a Redis?")
    return _ok("permissions", "a task goes through: submitted, claimed, written, read")


async def _check_scripts(client: Any) -> Finding:
    scripts = Scripts(client)
    times: list[float] = []
    try:
        for _ in range(11):
            began = time.perf_counter()
            await scripts.ready()
            times.append(time.perf_counter() - began)
    except (RedisError, OSError) as error:
        return _fault("scripts", f"writes are refused: {error}")
    median = statistics.median(times) * 1000
    if median > SLOW_MS:
        return _warning(
            "scripts", f"a call takes {median:.1f} ms: bring Redis closer to this machine"
        )
    return _ok("scripts", f"a call takes {median:.1f} ms")


async def _check_channel(url: str, client: Any) -> Finding:
    """Whether what is published on a sharded channel is heard."""
    channel = SHARD.pod(f"doctor-{secrets.token_hex(8)}")
    heard, opened = asyncio.Event(), asyncio.Event()

    def on_message(_: bytes) -> None:
        heard.set()

    listening = asyncio.create_task(_listen(url, channel, opened.set, on_message))
    try:
        async with asyncio.timeout(_HEARD_S):
            await opened.wait()
            await Scripts(client).publish(channel, b"?")
            await heard.wait()
    except (TimeoutError, RedisError, OSError) as error:
        why = str(error) or "nothing was heard"
        return _fault("channels", f"sharded pub/sub does not work ({why}): allow SSUBSCRIBE")
    finally:
        listening.cancel()
        await asyncio.wait({listening})
    return _ok("channels", "sharded pub/sub works")


async def _listen(
    url: str, channel: str, on_open: Callable[[], None], on_message: Callable[[bytes], None]
) -> None:
    await Subscription(url, channel, on_open=on_open, on_message=on_message).run()


def _ok(check: str, text: str) -> Finding:
    return Finding(check, Verdict.OK, text)


def _warning(check: str, text: str) -> Finding:
    return Finding(check, Verdict.WARNING, text)


def _fault(check: str, text: str) -> Finding:
    return Finding(check, Verdict.FAULT, text)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
