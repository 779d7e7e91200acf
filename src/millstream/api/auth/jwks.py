"""The public keys that an issuer of tokens shows at a URL: fetched seldom, kept, never trusted."""

import asyncio
import http.client
import json
import logging
import time
import urllib.request
from typing import Any, cast

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from millstream.shared.errors import KeysUnavailable

logger = logging.getLogger(__name__)

FRESH_S = 300.0  # a key that an issuer withdraws is taken for so long
STALE_S = 3600.0  # how long the last keys do while the issuer does not answer
AGAIN_S = 10.0  # between two looks for a key that is not among those we have
WORST_PAUSE_S = 30.0
WAIT_S = 5.0  # how long a request waits for keys
FETCH_S = 5.0
LARGEST = 262_144  # bytes


class Jwks:
    """Finds a key by its id."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys: dict[str | None, PyJWK] = {}
        self._fetched_at = -STALE_S  # when the keys we have were shown
        self._looked_at = -STALE_S  # when we last began to look
        self._failures = 0
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, kid: str | None) -> PyJWK | None:
        """The key with this id; without an id, the only one there is.

        Raises:
            KeysUnavailable: the issuer has not shown its keys for too long.
        """
        age = time.monotonic() - self._fetched_at
        if age > FRESH_S:
            self._look()
        if age > STALE_S:
            await self._looked()
        key = self._choose(kid)
        if key is None and time.monotonic() - self._looked_at > AGAIN_S:
            self._look()  # an issuer that changes its key signs with the new one at once
        if key is None and self._fetching is not None:
            await self._looked()
            key = self._choose(kid)
        if key is None and self._failures:
            raise KeysUnavailable("The issuer's keys cannot be had now.", retry_after_s=5)
        return key

    def _choose(self, kid: str | None) -> PyJWK | None:
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(kid)

    def _look(self) -> None:
        """Begin to fetch, unless that is under way or has just failed."""
        pause = min(WORST_PAUSE_S, 2.0 ** min(self._failures, 9) - 1)
        now = time.monotonic()
        if self._fetching is None and now - self._looked_at >= pause:
            self._looked_at = now
            self._fetching = asyncio.create_task(self._fetch(), name="fetch keys")

    async def _looked(self) -> None:
        """Wait for the fetch that is under way; it goes on for others when this request ends."""
        if self._fetching is not None:
            await asyncio.wait({self._fetching}, timeout=WAIT_S)
        if time.monotonic() - self._fetched_at > STALE_S:
            raise KeysUnavailable("The issuer's keys cannot be had now.", retry_after_s=5)

    async def _fetch(self) -> None:
        try:
            self._keys = await asyncio.to_thread(fetch, self._url)
        # What a stranger's server may answer has no end.
        except Exception as error:
            self._failures += 1
            logger.warning("no keys from %s: %s", self._url, error)
        else:
            self._failures = 0
            self._fetched_at = time.monotonic()
        finally:
            self._fetching = None


def _opener() -> urllib.request.OpenerDirector:
    """urllib's, without redirects: the keys are where the settings say, and nowhere else."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def fetch(url: str) -> dict[str | None, PyJWK]:
    """The usable keys of a set; it blocks, so not on an event loop.

    Raises:
        OSError: no answer, or none with status 200, in time.
        ValueError: the answer is no set with a key that can be used.
    """
    request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310
    deadline = time.monotonic() + FETCH_S
    parts: list[bytes] = []
    with _opener().open(request, timeout=FETCH_S) as answer:
        body = cast("http.client.HTTPResponse", answer)
        while part := body.read1(65_536):
            parts.append(part)
            if sum(map(len, parts)) > LARGEST:
                raise ValueError(f"more than {LARGEST} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError("the answer takes too long")
    return parse(json.loads(b"".join(parts)))


def parse(answer: Any) -> dict[str | None, PyJWK]:
    """The keys of a set that sign, by id.

    Symmetric ones are left out: who reads a secret at a URL could sign with it.

    Raises:
        ValueError: it is no set, or there is none.
    """
    listed = cast("dict[str, Any]", answer).get("keys") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        raise ValueError("not a JSON Web Key Set")
    found: dict[str | None, PyJWK] = {}
    for item in cast("list[Any]", listed):
        if not isinstance(item, dict):
            continue
        fields = cast("dict[str, Any]", item)
        kid = fields.get("kid")
        if kid is not None and not isinstance(kid, str):
            continue
        if fields.get("kty") not in ("RSA", "EC", "OKP") or fields.get("use", "sig") != "sig":
            continue
        try:
            found[kid] = PyJWK.from_dict(fields)
        except (PyJWTError, ValueError, TypeError) as error:
            logger.debug("left out a key of the set: %s", error)
    if not found:
        raise ValueError("no key in it that can be used")
    return found
