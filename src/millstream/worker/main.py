"""What `millstream worker` runs."""

import os
import sys

import uvloop

from millstream.shared.log import name_process, set_up_logging
from millstream.shared.settings import Settings
from millstream.worker.shutdown import Shutdown
from millstream.worker.worker import Worker


def run(settings: Settings) -> int:
    """Run one worker until it is told to stop; its exit code.

    Raises:
        SettingsError: the model cannot be loaded as set.
    """
    set_up_logging(settings.log_format, level=settings.log_level)

    async def main() -> int:
        shutdown = Shutdown()
        shutdown.install()
        worker = Worker(settings, shutdown)
        name_process(worker_id=worker.id)
        code = await worker.run()
        # A hung engine thread, or a model still loading, must not keep the process alive: leaving
        # asyncio.run would wait for its threads.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    return uvloop.run(main())
