"""Finds out, before anything is started, whether the ports of the API pods are free."""

import contextlib
import errno
import socket

from millstream.shared.errors import MillstreamError, SettingsError

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - not bound here
"""Addresses that mean every interface, and where to reach them from this machine."""

_CONNECT_S = 0.5


class PortTaken(MillstreamError):
    """Another program listens on a port that an API pod was to have."""


def choose_ports(host: str, first: int, count: int) -> list[int]:
    """The ports of `count` pods: `first` and those after it, or any free ones if it is 0.

    Raises:
        PortTaken: one of them is in use.
        SettingsError: the host or the port can never be listened on.
    """
    if first == 0:
        return _free_ports(host, count)
    ports = list(range(first, first + count))
    if ports[-1] > 65535:
        raise SettingsError(f"{count} API pods from port {first} on go past 65535; lower --port")
    for port in ports:
        check_port(host, port)
    return ports


def check_port(host: str, port: int) -> None:
    """See whether a server could listen here.

    SO_REUSEADDR is needed, or connections that ended a minute ago would count as a server. With it,
    Linux still refuses a port that somebody listens on; elsewhere a wildcard listener is not seen,
    hence the attempt to connect.
    """
    if _answers(host, port):
        raise _taken(port)
    with contextlib.closing(_bind(host, port)) as listener:
        try:
            listener.listen(1)
        except OSError as error:
            raise _explain(error, host, port) from None


def url_of(host: str, port: int) -> str:
    """Where a pod that listens on `host` can be reached from this machine."""
    host = WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _free_ports(host: str, count: int) -> list[int]:
    # All are held until the last is found, or the kernel might give one twice.
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(contextlib.closing(_bind(host, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _bind(host: str, port: int) -> socket.socket:
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
        raise _explain(error, host, port) from None
    return listener


def _explain(error: OSError, host: str, port: int) -> MillstreamError:
    match error.errno:
        case errno.EADDRINUSE:
            return _taken(port)
        case errno.EACCES:
            return SettingsError(f"port {port} needs more rights; choose one above 1023 by --port")
        case errno.EADDRNOTAVAIL:
            return SettingsError(f"{host} is not an address of this machine; change --host")
        case _:
            return MillstreamError(f"cannot listen on {host}, port {port}: {error.strerror}")


def _taken(port: int) -> PortTaken:
    return PortTaken(
        f"port {port} is taken by another program; stop that one, or choose another by --port "
        f"(make run ARGS='--port {port + 1000 if port < 64000 else port - 1000}')"
    )


def _answers(host: str, port: int) -> bool:
    try:
        connection = socket.create_connection((WILDCARDS.get(host, host), port), _CONNECT_S)
    except OSError:
        return False
    with connection:
        # A connection out of the very port it goes to meets itself.
        return connection.getsockname() != connection.getpeername()
