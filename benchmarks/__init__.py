"""What Millstream costs, next to its peers. `make bench` runs them all."""

import signal

# Whoever is told to end, by Ctrl-C, `kill` or a time limit, ends what it started. SIGTERM would end
# a benchmark alone; SIGINT is ignored where a shell has started it in the background.
for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, signal.default_int_handler)
