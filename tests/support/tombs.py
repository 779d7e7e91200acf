"""Where it is kept that a task was there (docs/protocol.md)."""

from typing import Any

SPAN_MS = 6 * 3_600_000


async def tombs_of(client: Any, task_id: str) -> list[bytes]:
    """The hashes in which a task has a tomb."""
    head, mark = task_id.partition("-")[2][:2], task_id.partition("-")[2][2:14]
    keys = [key async for key in client.scan_iter(f"*:tombs:*:{head}")]
    return [key for key in keys if await client.hexists(key, mark)]
