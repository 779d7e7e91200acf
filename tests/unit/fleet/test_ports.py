"""A port in use is seen however its holder listens, and a port of past connections is not."""

import socket
from collections.abc import Iterator

import pytest

from millstream.fleet.ports import check_port, choose_ports
from millstream.shared.errors import MillstreamError, SettingsError
from millstream.shared.listener import PortTaken, public_url_of, url_of


@pytest.fixture(params=["plain", "reuse", "wildcard", "reuseport"])
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    with socket.socket() as listener:
        if request.param != "plain":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if request.param == "reuseport":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("" if request.param == "wildcard" else "127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_named(taken: int, host: str) -> None:
    with pytest.raises(PortTaken, match=f"port {taken} is taken"):
        check_port(host, taken)


def test_every_port_counts(taken: int) -> None:
    with pytest.raises(PortTaken, match=r"port \d+ is taken"):
        choose_ports("127.0.0.1", taken - 2, 3)


def test_a_port_with_connections_of_a_minute_ago_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            connection, _ = listener.accept()
            connection.close()  # closed here first: TIME_WAIT stays on this side
    assert choose_ports("127.0.0.1", address[1], 1) == [address[1]]


def test_free_ports_differ() -> None:
    assert len(set(choose_ports("127.0.0.1", 0, 20))) == 20


def test_ports_end_at_65535() -> None:
    with pytest.raises(SettingsError, match="65535"):
        choose_ports("127.0.0.1", 65534, 3)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(MillstreamError, match="host"):
        choose_ports(host, 0, 1)


def test_urls_can_be_opened_here() -> None:
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert url_of("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url_of("::", 8000) == "http://[::1]:8000"
    assert public_url_of("0.0.0.0", 8000) == f"http://{socket.gethostname()}:8000"
    assert public_url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert url_of("fe80::1", 1) == "http://[fe80::1]:1"
