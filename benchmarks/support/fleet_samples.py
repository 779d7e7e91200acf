"""Looks at a fleet's processes and its store: what they hold now."""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis.asyncio
from benchmarks.support.lean_http import asked

_KIND = re.compile(rb"\{ms(?::\d+)?\}:(\w+)")
_OPEN = re.compile(rb"^millstream_streams_open (\d+)", re.MULTILINE)
_AT_ONCE = 500
_WEIGHED = 50  # keys of a kind whose size is looked at

MIB = 2**20


def process_figures(pids: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Of each process, by role: MB of memory (all, and what is in no file), threads, files, CPU.

    Raises:
        psutil.NoSuchProcess: one has ended.
    """
    return {role: _figures(pid) for role, pid in pids.items()}


def _figures(pid: int) -> dict[str, float]:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup}
    process = psutil.Process(pid)
    return {
        "rss_mb": kib["Rss"] / 1024,
        "anonymous_mb": kib["Pss_Anon"] / 1024,
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "cpu_s": sum(process.cpu_times()[:2]),
    }


async def store_figures(client: redis.asyncio.Redis) -> dict[str, float]:
    """What the server says of itself, in MB where it is memory."""
    info: dict[str, Any] = await client.info()
    stats: dict[str, Any] = await client.memory_stats()
    database = stats["db.0"]
    tables = database["overhead.hashtable.main"] + database["overhead.hashtable.expires"]
    return {
        "used_mb": info["used_memory"] / MIB,
        "tables_mb": tables / MIB,
        "keys": sum(space["keys"] for name, space in info.items() if name.startswith("db")),
        "file_mb": info["aof_current_size"] / MIB,
        "rewrites": info["aof_rewrites"],
    }


async def streams_open(ports: Sequence[int]) -> int:
    """The streams that pods have open, all together."""
    total = 0
    for port in ports:
        async with asked(port, "/metrics") as answer:
            if found := _OPEN.search(await answer.body()):
                total += int(found[1])
    return total


@dataclass
class Kind:
    """The keys of a kind."""

    count: int = 0
    without_end: int = 0
    """Those that have no time to live."""
    key_bytes: float = 0.0
    """What one holds, on average."""

    @property
    def mb(self) -> float:
        """What all of them hold."""
        return self.count * self.key_bytes / MIB


async def key_kinds(client: redis.asyncio.Redis) -> dict[str, Kind]:
    """All keys of the store, by the word after the shard's tag."""
    kinds: defaultdict[str, Kind] = defaultdict(Kind)
    weighed: defaultdict[str, list[int]] = defaultdict(list)
    async for keys in _scan(client):
        async with client.pipeline(transaction=False) as calls:
            for key in keys:
                calls.ttl(key)
            for key, ttl in zip(keys, await calls.execute(), strict=True):
                matched = _KIND.match(key)
                name = matched[1].decode() if matched else "other"
                kinds[name].count += 1
                kinds[name].without_end += ttl == -1
                if len(weighed[name]) < _WEIGHED:
                    weighed[name].append(await client.memory_usage(key) or 0)
    for name, sizes in weighed.items():
        kinds[name].key_bytes = sum(sizes) / len(sizes)
    return dict(kinds)


async def _scan(client: redis.asyncio.Redis) -> AsyncIterator[list[bytes]]:
    cursor = 0
    while True:
        cursor, keys = await client.scan(cursor, count=_AT_ONCE)
        if keys:
            yield keys
        if cursor == 0:
            return
