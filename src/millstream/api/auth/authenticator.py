"""Whose request it is, from its headers: by key, by token, or anyone's on a fleet without keys."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.api.auth.caller import ANONYMOUS, Caller
from millstream.api.auth.keyring import Keyring
from millstream.api.auth.pages import Pages
from millstream.shared.errors import InvalidRequest, NotAuthenticated, SettingsError
from millstream.shared.listener import reached_by_others
from millstream.shared.settings import Settings

if TYPE_CHECKING:
    from millstream.api.auth.tokens import Tokens

# Where people who come from other servers put keys. Proxies and histories keep whole URLs.
_KEYS_IN_URLS = re.compile(
    r"(x-)?api[-_]?key|key|access_token|token|auth|authorization|bearer", re.IGNORECASE
)


class Authenticator:
    """Finds the caller of a request; asks Redis nothing.

    Raises:
        SettingsError: keys or tokens are set up wrongly, or anyone could reach a fleet without any.
    """

    def __init__(self, settings: Settings) -> None:
        keys, file = settings.api_keys.get_secret_value(), settings.api_keys_file
        self.keyring = Keyring(keys, Path(file) if file else None)
        self._tokens = _tokens_of(settings)
        self.takes_tokens = self._tokens is not None
        """Somebody may sign tokens that do in place of a key."""
        self.open = not (keys or file or self.takes_tokens)
        """No key is needed: everyone is the same caller."""
        self.pages = Pages(settings.cors_origins)
        if self.open and not settings.allow_anonymous and reached_by_others(settings.host):
            raise SettingsError(
                f"anyone who reaches {settings.host or 'this machine'} could use the API: set "
                "MILLSTREAM_API_KEYS, MILLSTREAM_API_KEYS_FILE or MILLSTREAM_JWT_…, or "
                "MILLSTREAM_ALLOW_ANONYMOUS=1 if all may"
            )

    async def caller(self, headers: Mapping[str, str], query: Mapping[str, str]) -> Caller:
        """Whose request it is.

        Args:
            headers: Those of the request; names in lower case, or looked up in any.
            query: Its query, in which no key may be.

        Raises:
            NotAuthenticated: there is no key, or one that is not taken.
            NotAllowed: without keys, a browser asks for another site's page.
            InvalidRequest: the key is in the URL.
            KeysUnavailable: whoever signs the tokens does not show its keys.
        """
        if self.open:
            self.pages.check(headers)
            return ANONYMOUS
        if query:
            self._refuse_keys_in(query)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise NotAuthenticated(
                "You didn't provide an API key: send the header Authorization: Bearer KEY.",
                given=False,
            )
        caller = self.keyring.find(key)
        if caller is not None:
            return caller
        if self._tokens is not None and key.count(".") == 2:
            return await self._tokens.caller(key)
        raise NotAuthenticated("Incorrect API key provided.")

    def _refuse_keys_in(self, query: Mapping[str, str]) -> None:
        for name, value in query.items():
            if _KEYS_IN_URLS.fullmatch(name) or self.keyring.find(value) is not None:
                raise InvalidRequest(
                    f"A key must never be in a URL ({name[:40]!r}), where logs and histories keep "
                    "it: revoke it, and send the new one as Authorization: Bearer KEY.",
                    code="key_in_url",
                )


def _tokens_of(settings: Settings) -> "Tokens | None":
    if not any(
        getattr(settings, name) for name in Settings.model_fields if name.startswith("jwt_")
    ):
        return None
    from millstream.api.auth.tokens import Tokens  # cryptography takes its time to import

    return Tokens(settings)
