"""The socket a server listens on: takes the address, or says in one line why it cannot be had."""

import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct
import sys

from millstream.shared.errors import MillstreamError, SettingsError

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - not bound here
"""Addresses that mean every interface, and where to reach them from this machine."""

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python has no name for it


class PortTaken(MillstreamError):
    """Another program listens on a port that an API pod was to have."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, not listening yet.

    Raises:
        PortTaken: another program has the port.
        SettingsError: the host or the port can never be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise SettingsError(f"cannot listen on host {host!r}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise explain(error, host, port) from None
    return listener


def url_of(host: str, port: int) -> str:
    """Where a server that listens on `host` can be reached from this machine."""
    host = WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def public_url_of(host: str, port: int) -> str:
    """The same from other machines: by the machine's name, if it listens on every interface."""
    return url_of(socket.gethostname() if host in WILDCARDS else host, port)


def reached_by_others(host: str) -> bool:
    """Whether a server on this address could be reached from other machines."""
    try:
        found = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError):
        return False  # `bind` will say what is wrong with it
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return not (mapped or address).is_loopback


def notice_vanished(listener: socket.socket, within_s: float) -> None:
    """Have the kernel end accepted connections whose other side is silently gone.

    What stays unacknowledged for so long ends its connection, where the system knows that (Linux;
    accepted sockets inherit it); probes see to it that an idle one has something to acknowledge.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(1, round(within_s / 3))
    options = {
        "TCP_USER_TIMEOUT": round(within_s * 1000),
        "TCP_KEEPIDLE": third,
        "TCP_KEEPINTVL": third,
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


def explain(error: OSError, host: str, port: int) -> MillstreamError:
    """What to tell a person about an address that cannot be had."""
    match error.errno:
        case errno.EADDRINUSE:
            return taken(port)
        case errno.EACCES:
            return SettingsError(f"port {port} needs more rights; choose one above 1023 by --port")
        case errno.EADDRNOTAVAIL:
            return SettingsError(f"{host} is not an address of this machine; change --host")
        case _:
            return MillstreamError(f"cannot listen on {host}, port {port}: {error.strerror}")


def taken(port: int) -> PortTaken:
    """The error for a port that somebody has."""
    return PortTaken(
        f"port {port} is taken by another program; stop that one, or choose another by --port "
        f"(make run ARGS='--port {port + 1000 if port < 64000 else port - 1000}')"
    )


def take_no_more(listener: socket.socket) -> None:
    """Let the kernel drop what knocks from now on, so that none comes after the last accept.

    Linux only (`SO_ATTACH_FILTER`, a filter that passes nothing): a client sends its SYN again, and
    finds the port closed. Elsewhere nothing is done.
    """
    if sys.platform != "linux":
        return
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET, 0 bytes
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
