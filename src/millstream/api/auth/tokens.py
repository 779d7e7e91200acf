"""JWTs: who signed a token decides who its caller is, and the settings decide who may sign.

The token itself chooses nothing: algorithms are a fixed list that fits the kind of key, so neither
`none` nor a public key that is used as a secret can pass.
"""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any, Protocol

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from millstream.api.auth.caller import Caller, Rights
from millstream.api.auth.jwks import Jwks
from millstream.shared.errors import NotAuthenticated, SettingsError
from millstream.shared.settings import Settings

logger = logging.getLogger(__name__)

CLAIM = "millstream"
"""The claim that holds a caller's rights; without it a token allows what a plain key does."""
LONGEST_TOKEN = 8192
LEEWAY_S = 10  # clocks differ
SMALLEST_RSA = 2048  # bits
LONGEST_SUBJECT = 1024

# What PyJWT lets through: JSON nested too deep, times that are no finite numbers.
_MALFORMED = (ValueError, TypeError, OverflowError, RecursionError)
_SECRET = {"HS256": 32, "HS384": 48, "HS512": 64}
"""The bytes that a secret must have, by RFC 7518."""
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_PUBLIC = (*_RSA, *_CURVES.values(), "EdDSA")

_FAULTS = (
    (jwt.ExpiredSignatureError, "The token has expired."),
    (jwt.ImmatureSignatureError, "The token is not valid yet."),
    (jwt.InvalidAudienceError, "The token is for another audience."),
    (jwt.InvalidIssuerError, "The token is from another issuer."),
    (jwt.InvalidAlgorithmError, "The token's algorithm is not one of those taken here."),
)


class _Finds(Protocol):
    async def find(self, kid: str | None) -> Any: ...


class _One:
    """The one key of the settings, whatever a token says."""

    def __init__(self, key: Any) -> None:
        self._key = key

    async def find(self, kid: str | None) -> Any:
        """That key."""
        return self._key


class Tokens:
    """Checks tokens and reads their callers.

    Raises:
        SettingsError: the settings name no key, more than one, or algorithms that do not fit it.
    """

    def __init__(self, settings: Settings) -> None:
        self._keys, fitting, chosen = _key_of(settings)
        names = [part.strip() for part in settings.jwt_algorithms.split(",") if part.strip()]
        for name in names:
            if name not in fitting:
                raise SettingsError(
                    f"MILLSTREAM_JWT_ALGORITHMS: {name!r} does not fit the key; "
                    f"of {', '.join(fitting)}"
                )
        self._algorithms = names or list(chosen)
        _require_long(settings.jwt_secret.get_secret_value(), self._algorithms)
        self._audience = settings.jwt_audience or None
        self._issuer = settings.jwt_issuer or None
        needed = [("aud", self._audience), ("iss", self._issuer)]
        self._required = ["exp", "sub", *(name for name, value in needed if value)]

    async def caller(self, token: str) -> Caller:
        """Whose token it is.

        Raises:
            NotAuthenticated: it is not taken; the text says why.
            KeysUnavailable: the keys to check it by cannot be had.
        """
        if len(token) > LONGEST_TOKEN:
            raise NotAuthenticated(f"The token has more than {LONGEST_TOKEN} characters.")
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in self._algorithms:  # before anything is fetched for it
                raise jwt.InvalidAlgorithmError
            key = await self._keys.find(header.get("kid"))
            if key is None:
                raise NotAuthenticated("The token is signed by no key of its issuer.")
            claims = jwt.decode(
                token,
                key,
                algorithms=self._algorithms,
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": self._required},
            )
        except (jwt.PyJWTError, *_MALFORMED) as error:
            raise NotAuthenticated(_explain(error)) from None
        return _caller_of(claims)


def _explain(error: Exception) -> str:
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"The token lacks the claim {error.claim}."
    told = (text for kind, text in _FAULTS if isinstance(error, kind))
    return next(told, "Incorrect API key or token.")


def _caller_of(claims: dict[str, Any]) -> Caller:
    try:
        rights = msgspec.convert(claims.get(CLAIM, {}), Rights)
    except msgspec.ValidationError as error:
        raise NotAuthenticated(f"The token's claim {CLAIM} is malformed: {error}.") from None
    subject, issuer = claims["sub"], str(claims.get("iss", ""))
    if not 0 < len(subject) <= LONGEST_SUBJECT:
        raise NotAuthenticated(f"The token's sub must have 1 to {LONGEST_SUBJECT} characters.")
    # Readable where the subject is, and never two for one: it may be any text, of any issuer.
    digest = hashlib.sha256(f"{issuer}\0{subject}".encode("utf-8", "surrogatepass")).hexdigest()
    shown = re.sub(r"[^A-Za-z0-9._@-]+", "_", subject)[:40]
    return Caller.of(f"jwt:{shown}:{digest[:24]}", rights)


def _key_of(settings: Settings) -> tuple[_Finds, tuple[str, ...], tuple[str, ...]]:
    """Where the key is, the algorithms that fit it, and those of them that are taken by default."""
    secret, url = settings.jwt_secret.get_secret_value(), settings.jwt_jwks_url
    if sum(map(bool, (secret, settings.jwt_public_key, url))) > 1:
        raise SettingsError(
            "set one of MILLSTREAM_JWT_SECRET, MILLSTREAM_JWT_PUBLIC_KEY and "
            "MILLSTREAM_JWT_JWKS_URL, not several"
        )
    if secret:
        return _One(secret), tuple(_SECRET), ("HS256",)
    if settings.jwt_public_key:
        key, fitting = _public_key(settings.jwt_public_key)
        return _One(key), fitting, fitting[:1]
    if url.startswith(("https://", "http://")):
        if not url.startswith("https"):
            logger.warning(
                "MILLSTREAM_JWT_JWKS_URL has no TLS: who can change its answers owns all"
            )
        return Jwks(url), _PUBLIC, ("RS256", "ES256")
    raise SettingsError(
        "MILLSTREAM_JWT_JWKS_URL must begin with https:// or http://"
        if url
        else "MILLSTREAM_JWT_… is set, but no key: set MILLSTREAM_JWT_SECRET, "
        "MILLSTREAM_JWT_PUBLIC_KEY or MILLSTREAM_JWT_JWKS_URL"
    )


def _require_long(secret: str, algorithms: list[str]) -> None:
    needed = max(_SECRET.get(name, 0) for name in algorithms)
    if len(secret.encode()) < needed or "-----BEGIN" in secret:
        raise SettingsError(
            f"MILLSTREAM_JWT_SECRET must be a random text of {needed} bytes or more: "
            "`openssl rand -base64 48`"
        )


def _public_key(text: str) -> tuple[Any, tuple[str, ...]]:
    where = "MILLSTREAM_JWT_PUBLIC_KEY"
    pem = text.replace("\\n", "\n").encode()  # variables often cannot hold a line's end
    if b"-----BEGIN" not in pem:
        try:
            pem = Path(text).read_bytes()
        except OSError as error:
            raise SettingsError(f"{where}: {text[:200]}: {error.strerror}") from None
    try:
        key = load_pem_public_key(pem)
    except ValueError:
        raise SettingsError(f"{where} is no public key in PEM") from None
    if isinstance(key, RSAPublicKey):
        if key.key_size < SMALLEST_RSA:
            raise SettingsError(f"{where} has {key.key_size} bits; RSA needs {SMALLEST_RSA}")
        return key, _RSA
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return key, (_CURVES[key.curve.name],)
    if isinstance(key, Ed25519PublicKey):
        return key, ("EdDSA",)
    raise SettingsError(f"{where} is of a kind that no algorithm here uses")
