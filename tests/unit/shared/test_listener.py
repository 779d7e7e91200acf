"""The listening socket: what accepted connections inherit from it."""

import socket
import sys

import pytest

from millstream.shared.listener import bind, notice_vanished


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux inherits the option")
def test_accepted_connections_notice_a_vanished_peer() -> None:
    with bind("127.0.0.1", 0) as listener:
        notice_vanished(listener, 45)
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            timeout_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            idle_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert (timeout_ms, idle_s) == (45_000, 15)
