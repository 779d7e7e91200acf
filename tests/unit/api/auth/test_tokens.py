"""JWTs: what is taken, what is not, and nothing that the token itself could choose."""

import base64
import hashlib
import hmac
import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from millstream.api.auth.caller import CallerLimits
from millstream.api.auth.tokens import LEEWAY_S, Tokens
from millstream.shared.errors import NotAuthenticated, SettingsError
from millstream.shared.settings import Settings

SECRET = "0123456789abcdef" * 2
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()


def pem(private: Any) -> str:
    return (
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    )


def tokens(**settings: object) -> Tokens:
    return Tokens(Settings.model_validate(settings))


def claims(**changes: object) -> dict[str, object]:
    return {"sub": "ann", "exp": time.time() + 60, **changes}


def signed(key: Any, algorithm: str, headers: dict[str, Any] | None = None, **changes: Any) -> str:
    return jwt.encode(claims(**changes), key, algorithm, headers)


def segment(value: object) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def forged(header: object, payload: object, secret: bytes = b"") -> str:
    text = f"{segment(header)}.{segment(payload)}"
    return f"{text}.{segment(hmac.digest(secret, text.encode(), 'sha256')) if secret else ''}"


async def refusal(checker: Tokens, token: str) -> str:
    with pytest.raises(NotAuthenticated) as refused:
        await checker.caller(token)
    assert token not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("settings", "key", "algorithm"),
    [
        ({"jwt_secret": SECRET}, SECRET, "HS256"),
        ({"jwt_secret": SECRET * 2, "jwt_algorithms": "HS512"}, SECRET * 2, "HS512"),
        ({"jwt_public_key": pem(RSA)}, RSA, "RS256"),
        ({"jwt_public_key": pem(RSA), "jwt_algorithms": "PS256, RS512"}, RSA, "PS256"),
        ({"jwt_public_key": pem(EC)}, EC, "ES256"),
        ({"jwt_public_key": pem(ED)}, ED, "EdDSA"),
        ({"jwt_public_key": pem(EC).replace("\n", "\\n")}, EC, "ES256"),
    ],
)
async def test_a_signed_token_names_its_caller(
    settings: dict[str, Any], key: Any, algorithm: str
) -> None:
    checker = tokens(**settings)
    caller = await checker.caller(signed(key, algorithm))
    digest = hashlib.sha256(b"\0ann").hexdigest()[:24]
    assert caller.id == f"jwt:ann:{digest}"
    assert (caller.admin, caller.models) == (False, None)
    # The same kind with another key.
    other = {"HS": SECRET[::-1] * 2, "RS": rsa, "PS": rsa, "ES": ec, "Ed": ed25519}[algorithm[:2]]
    if other is rsa:
        other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    elif other is ec:
        other = ec.generate_private_key(ec.SECP256R1())
    elif other is ed25519:
        other = ed25519.Ed25519PrivateKey.generate()
    assert await refusal(checker, signed(other, algorithm)) == "Incorrect API key or token."


async def test_the_key_may_lie_in_a_file(tmp_path: Any) -> None:
    (tmp_path / "key.pem").write_text(pem(RSA))
    checker = tokens(jwt_public_key=str(tmp_path / "key.pem"))
    assert (await checker.caller(signed(RSA, "RS256"))).id.startswith("jwt:ann:")


async def test_the_token_does_not_choose_the_algorithm() -> None:
    """python-jose#419 and CVE-2022-29217: none, and a public key that is used as a secret."""
    told = "The token's algorithm is not one of those taken here."
    public = tokens(jwt_public_key=pem(RSA))
    for alg in ("none", "None", "NONE", "", None, "HS256", "RS512", "ES256"):
        for secret in (b"", pem(RSA).encode(), pem(RSA).strip().encode()):
            token = forged({"alg": alg, "typ": "JWT"}, claims(), secret)
            assert await refusal(public, token) == told
    secret = tokens(jwt_secret=SECRET)
    assert await refusal(secret, forged({"alg": "none"}, claims())) == told
    assert await refusal(secret, signed(SECRET * 2, "HS384")) == told
    assert await refusal(secret, signed(RSA, "RS256")) == told
    # What a token says of keys is not asked: it may bring its own.
    headers = {"jwk": {"kty": "oct", "k": "AAAA"}, "jku": "http://127.0.0.1:9/", "kid": "../../x"}
    token = signed(SECRET[::-1], "HS256", headers)
    assert await refusal(secret, token) == "Incorrect API key or token."
    token = signed(SECRET, "HS256", {"crit": ["unheard-of"], "unheard-of": 1})
    assert await refusal(secret, token) == "Incorrect API key or token."


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exp": time.time() - LEEWAY_S - 5}, "The token has expired."),
        ({"exp": None}, "The token lacks the claim exp."),
        ({"sub": None}, "The token lacks the claim sub."),
        ({"aud": None}, "The token lacks the claim aud."),
        ({"iss": None}, "The token lacks the claim iss."),
        ({"aud": "other"}, "The token is for another audience."),
        ({"iss": "https://issuer.example/"}, "The token is from another issuer."),
        ({"nbf": time.time() + 1e6}, "The token is not valid yet."),
        ({"sub": 5}, "Incorrect API key or token."),
        ({"sub": ""}, "The token's sub must have 1 to 1024 characters."),
        ({"sub": "x" * 1025}, "The token's sub must have 1 to 1024 characters."),
        ({"exp": "soon"}, "Incorrect API key or token."),
        ({"exp": float("inf")}, "Incorrect API key or token."),
        ({"exp": float("nan")}, "Incorrect API key or token."),
        ({"millstream": {"admn": True}}, "The token's claim millstream is malformed"),
        ({"millstream": {"limits": {"requests_per_min": "x"}}}, "The token's claim millstream"),
        ({"millstream": []}, "The token's claim millstream is malformed"),
    ],
)
async def test_claims_that_are_not_taken(changes: dict[str, Any], told: str) -> None:
    checker = tokens(jwt_secret=SECRET, jwt_audience="mill", jwt_issuer="https://issuer.example")
    base = claims(aud=["mill", "x"], iss="https://issuer.example")
    assert (await checker.caller(jwt.encode(base, SECRET))).admin is False
    given = {name: value for name, value in {**base, **changes}.items() if value is not None}
    message = await refusal(checker, forged({"alg": "HS256"}, given, SECRET.encode()))
    assert message.startswith(told)


async def test_a_token_for_another_audience_is_refused_where_none_is_set() -> None:
    message = await refusal(tokens(jwt_secret=SECRET), signed(SECRET, "HS256", aud="elsewhere"))
    assert message == "The token is for another audience."


@pytest.mark.parametrize(
    "token",
    [
        "..",
        "a.b.c",
        "é.é.é",
        "\udcff.b.c",
        f"{segment(b'[' * 2000)}.{segment({})}.AAAA",
        f"{segment(b'[' * 2000 + b']' * 2000)}.{segment({})}.AAAA",
        f"{segment([])}.{segment({})}.AAAA",
        f"{segment({'alg': 'HS256', 'kid': [1]})}.{segment({})}.AAAA",
        f"{segment({'alg': ['HS256']})}.{segment({})}.AAAA",
        forged({"alg": "HS256"}, b"\xff", SECRET.encode()),
        forged({"alg": "HS256"}, [1], SECRET.encode()),
        forged({"alg": "HS256"}, b"[" * 2000, SECRET.encode()),
        "a." + "x" * 9000 + ".b",
    ],
)
async def test_what_is_no_token_is_refused(token: str) -> None:
    await refusal(tokens(jwt_secret=SECRET), token)


async def test_the_claim_carries_rights() -> None:
    rights = {
        "models": ["m"],
        "admin": True,
        "priorities": ["batch"],
        "limits": {"tokens_per_min": 9},
        "weight": 3,
    }
    caller = await tokens(jwt_secret=SECRET).caller(signed(SECRET, "HS256", millstream=rights))
    assert caller.models == {"m"}
    assert caller.admin
    assert caller.priorities == {"batch"}
    assert caller.limits == CallerLimits(tokens_per_min=9)
    assert caller.weight == 3


async def test_no_two_subjects_are_one_caller_and_ids_are_tame() -> None:
    checker = tokens(jwt_secret=SECRET)
    pairs = [
        ("ann", "a"), ("ann", "b"), ("a nn", "a"), ("a_nn", "a"), ("x" * 900, "a"),
        ("x" * 901, "a"), ("ann\0", "a"), ("ann", "a\0"), ("日本", "a"), ("日 本", "a"),
        ("ann:\r\n{}*", "a"), ("anonymous", "a"), ("key:ann", "a"),
    ]  # fmt: skip
    ids = [(await checker.caller(signed(SECRET, "HS256", sub=s, iss=i))).id for s, i in pairs]
    assert len(set(ids)) == len(pairs)
    for name in ids:
        assert name.startswith("jwt:")
        assert len(name) <= 128
        assert name.isascii()
        assert not set(name) & set(" \t\r\n\0{}*\"'\\")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"jwt_secret": "short"}, "32 bytes or more"),
        ({"jwt_secret": pem(RSA)}, "must be a random text"),
        ({"jwt_secret": SECRET, "jwt_algorithms": "HS512"}, "random text of 64 bytes"),
        ({"jwt_secret": SECRET, "jwt_public_key": pem(RSA)}, "not several"),
        ({"jwt_secret": SECRET, "jwt_algorithms": "none"}, "'none' does not fit the key"),
        ({"jwt_secret": SECRET, "jwt_algorithms": "RS256"}, "'RS256' does not fit the key"),
        ({"jwt_public_key": pem(RSA), "jwt_algorithms": "HS256"}, "'HS256' does not fit the key"),
        ({"jwt_public_key": pem(EC), "jwt_algorithms": "ES512"}, "'ES512' does not fit the key"),
        ({"jwt_jwks_url": "https://x.example", "jwt_algorithms": "HS256"}, "does not fit the key"),
        ({"jwt_jwks_url": "file:///etc/passwd"}, "must begin with https:// or http://"),
        ({"jwt_public_key": "/nowhere/key.pem"}, "/nowhere/key.pem: No such file"),
        ({"jwt_public_key": "-----BEGIN PUBLIC KEY-----\nx"}, "is no public key in PEM"),
        ({"jwt_audience": "mill"}, "but no key"),
        (
            {"jwt_public_key": pem(rsa.generate_private_key(public_exponent=65537, key_size=1024))},
            "has 1024 bits",
        ),
        ({"jwt_public_key": pem(ec.generate_private_key(ec.SECP256K1()))}, "of a kind that no"),
    ],
)
def test_settings_that_would_not_hold_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told) as refused:
        tokens(**settings)
    assert "\n" not in refused.value.message
    assert "short" not in refused.value.message
