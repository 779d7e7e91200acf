"""Which web pages may ask a fleet that asks for no keys.

A browser lets any page of any site send requests to this machine. Where a key is needed, none of
them has one. Where none is, pages count as the fleet's own only if they come from a private
address, or if the settings name them; and a name that a stranger's DNS server could have turned
into our address (DNS rebinding) does not count as ours.
"""

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from millstream.shared.errors import NotAllowed

# Names that no public DNS server answers for.
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".test", ".svc")


class Pages:
    """Tells a fleet's own pages, and those it was told of, from all others.

    Args:
        origins: `auto`, `*`, `none`, or origins such as `https://chat.example`, comma-separated.
    """

    def __init__(self, origins: str) -> None:
        listed = frozenset(part.strip() for part in origins.split(",") if part.strip())
        self.all = "*" in listed
        self.private = "auto" in listed
        self.listed = listed - {"*", "auto", "none"}
        self._hosts = {_host_of(origin) for origin in self.listed}

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse what a browser sends for a page that is not one of ours.

        Raises:
            NotAllowed: the text says which setting would let it in.
        """
        if self.all:
            return
        host = headers.get("host", "")
        if host and not self._ours(host):
            raise NotAllowed(
                f"This server needs no key, so it answers under private names only, not as "
                f"{host[:100]!r}: set MILLSTREAM_CORS_ORIGINS or keys.",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None:
            # Images, scripts and the like have no origin; a link somebody follows is no harm.
            foreign = (
                headers.get("sec-fetch-site") == "cross-site"
                and headers.get("sec-fetch-mode") == "no-cors"
            )
        else:
            foreign = not self._may_ask(origin, host)
        if foreign:
            raise NotAllowed(
                "This server needs no key, so it does not take requests of other sites' pages: "
                "set MILLSTREAM_CORS_ORIGINS or keys.",
                code="origin_not_allowed",
            )

    def _ours(self, host: str) -> bool:
        name = _host_of(f"http://{host}")
        return _is_address(name) or _is_private_name(name) or name in self._hosts

    def _may_ask(self, origin: str, host: str) -> bool:
        if origin in self.listed:
            return True
        if origin.partition("://")[2] == host:
            return True
        name = _host_of(origin)
        return self.private and (_is_private_address(name) or _is_private_name(name))


def _host_of(origin: str) -> str:
    """The host alone, in lower case; empty where there is none, as in the origin `null`."""
    try:
        return (urlsplit(origin).hostname or "").rstrip(".")
    except ValueError:
        return ""


@lru_cache(256)  # each request asks for its own host, and there are few
def _is_address(name: str) -> bool:
    """Whether it is an IP address, which nobody's DNS can point elsewhere."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_private_address(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name.partition("%")[0]).is_private


def _is_private_name(name: str) -> bool:
    return name != "" and ("." not in name or name.endswith(_PRIVATE_SUFFIXES)) and ":" not in name
