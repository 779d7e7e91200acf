"""What `millstream api` runs: the pod under uvicorn."""

from types import FrameType

import uvicorn
from fastapi import FastAPI

from millstream.api.app import create_app
from millstream.shared.log import set_up_logging
from millstream.shared.settings import Settings

# Above the 60 s after which nginx and most balancers drop an idle upstream connection: the side
# that opened it must be the one to close it, or a request meets a closed socket.
KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """uvicorn, which tells the pod first that it will go, and exits with 0 when it has drained."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        pod = getattr(self._app.state, "pod", None)
        if pod is not None:
            pod.loop.call_soon_threadsafe(pod.close_streams)
        # Not uvicorn's own handler: it raises the signal again at the end, and a drained pod would
        # look killed.
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(settings: Settings) -> int:
    """Serve until told to stop; the process's exit code."""
    set_up_logging(settings.log_format)
    app, served = create_app(settings)
    config = uvicorn.Config(
        served,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        backlog=4096,
    )
    server = _Server(config, app)
    server.run()
    return 0 if server.started else 1
