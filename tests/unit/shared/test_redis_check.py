"""What is refused and what is only named in a Redis."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.local_fleet import free_port
from tests.support.redis_servers import on_primaries

from millstream.shared.address import mask_password
from millstream.shared.redis_check import (
    UnfitRedis,
    check_eviction,
    check_version,
    require_fit,
    until_fit,
)
from millstream.shared.scripts import Scripts


@pytest.mark.parametrize("version", ["6.2.14", "5.0.0", "unknown", ""])
def test_old_redis_is_refused(version: str) -> None:
    finding = check_version({"redis_version": version})
    assert finding.verdict == "fault"
    assert "run Redis >= 7 or Valkey" in finding.text


def test_new_redis_and_any_valkey_are_fine() -> None:
    assert check_version({"redis_version": "7.0.0"}).text == "Redis 7.0.0"
    assert check_version({"redis_version": "8.4.0"}).verdict == "ok"
    valkey = check_version({"redis_version": "7.2.4", "valkey_version": "9.1.2"})
    assert (valkey.verdict, valkey.text) == ("ok", "Valkey 9.1.2")


def test_eviction_is_a_fault_and_silence_a_warning() -> None:
    assert check_eviction({"maxmemory_policy": "noeviction"}).verdict == "ok"
    assert check_eviction({}).verdict == "warning"
    finding = check_eviction({"maxmemory_policy": "volatile-lru"})
    assert finding.verdict == "fault"
    assert "CONFIG SET maxmemory-policy noeviction" in finding.text


async def test_one_that_is_away_is_waited_for() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(RedisConnectionError):
        await require_fit(url)
    waiting = asyncio.create_task(until_fit(url))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    waiting.cancel()


async def test_a_user_who_may_not_come_in_is_told(scripts: Scripts, redis_url: str) -> None:
    client: Any = scripts._client
    rules = ("on", ">secret", "~*", "&*", "-@all")
    await on_primaries(client, "ACL", "SETUSER", "ann", *rules)
    try:
        with pytest.raises(UnfitRedis, match=r"://ann:\*\*\*@.* refuses the login"):
            await until_fit(redis_url.replace("://", "://ann:wrong@"))
        await require_fit(redis_url.replace("://", "://ann:secret@"))  # INFO is forbidden, no more
    finally:
        await on_primaries(client, "ACL", "DELUSER", "ann")


def test_passwords_are_masked() -> None:
    assert mask_password("redis://h:1/0") == "redis://h:1/0"
    assert mask_password("redis://:p@h:1/0") == "redis://:***@h:1/0"
    assert mask_password("rediss://me:p%40@h") == "rediss://me:***@h"
