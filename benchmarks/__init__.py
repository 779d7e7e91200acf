"""What Millstream costs, next to its peers. `make bench` runs them all."""

import atexit
import contextlib
import signal

import psutil

# Whoever is told to end, by Ctrl-C, `kill` or a time limit, ends what it started. SIGTERM would end
# a benchmark alone, and an error raised by it could be lost in an event loop, which has a handler
# for SIGINT; that one is ignored where a shell has started a benchmark in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


@atexit.register
def _end_children() -> None:
    """A process that was just being started when the signal came is in nobody's list."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
