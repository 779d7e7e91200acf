"""What `millstream doctor` looks at in keys and tokens: who gets in, and whether anyone does."""

from pathlib import Path

from millstream.api.auth.authenticator import Authenticator
from millstream.shared.errors import SettingsError
from millstream.shared.listener import reached_by_others
from millstream.shared.redis_check import Finding, Verdict
from millstream.shared.settings import Settings

# The file holds hashes, so reading it is no disaster; who changes it lets in whom they like.
_OTHERS_MAY = 0o027


def examine_keys(settings: Settings) -> list[Finding]:
    """How a pod with these settings would know its callers."""
    try:
        authenticator = Authenticator(settings)
    except SettingsError as error:
        return [Finding("keys", Verdict.FAULT, error.message)]
    if authenticator.open:
        return [_open(settings)]
    findings: list[Finding] = []
    live = authenticator.keyring.live
    if live or not authenticator.takes_tokens:
        findings.append(_keys(live, settings))
    if settings.api_keys_file:
        findings.append(_file(Path(settings.api_keys_file)))
    if authenticator.takes_tokens:
        findings.append(_tokens(settings))
    return findings


def _open(settings: Settings) -> Finding:
    if reached_by_others(settings.host):
        text = (
            f"anyone who reaches {settings.host or 'this machine'} may use the fleet, and stop "
            "others' tasks: set MILLSTREAM_API_KEYS_FILE"
        )
        return Finding("keys", Verdict.WARNING, text)
    return Finding("keys", Verdict.OK, "none are asked for, and only this machine can ask")


def _keys(live: int, settings: Settings) -> Finding:
    if live:
        return Finding("keys", Verdict.OK, f"{live} {'key is' if live == 1 else 'keys are'} taken")
    where = settings.api_keys_file or "MILLSTREAM_API_KEYS"
    text = f"no key of {where} is taken, so nobody gets in: run `millstream keys add NAME`"
    return Finding("keys", Verdict.FAULT, text)


def _file(path: Path) -> Finding:
    mode = path.stat().st_mode & 0o777
    if mode & _OTHERS_MAY:
        text = f"{path} has mode {mode:o}: run `chmod 600 {path}`"
        return Finding("key file", Verdict.WARNING, text)
    return Finding("key file", Verdict.OK, f"{path} has mode {mode:o}")


def _tokens(settings: Settings) -> Finding:
    url = settings.jwt_jwks_url
    if url:
        from millstream.api.auth.jwks import fetch  # cryptography takes its time to import

        try:
            fetch(url)
        except Exception as error:  # what a stranger's server may answer has no end
            text = f"no keys from {url}: {error}; tokens get a 503 until there are"
            return Finding("tokens", Verdict.FAULT, text)
        if not url.startswith("https:"):
            text = f"{url} has no TLS: who can change its answers owns all; use https"
            return Finding("tokens", Verdict.WARNING, text)
    unset = [
        f"MILLSTREAM_{name.upper()}"
        for name in ("jwt_audience", "jwt_issuer")
        if not getattr(settings, name)
    ]
    if unset and not settings.jwt_secret.get_secret_value():
        text = (
            f"whatever the issuer signs for other services gets in too: set {' and '.join(unset)}"
        )
        return Finding("tokens", Verdict.WARNING, text)
    return Finding("tokens", Verdict.OK, "signatures can be checked")
