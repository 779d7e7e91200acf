"""What the kernel alone takes for a piece of a stream: a send on a TCP connection to this machine.

The receiver is a process of its own, as the readers of a pod are: a send wakes it.
"""

import socket
import subprocess
import sys
import time

PIECE = b"x" * 200  # about the size of a chat's chunk
CONNECTIONS, SENDS = 200, 50
_SINK = """
import asyncio, sys, uvloop
class Sink(asyncio.Protocol): pass
async def main():
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
uvloop.run(main())
"""


def send_us() -> float:
    """CPU µs of a send, a connection after the other."""
    with subprocess.Popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE) as sink:
        try:
            assert sink.stdout is not None
            port = int(sink.stdout.readline())
            there = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
            before = time.thread_time()
            for _ in range(SENDS):
                for connection in there:
                    connection.send(PIECE)
            return (time.thread_time() - before) / (SENDS * CONNECTIONS) * 1e6
        finally:
            sink.kill()
