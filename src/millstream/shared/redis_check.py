"""Whether a Redis is fit to hold tasks: what a process looks at before it starts."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from millstream.shared.address import Topology, mask_password, parse_address
from millstream.shared.cluster import BoundedCluster
from millstream.shared.connection import is_transient, open_redis
from millstream.shared.errors import MillstreamError

logger = logging.getLogger(__name__)

OLDEST_MAJOR = 7
"""Script flags, sharded channels and XAUTOCLAIM's list of deleted entries came with it."""

_RETRY_FIRST_S, _RETRY_MOST_S = 0.1, 2.0

Info = Mapping[str, Any]
"""What Redis says of itself: INFO, as redis-py reads it."""


class UnfitRedis(MillstreamError):
    """Redis answers, but tasks are not safe in it, or it does not let us in."""


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    """It works, and somebody should know."""
    FAULT = "fault"
    """It must be mended."""


class Finding(msgspec.Struct, frozen=True):
    """What one check found; the text of all but `ok` says what to do."""

    check: str
    verdict: Verdict
    text: str


def server_of(info: Info) -> tuple[str, str]:
    """What the server is, and its version; a Valkey also says which Redis it is like."""
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info.get("redis_version", "unknown"))


def check_version(info: Info) -> Finding:
    """Every Valkey has what is needed, and Redis from 7 on."""
    name, version = server_of(info)
    if name == "Valkey":
        return Finding("version", Verdict.OK, f"{name} {version}")
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST_MAJOR:
        return Finding(
            "version",
            Verdict.FAULT,
            f"Redis {version} is too old: run Redis >= {OLDEST_MAJOR} or Valkey",
        )
    return Finding("version", Verdict.OK, f"Redis {version}")


def check_eviction(info: Info) -> Finding:
    """With any policy but noeviction a full Redis forgets tasks."""
    policy = info.get("maxmemory_policy")
    if policy is None:
        return Finding(
            "eviction",
            Verdict.WARNING,
            "the server does not say its maxmemory-policy: see to it that it is noeviction",
        )
    if policy != "noeviction":
        return Finding(
            "eviction",
            Verdict.FAULT,
            f"maxmemory-policy is {policy}, so a full Redis forgets tasks: run `CONFIG SET "
            "maxmemory-policy noeviction` and put it into its configuration",
        )
    return Finding("eviction", Verdict.OK, "maxmemory-policy is noeviction")


def check_topology(info: Info, url: str) -> Finding:
    """A client of one server would be sent from node to node of a cluster."""
    if info.get("cluster_enabled") and parse_address(url).topology is not Topology.CLUSTER:
        return Finding(
            "topology",
            Verdict.FAULT,
            "this is a node of a Redis Cluster: write redis+cluster://host:port,host:port,…",
        )
    return Finding("topology", Verdict.OK, parse_address(url).topology)


async def read_infos(client: redis.asyncio.Redis) -> dict[str, Info]:
    """INFO of the server, or of each primary of a cluster that answers, by its address.

    Raises:
        RedisError: none answers.
    """
    untyped: Any = client  # redis-py's types leave this call half unknown
    if not isinstance(client, BoundedCluster):
        return {"": await untyped.info()}
    infos: dict[str, Info] = {}
    failure: RedisError | None = None
    for node in await client.primaries():
        try:
            infos[str(node.name)] = await untyped.info(target_nodes=node)
        except RedisError as error:
            failure = error
            logger.warning("%s does not answer: %s", node.name, error)
    if failure is not None and not infos:
        raise failure
    return infos


def refuse_unfit(info: Info, url: str) -> None:
    """Refuse a Redis in which tasks are not safe.

    Raises:
        UnfitRedis: it is too old, evicts, or is a cluster that the URL does not take for one.
    """
    shown_url = mask_password(url)
    for finding in (check_version(info), check_eviction(info), check_topology(info, url)):
        if finding.verdict == Verdict.FAULT:
            raise UnfitRedis(f"{shown_url}: {finding.text}")
        if finding.verdict == Verdict.WARNING:
            logger.warning("%s: %s", shown_url, finding.text)


async def require_fit(url: str) -> Collection[Info]:
    """Look at a Redis once; what its servers say of themselves, if that may be asked.

    Raises:
        UnfitRedis: tasks are not safe there, or it refuses the login.
        RedisError: it does not answer.
    """
    shown = mask_password(url)
    async with open_redis(url, pool_size=1) as client:
        try:
            infos = await read_infos(client)
        except (AuthenticationError, AuthorizationError) as error:
            raise UnfitRedis(
                f"{shown} refuses the login ({error}): correct MILLSTREAM_REDIS_URL"
            ) from None
        except NoPermissionError as error:
            logger.warning("cannot check how %s is set up: %s", shown, error)
            return ()
    for info in infos.values():
        refuse_unfit(info, url)
    return infos.values()


async def until_fit(url: str) -> None:
    """Return once Redis has been found fit; one that is away is waited for.

    Raises:
        UnfitRedis: it answers, and tasks are not safe there.
        RedisError: it answers with an error that does not pass by itself.
    """
    delay = _RETRY_FIRST_S
    while True:
        try:
            await require_fit(url)
        except RedisError as error:
            if not is_transient(error):
                raise
            if delay == _RETRY_FIRST_S:
                logger.warning("waiting for Redis at %s: %s", mask_password(url), error)
        else:
            return
        await asyncio.sleep(delay)
        delay = min(2 * delay, _RETRY_MOST_S)
