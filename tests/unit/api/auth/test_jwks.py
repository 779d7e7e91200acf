"""Keys of an issuer, from a real server: fetched seldom, and never twice at once."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.support.waiting import eventually

from millstream.api.auth import jwks
from millstream.api.auth.tokens import Tokens
from millstream.shared.errors import KeysUnavailable, NotAuthenticated
from millstream.shared.settings import Settings

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


def shown(key: Any, kid: str | None, **changes: object) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if key is RSA else jwt.algorithms.ECAlgorithm
    fields = {**kind.to_jwk(key.public_key(), as_dict=True), "use": "sig", **changes}
    return fields if kid is None else {**fields, "kid": kid}


def token(key: Any, kid: str | None, algorithm: str = "RS256") -> str:
    payload = {"sub": "ann", "exp": time.time() + 60}
    return jwt.encode(payload, key, algorithm, {"kid": kid} if kid else None)


class Issuer:
    """Shows a set of keys, or something else."""

    def __init__(self) -> None:
        self.keys: list[Any] = [shown(RSA, "one")]
        self.status = 200
        self.raw: bytes | None = None
        self.location = ""
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                issuer.gate.wait(20)
                body = issuer.raw or json.dumps({"keys": issuer.keys}).encode()
                self.send_response(issuer.status)
                if issuer.location:
                    self.send_header("Location", issuer.location)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    one = Issuer()
    yield one
    one.close()


def checker(issuer: Issuer, **settings: object) -> Tokens:
    return Tokens(Settings.model_validate({"jwt_jwks_url": issuer.url, **settings}))


async def taken(tokens: Tokens, text: str) -> bool:
    try:
        return (await tokens.caller(text)).id.startswith("jwt:ann:")
    except NotAuthenticated:
        return False


async def test_a_hundred_at_once_fetch_once(issuer: Issuer) -> None:
    tokens, text = checker(issuer), token(RSA, "one")
    assert await asyncio.gather(*(taken(tokens, text) for _ in range(100))) == [True] * 100
    assert await taken(tokens, text)
    assert issuer.asked == 1


async def test_a_new_key_is_looked_for_and_unknown_ones_do_not_drive_us(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = checker(issuer)
    assert await taken(tokens, token(RSA, "one"))
    issuer.keys.append(shown(EC, "two"))
    for number in range(50):  # just looked: unknown ids cost the issuer nothing
        assert not await taken(tokens, token(RSA, f"unknown-{number}"))
    assert issuer.asked == 1
    monkeypatch.setattr(jwks, "AGAIN_S", 0.0)
    assert await taken(tokens, token(EC, "two", "ES256"))
    assert issuer.asked == 2
    # Withdrawn: known until the set is fetched again, in the background.
    issuer.keys = [shown(EC, "two")]
    monkeypatch.setattr(jwks, "AGAIN_S", 1000.0)
    assert await taken(tokens, token(RSA, "one"))
    monkeypatch.setattr(jwks, "FRESH_S", 0.0)

    async def withdrawn() -> bool:
        return not await taken(tokens, token(RSA, "one"))

    await eventually(withdrawn)


async def test_the_kind_of_key_binds_the_algorithm(issuer: Issuer) -> None:
    """A set may hold anything: secrets and keys for encryption are not there to sign with."""
    secret = {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "secret"}
    strange: list[Any] = [7, {}, {"kty": "RSA", "kid": "cut", "n": "AQ"}, {"kty": "EC", "kid": [1]}]
    encrypts = shown(RSA, "encrypts", use="enc")
    issuer.keys = [secret, *strange, encrypts, shown(EC, "two"), shown(RSA, "one")]
    tokens = checker(issuer)
    assert await taken(tokens, token(EC, "two", "ES256"))
    assert await taken(tokens, token(RSA, "one"))
    assert not await taken(tokens, token(RSA, "encrypts"))
    assert not await taken(tokens, token("secret" * 6, "secret", "HS256"))
    assert not await taken(tokens, token(RSA, "two"))
    assert not await taken(tokens, token(RSA, "one", "RS512"))
    assert not await taken(tokens, token(RSA, None))  # which one is meant?


async def test_a_lone_key_needs_no_id(issuer: Issuer) -> None:
    issuer.keys = [shown(RSA, None)]
    assert await taken(checker(issuer), token(RSA, None))


@pytest.mark.parametrize("fault", ["status", "text", "huge", "no set", "empty", "redirect"])
async def test_an_issuer_that_fails_is_a_503_and_is_not_hammered(
    issuer: Issuer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    match fault:
        case "status":
            issuer.status = 500
        case "text":
            issuer.raw = b"<html>"
        case "huge":
            issuer.raw = b" " * 300_000
        case "no set":
            issuer.raw = b"[1]"
        case "empty":
            issuer.keys = []
        case "redirect":  # could lead anywhere, and from TLS to none
            issuer.status, issuer.location = 302, issuer.url
    tokens = checker(issuer)
    for _ in range(20):
        with pytest.raises(KeysUnavailable) as refused:
            await tokens.caller(token(RSA, "one"))
        assert refused.value.retry_after_s >= 1
    assert issuer.asked == 1
    # It comes back, and the pause is over.
    issuer.status, issuer.raw, issuer.keys, issuer.location = 200, None, [shown(RSA, "one")], ""
    monkeypatch.setattr(jwks, "WORST_PAUSE_S", 0.0)
    assert await taken(tokens, token(RSA, "one"))


async def test_the_last_keys_do_while_the_issuer_is_away(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = checker(issuer)
    assert await taken(tokens, token(RSA, "one"))
    issuer.status = 500
    monkeypatch.setattr(jwks, "FRESH_S", 0.0)
    for _ in range(5):
        assert await taken(tokens, token(RSA, "one"))
    # Whether a key that we have not is new, nobody can say now: no 401.
    monkeypatch.setattr(jwks, "AGAIN_S", 0.0)
    monkeypatch.setattr(jwks, "WORST_PAUSE_S", 0.0)
    with pytest.raises(KeysUnavailable):
        await tokens.caller(token(RSA, "two"))
    monkeypatch.setattr(jwks, "STALE_S", 0.0)
    with pytest.raises(KeysUnavailable):
        await tokens.caller(token(RSA, "one"))


async def test_a_silent_issuer_holds_nobody_up_for_long(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "WAIT_S", 0.2)
    monkeypatch.setattr(jwks, "FETCH_S", 1.0)
    issuer.gate.clear()
    tokens = checker(issuer)
    began = time.monotonic()
    with pytest.raises(KeysUnavailable):
        await tokens.caller(token(RSA, "one"))
    # What has no chance anyway is refused without waiting for anything.
    assert not await taken(tokens, token("secret" * 6, "one", "HS256"))
    assert time.monotonic() - began < 5
    issuer.gate.set()

    async def answered() -> bool:
        try:
            return await taken(tokens, token(RSA, "one"))
        except KeysUnavailable:
            return False

    await eventually(answered)
