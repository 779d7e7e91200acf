"""Where Redis is: one server, a Redis Cluster, or a master that Sentinels know.

| URL | what it means |
| --- | --- |
| `redis://`, `rediss://` (TLS), `unix://` | one server, as redis-py reads it |
| `redis+cluster://[user:password@]host:port[,host:port…]` | some nodes of a cluster |
| `redis+sentinel://[user:password@]host:port[,host:port…]/service[/database]` | some Sentinels |

`rediss+cluster://` and `rediss+sentinel://` speak TLS. Users and passwords are the data servers';
`?sentinel_username=…&sentinel_password=…` are the Sentinels' own.
"""

import re
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

SINGLE_SCHEMES = ("redis", "rediss", "unix")
_OPTIONS = ("username", "password", "client_name", "sentinel_username", "sentinel_password")


class Topology(StrEnum):
    """How many servers there are, and who knows which one is written to."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


class RedisAddress(msgspec.Struct, frozen=True):
    """A parsed URL."""

    topology: Topology
    url: str
    nodes: tuple[tuple[str, int], ...] = ()
    """Hosts and ports: cluster nodes, or Sentinels."""
    service: str = ""
    """The name under which Sentinels watch the master."""
    login: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """What a connection to a data server needs besides host and port, by redis-py's names."""
    sentinel_login: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


def parse_address(url: str) -> RedisAddress:
    """Read a URL.

    Raises:
        ValueError: it has none of the forms above; the text says what is wrong.
    """
    parts = urlsplit(url)
    plain, _, topology = parts.scheme.partition("+")
    if parts.scheme in SINGLE_SCHEMES:
        _ = parts.port  # raises ValueError for one that is no number
        return RedisAddress(Topology.SINGLE, url)
    if plain not in ("redis", "rediss") or topology not in ("cluster", "sentinel"):
        raise ValueError(
            "must begin with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://"
        )
    user, _, hosts = parts.netloc.rpartition("@")
    default_port = 6379 if topology == "cluster" else 26379
    nodes = tuple(_node(host, default_port) for host in hosts.split(","))
    login: dict[str, Any] = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    for key in login:
        if key not in _OPTIONS and not key.startswith("ssl_"):
            raise ValueError(f"has an option that is not known: {key}")
    name, colon, password = user.partition(":")
    if name:
        login["username"] = unquote(name)
    if colon:
        login["password"] = unquote(password)
    if plain == "rediss":
        login["ssl"] = True
    sentinel_login = {
        key.removeprefix("sentinel_"): login.pop(key)
        for key in ("sentinel_username", "sentinel_password")
        if key in login
    }
    sentinel_login |= {key: value for key, value in login.items() if key.startswith("ssl")}
    path = [unquote(part) for part in parts.path.split("/") if part]
    if topology == "cluster":
        if path not in ([], ["0"]):
            raise ValueError("a Redis Cluster has no databases; leave the path out")
        return RedisAddress(Topology.CLUSTER, url, nodes, login=login)
    if not path or len(path) > 2 or (len(path) == 2 and not path[1].isdecimal()):
        raise ValueError("needs the service's name after the Sentinels: …:26379/mymaster[/0]")
    if len(path) == 2:
        login["db"] = int(path[1])
    return RedisAddress(
        Topology.SENTINEL,
        url,
        nodes,
        service=path[0],
        login=login,
        sentinel_login=sentinel_login,
    )


def _node(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("names no host")
    return parts.hostname, parts.port or default_port


def mask_password(url: str) -> str:
    """The URL, fit to be shown; also one that is no URL."""
    shown = re.sub(r"(://[^:@/]*:).*@", r"\1***@", url)
    return re.sub(r"((?:^|[?&])\w*password=)[^&]*", r"\1***", shown)
