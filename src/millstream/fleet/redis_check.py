"""Looks at a Redis that the fleet did not start: can it be used, and is it set up safely?"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, RedisError, ResponseError

from millstream.shared.connection import open_redis
from millstream.shared.errors import SettingsError

OLDEST_MAJOR = 7
"""Script flags, sharded channels and XAUTOCLAIM's list of deleted entries came with it."""


async def check_redis(url: str) -> list[str]:
    """Warnings about how the server is set up.

    Raises:
        SettingsError: it does not answer, or is too old.
    """
    shown = mask_password(url)
    async with open_redis(url, pool_size=1) as opened:
        client: Any = opened  # redis-py's types leave these two calls half unknown
        try:
            server: Mapping[str, Any] = await client.info("server")
        except AuthenticationError as error:
            raise SettingsError(f"{shown} refuses the login: {error}") from None
        except (RedisError, OSError) as error:
            raise SettingsError(
                f"no Redis answers at {shown} ({error}); start it, or unset MILLSTREAM_REDIS_URL "
                "to use the embedded one"
            ) from None
        refuse_old(server, shown)
        try:
            policy: Mapping[str, str] = await client.config_get("maxmemory-policy")
        except ResponseError:
            # Hosted servers forbid CONFIG; theirs is set elsewhere.
            return []
    return policy_warnings(policy.get("maxmemory-policy", "noeviction"))


def refuse_old(server: Mapping[str, Any], shown_url: str) -> None:
    """Refuse a Redis before 7; every Valkey has what is needed.

    Raises:
        SettingsError: it is too old.
    """
    if "valkey_version" in server:
        return
    version = str(server.get("redis_version", "unknown"))
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST_MAJOR:
        raise SettingsError(
            f"{shown_url} is Redis {version}; Millstream needs Redis >= {OLDEST_MAJOR} or Valkey"
        )


def policy_warnings(policy: str) -> list[str]:
    """What is wrong with the way the server frees memory."""
    if policy == "noeviction":
        return []
    return [
        f"Redis has maxmemory-policy {policy} and may drop tasks when its memory is full; "
        "run `CONFIG SET maxmemory-policy noeviction` there"
    ]


def mask_password(url: str) -> str:
    """The URL, fit to be shown."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@", 1) if password else url
