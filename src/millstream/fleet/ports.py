"""Finds out, before anything is started, whether the ports that a fleet listens on are free."""

import contextlib
import socket

from millstream.shared.errors import SettingsError
from millstream.shared.listener import WILDCARDS, bind, explain, taken

_CONNECT_S = 0.5


def choose_ports(host: str, first: int, count: int) -> list[int]:
    """The ports of `count` processes: `first` and those after it, or any free ones if it is 0.

    Raises:
        PortTaken: one of them is in use.
        SettingsError: the host or the port can never be listened on.
    """
    if first == 0:
        return _free_ports(host, count)
    ports = list(range(first, first + count))
    if ports[-1] > 65535:
        raise SettingsError(f"{count} ports from {first} on go past 65535; start lower")
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
        raise taken(port)
    with contextlib.closing(bind(host, port)) as listener:
        try:
            listener.listen(1)
        except OSError as error:
            raise explain(error, host, port) from None


def _free_ports(host: str, count: int) -> list[int]:
    # All are held until the last is found, or the kernel might give one twice.
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(contextlib.closing(bind(host, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _answers(host: str, port: int) -> bool:
    try:
        connection = socket.create_connection((WILDCARDS.get(host, host), port), _CONNECT_S)
    except OSError:
        return False
    with connection:
        # A connection out of the very port it goes to meets itself.
        return connection.getsockname() != connection.getpeername()
