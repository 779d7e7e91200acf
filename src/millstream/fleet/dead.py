"""`millstream dead`: shows the tasks that were given up, tries them again, or forgets them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from millstream.fleet.state_folder import running_redis_url
from millstream.shared.address import mask_password
from millstream.shared.connection import RedisError, open_redis
from millstream.shared.dead_letters import DeadLetter, DeadLetters
from millstream.shared.errors import MillstreamError
from millstream.shared.events import TOKEN
from millstream.shared.keys import Keys
from millstream.shared.schemas import decode_request
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.steps import LogPage


class UnknownLetter(MillstreamError):
    """No dead letter has this id."""


def list_letters(settings: Settings, model: str | None, *, as_json: bool) -> int:
    """Print them all, the oldest first."""

    async def work(letters: DeadLetters, _: Scripts) -> None:
        found = await letters.read(model)
        if as_json:
            click.echo(json.dumps([_summary(letter) for letter in found], ensure_ascii=False))
            return
        for line in _table(found):
            click.echo(line)

    return _run(settings, work)


def show_letter(settings: Settings, task_id: str, *, as_json: bool) -> int:
    """Print one with its request and what it had written."""

    async def work(letters: DeadLetters, scripts: Scripts) -> None:
        letter = (await _chosen(letters, [task_id], model=None))[0]
        page = await scripts.follow(
            Keys(letter.shard),
            task_id=task_id,
            caller=letter.caller,
            pod="",
            after=0,
            count=settings.max_tokens_limit + 2,
        )
        text = None
        if isinstance(page, LogPage):
            text = "".join(event.text for event in page.events if event.kind == TOKEN)
        whole = {**_summary(letter), "request": json.loads(letter.request), "text": text}
        if as_json:
            click.echo(json.dumps(whole, ensure_ascii=False))
            return
        for name in ("task_id", "model", "caller", "attempts", "failed_at", "error"):
            click.echo(f"{name + ':':<10} {whole[name]}")
        click.echo(f"request:   {json.dumps(whole['request'], ensure_ascii=False, indent=2)}")
        click.echo("text:      " + ("gone with its log" if text is None else repr(text)))

    return _run(settings, work)


def retry_letters(settings: Settings, task_ids: Sequence[str], model: str | None) -> int:
    """Submit the chosen ones again, each as a new task; without ids, all of a model or all."""

    async def work(letters: DeadLetters, _: Scripts) -> None:
        for letter in await _chosen(letters, task_ids, model=model):
            new = await letters.retry(
                letter,
                max_queue=settings.max_queue,
                live_ttl_s=settings.live_ttl_s,
                life_s=settings.max_task_s,
            )
            if new is not None:
                click.echo(f"{letter.task_id} runs again as {new}")

    return _run(settings, work)


def drop_letters(settings: Settings, task_ids: Sequence[str], model: str | None) -> int:
    """Forget the chosen ones; without ids, all of a model or all."""

    async def work(letters: DeadLetters, _: Scripts) -> None:
        for letter in await _chosen(letters, task_ids, model=model):
            if await letters.drop(letter):
                click.echo(f"{letter.task_id} dropped")

    return _run(settings, work)


def _run(settings: Settings, work: Callable[[DeadLetters, Scripts], Awaitable[None]]) -> int:
    """Do the work on the Redis that is set, or else on that of this user's `millstream up`."""
    running = None if "redis_url" in settings.model_fields_set else running_redis_url()
    redis_url = running or settings.redis_url

    async def main() -> None:
        async with open_redis(redis_url, pool_size=2) as client:
            scripts = Scripts(client)
            await work(DeadLetters(client, scripts), scripts)

    try:
        asyncio.run(main())
    except RedisError as error:
        advice = "is `millstream up` still running?"
        if running is None:
            advice = "no fleet of `millstream up` is here, so set MILLSTREAM_REDIS_URL to yours"
        reason = str(error).rstrip(".")
        raise MillstreamError(f"Redis at {mask_password(redis_url)}: {reason}; {advice}") from None
    return 0


async def _chosen(
    letters: DeadLetters, task_ids: Sequence[str], *, model: str | None
) -> list[DeadLetter]:
    found = await letters.read(model)
    if not task_ids:
        return found
    by_id = {letter.task_id: letter for letter in found}
    for task_id in task_ids:
        if task_id not in by_id:
            raise UnknownLetter(f"no dead letter {task_id}; `millstream dead list` shows all")
    return [by_id[task_id] for task_id in task_ids]


def _summary(letter: DeadLetter) -> dict[str, Any]:
    return {
        "task_id": letter.task_id,
        "model": letter.model,
        "caller": letter.caller,
        "attempts": letter.attempts,
        "failed_at": datetime.fromtimestamp(letter.failed_at, UTC).isoformat(timespec="seconds"),
        "error": letter.error,
    }


def _table(letters: Sequence[DeadLetter]) -> list[str]:
    if not letters:
        return ["No dead letters."]
    rows = [("TASK", "MODEL", "ATTEMPTS", "FAILED", "PROMPT")]
    for letter in letters:
        said = _summary(letter)
        rows.append(
            (letter.task_id, letter.model, str(letter.attempts), said["failed_at"], _prompt(letter))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    ]


def _prompt(letter: DeadLetter) -> str:
    """The beginning of what was asked, in one line."""
    request = decode_request(letter.request)
    text = request.prompt if request.prompt is not None else request.messages[-1].content
    line = " ".join(text.split())
    return line if len(line) <= 48 else line[:47] + "…"
