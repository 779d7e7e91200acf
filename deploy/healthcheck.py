"""The health of the container it runs in: `healthcheck.py api` or `healthcheck.py worker`.

Needs nothing but what the images hold (they have no curl). Exit code 0 is healthy; anything else
is not, with the reason on stderr.
"""

import asyncio
import http.client
import os
import socket
import sys

TIMEOUT_S = 3.0


def check_api() -> str | None:
    """Ask the pod in this container whether it is alive; the reason why not, if it is not."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", int(os.environ.get("MILLSTREAM_PORT") or 8000), timeout=TIMEOUT_S
    )
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except OSError as error:
        return f"no answer: {error}"
    finally:
        connection.close()
    return None if status == 200 else f"/health answered {status}"


async def check_worker() -> str | None:
    """Look up this host's workers in the fleet's roster: a worker listens on no port of its own."""
    from millstream.shared.connection import RedisError, open_redis
    from millstream.shared.registry import read_workers
    from millstream.shared.scripts import Scripts
    from millstream.shared.settings import read_settings
    from millstream.shared.states import WorkerState

    settings = read_settings()
    host = socket.gethostname()
    try:
        async with open_redis(settings.redis_url, pool_size=1) as client:
            workers = await read_workers(Scripts(client), lease_s=settings.lease_s)
    except RedisError as error:
        return f"Redis: {error}"
    states = {worker.state for worker in workers if worker.host == host}
    if not states:
        return f"no worker of host {host} is in the roster"
    if states <= {WorkerState.READY, WorkerState.DRAINING}:
        return None
    return f"the worker is {', '.join(sorted(states))}"


def main(arguments: list[str]) -> int:
    """Check one kind of process; 0 if it is healthy."""
    if arguments == ["api"]:
        problem = check_api()
    elif arguments == ["worker"]:
        problem = asyncio.run(check_worker())
    else:
        problem = "usage: healthcheck.py api|worker"
    if problem:
        sys.stderr.write(problem + "\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
