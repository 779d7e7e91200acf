"""What a client's program is to do, from its standard input; and how it tells what came of it."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.request import ProxyHandler, build_opener

PLAN: dict[str, Any] = json.load(sys.stdin)
OPEN = f"{PLAN['open_url']}/v1"
KEYED = f"{PLAN['keyed_url']}/v1"


def state_once_left(task_id: str) -> str:
    """How a task stands some time after its client has gone, while this program still runs."""
    deadline = time.monotonic() + 20
    while True:
        with build_opener(ProxyHandler({})).open(f"{PLAN['open_url']}/tasks/{task_id}") as answer:
            state: str = json.load(answer)["status"]
        if state != "running" or time.monotonic() > deadline:
            return state
        time.sleep(0.05)


def fault(call: Callable[[], Any]) -> dict[str, Any]:
    """The exception that a call ends with."""
    try:
        call()
    except Exception as error:
        return {
            "kinds": [f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__],
            "status": getattr(error, "status_code", None),
            "message": str(error),
        }
    return {}


def tell(**report: Any) -> None:
    """The last line."""
    print(json.dumps(report))
