"""What Millstream costs, next to its peers. `make bench` runs them all."""

import atexit
import contextlib
import signal

import psutil

# Whoever is told to end, by Ctrl-C, `kill` or a time limit, ends what it started. SIGTERM would end
# a benchmark alone; SIGINT is ignored where a shell has started it in the background.
for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, signal.default_int_handler)


@atexit.register
def _end_children() -> None:
    """A process that was just being started when the signal came is in nobody's list."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
