"""What `millstream api` runs: the pod under uvicorn."""

import asyncio
import gc
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from millstream.api.app import create_app
from millstream.api.body import largest_body
from millstream.api.http import BoundedHttp
from millstream.api.pod import Pod
from millstream.api.websocket import BoundedWebSocket
from millstream.shared.address import mask_password
from millstream.shared.connection import RedisError, is_transient
from millstream.shared.listener import bind, notice_vanished, take_no_more
from millstream.shared.log import set_up_logging
from millstream.shared.redis_check import UnfitRedis, require_fit
from millstream.shared.settings import Settings

# Above the 60 s after which nginx and most balancers drop an idle upstream connection: the side
# that opened it must be the one to close it, or a request meets a closed socket.
KEEP_ALIVE_S = 75
BACKLOG = 4096
# The kernel ends connections whose client has vanished so much later than a stream ends one whose
# client merely takes nothing. With the keepalive before, both come within a minute by default.
VANISHED_LATER_S = 3.0
# How long connections are still taken after the signal; balancers look every second or so.
LINGER_S = 1.0
# How long a connection that was taken may stay without a request after that.
LAST_REQUESTS_S = 0.5
# How long answers may take to end after a second signal; what has not is cancelled.
LAST_WORDS_S = 0.5
# How many objects may be new before the garbage collector looks for cycles: some 10 MB. A stream
# holds fifty objects, and makes some anew each time that it looks up. With Python's 700 the
# collector took a third of the CPU of a pod with 6,000 streams that wait.
YOUNG_OBJECTS = 50_000
LOOK_S = 1.0  # a Redis that is there has answered by then


class _Server(uvicorn.Server):
    """uvicorn, which tells the pod first that it will go, and exits with 0 when it has drained."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, listener: socket.socket) -> None:
        super().__init__(config)
        self._app = app
        self._listener = listener
        self._leaving = False
        self._late: set[asyncio.Task[object]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own handler: it raises the signal again at the end, and a drained pod would
        # look killed.
        pod: Pod | None = getattr(self._app.state, "pod", None)
        if pod is None:
            self.should_exit = True
            return
        if self._leaving:
            pod.loop.call_soon_threadsafe(self._leave_now, pod)
            return
        self._leaving = True
        # A request that is on its way while the sockets close would be lost: take what comes for a
        # little longer, and close each connection with its answer. (uvicorn makes its default
        # headers anew each second, out of these.)
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)
        self.server_state.default_headers.append(close)
        pod.loop.call_soon_threadsafe(self._leave, pod)

    def _leave(self, pod: Pod) -> None:
        pod.close_streams()
        pod.loop.call_later(LINGER_S, self._stop_listening, pod.loop)

    def _leave_now(self, pod: Pod) -> None:
        # Not by `force_exit`, after which the loop would end with the pod's tasks still to stop.
        pod.end_streams()
        self.should_exit = True
        pod.loop.call_later(LAST_WORDS_S, self._cancel_requests)

    def _cancel_requests(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()

    def _stop_listening(self, loop: asyncio.AbstractEventLoop) -> None:
        # Closing a socket resets what the kernel has connected and nobody has accepted: accept all
        # of it, and close before the loop can turn. uvicorn would then close each connection that
        # has no request yet, also one whose request is a packet away.
        take_no_more(self._listener)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            connection.setblocking(False)
            late = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        for server in self.servers:
            server.close()
        loop.call_later(LAST_REQUESTS_S, setattr, self, "should_exit", True)

    def _protocol(self) -> BoundedHttp:
        return BoundedHttp(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


def serve(settings: Settings) -> int:
    """Serve until told to stop; the process's exit code.

    Raises:
        SettingsError: the host is no address of this machine.
        PortTaken: another program has the port.
        UnfitRedis: tasks are not safe in this Redis. One that is away is waited for.
    """
    set_up_logging(settings.log_format, level=settings.log_level)
    app, served = create_app(settings)
    gc.set_threshold(YOUNG_OBJECTS)
    gc.freeze()  # what has been imported stays
    config = uvicorn.Config(
        served,
        http=BoundedHttp,
        ws=BoundedWebSocket,
        ws_max_size=largest_body(settings.max_prompt_chars),
        ws_ping_interval=settings.keepalive_s,
        ws_ping_timeout=settings.send_timeout_s,
        ws_per_message_deflate=False,  # a window of its own for each connection
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        backlog=BACKLOG,
    )
    # Before anything is started: uvicorn would first join the fleet, then find the port taken.
    with bind(settings.host, settings.port) as listener:
        notice_vanished(listener, settings.send_timeout_s + VANISHED_LATER_S)
        listener.listen(BACKLOG)
        asyncio.run(_look_at_redis(settings.redis_url))
        server = _Server(config, app, listener)
        server.run(sockets=[listener])
    return 0 if server.started and not app.state.pod.unfit else 1


async def _look_at_redis(url: str) -> None:
    """Refuse an unfit Redis before anything is served; the pod waits for one that is away."""
    try:
        async with asyncio.timeout(LOOK_S):
            await require_fit(url)
    except (RedisError, TimeoutError) as error:
        if isinstance(error, RedisError) and not is_transient(error):
            raise UnfitRedis(f"{mask_password(url)}: {error}") from None
