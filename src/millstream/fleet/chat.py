"""`millstream chat`: talk to the fleet from a terminal or a pipe."""

import asyncio
import contextlib
import signal
import sys
import unicodedata
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TextIO

import click

from millstream.fleet.client import FleetClient, fleet_url, open_client
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.errors import MillstreamError, TaskFailed
from millstream.shared.settings import Settings

_HELP = """\
/new          forget what was said
/retry        ask the last question again
/model NAME   talk to another model; without a name: list them
/system TEXT  what the model is told first; without a text: nothing
/quit         leave (or Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one.
"""


_STOP_S = 5.0
"""How long an answer that the reader stopped is tried to be ended in the fleet."""
_NOTED_S = 0.5


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """The reader stopped the answer, or is told to go: by this signal."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by


@dataclass
class Conversation:
    """What has been said, and how it goes on."""

    model: str | None = None
    system: str = ""
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """What was asked for; it wins over what the model's makers suggest."""
    suggestions: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """By model."""
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def body(self, question: str) -> dict[str, Any]:
        """The task that asks this next."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns, {"role": "user", "content": question}]
        model = {"model": self.model} if self.model else {}
        return {**model, "messages": messages, **self.suggested, **self.sampling}

    @property
    def suggested(self) -> dict[str, float]:
        """What the makers of its model, or of the only one, suggest to sample with."""
        if self.model is None and len(self.suggestions) == 1:
            return next(iter(self.suggestions.values()))
        return self.suggestions.get(self.model or "", {})

    def describe(self) -> str:
        """Its model, and how it samples."""
        how = {**self.suggested, **self.sampling}
        return ", ".join([self.model or "Millstream", *(f"{k} {v}" for k, v in how.items())])

    def change(self, command: str, rest: str) -> str:
        """Do what a command says; what to tell of it."""
        match command:
            case "/new":
                self.turns.clear()
            case "/model":
                self.model = rest
            case "/system":
                self.system = rest
            case "/retry":
                return "Nothing has been asked yet.\n"
            case "/help":
                return _HELP
            case _:
                return f"There is no {command}; /help lists what there is.\n"
        return ""

    def forget(self, question: str) -> None:
        """Take back the last turn, if this was its question."""
        if self.turns[-2:-1] == [{"role": "user", "content": question}]:
            del self.turns[-2:]


class Printer:
    """Writes an answer as it comes, and in a terminal a passing line on what is waited for.

    Elsewhere that line is written when a wait begins.
    """

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._notes = notes
        self._noted = False
        self._at_margin = True

    def write(self, text: str) -> None:
        """Some more of the answer."""
        self.note("")
        self._out.write(_harmless(text) if self._out.isatty() else text)
        self._out.flush()
        self._at_margin = text.endswith("\n") if text else self._at_margin

    def end(self) -> None:
        """The answer is over."""
        self.note("")
        if not self._at_margin:
            self._out.write("\n")
            self._out.flush()
        self._at_margin = True

    def note(self, text: str) -> None:
        """Show what is waited for; '' when nothing is."""
        if not self._notes.isatty():
            if text and not self._noted:  # not each step of a wait: nobody may be looking
                self._notes.write(f"millstream: {text}\n")
                self._notes.flush()
            self._noted = bool(text)
            return
        if not (text or self._noted):
            return
        if text and not self._at_margin:
            self._notes.write("\n")  # not over the answer's last line
            self._at_margin = True
        self._notes.write(f"\r\x1b[2K\x1b[2m{_harmless(text)}\x1b[0m" if text else "\r\x1b[2K")
        self._notes.flush()
        self._noted = bool(text)


def _harmless(text: str) -> str:
    """Without control characters: a model must not move the cursor or retitle the window."""
    return "".join(
        letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc"
    )


async def answer(
    client: FleetClient, conversation: Conversation, question: str, out: Printer
) -> None:
    """Ask, and print the answer as it comes; it ends in the fleet when its reader goes.

    Raises:
        Stopped: by Ctrl-C, SIGTERM or a closed terminal; what had come is part of the conversation.
        MillstreamError: there is no answer.
        OSError: nobody reads what is written.
    """
    signals = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    texts: list[str] = []

    async def read(task_id: str) -> None:
        async for kind, data in client.follow(task_id):
            if kind == "queued":
                out.note(f"waiting, number {data['position']} in the queue")
            elif kind == "token":
                texts.append(data["text"])
                out.write(data["text"])
            elif kind == "failed":
                raise TaskFailed(data["error"]["message"])

    stopping = asyncio.create_task(signals.get())
    submitted = asyncio.create_task(_submit(client, conversation, question))
    working: asyncio.Task[Any] = submitted
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            working = asyncio.create_task(read(working.result()))
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working is submitted or not working.done():
            await _give_up(client, submitted, signals, out)
            raise Stopped(stopping.result())
        working.result()
    except OSError:
        await _give_up(client, submitted, signals, out)
        raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        for task in (working, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        with contextlib.suppress(OSError):  # whatever it is, it was told, or nobody reads
            out.end()
        if texts:
            conversation.turns += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "".join(texts)},
            ]


async def _submit(client: FleetClient, conversation: Conversation, question: str) -> str:
    """Start the task. Its model may have come, or been chosen, since the fleet was last asked."""
    if not conversation.suggested:
        with contextlib.suppress(MillstreamError):  # whatever is wrong, the task tells of it too
            conversation.suggestions = await _models(client)
    return await client.submit(conversation.body(question))


async def _give_up(
    client: FleetClient, submitted: "asyncio.Task[str]", again: "asyncio.Queue[int]", out: Printer
) -> None:
    """End the task, which may just be coming into being, so that nobody decodes it for nobody.

    One that the fleet has refused so far is not there. Another Ctrl-C leaves it as it is.
    """
    if client.refused:
        return

    async def stop() -> None:
        with contextlib.suppress(MillstreamError, OSError):
            await client.stop(await submitted)

    stopping, leaving = asyncio.create_task(stop()), asyncio.create_task(again.get())
    both = {stopping, leaving}
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait(both, timeout=_NOTED_S, return_when=first)
    if not done:
        with contextlib.suppress(OSError):
            out.note("stopping it; Ctrl-C leaves it")
        await asyncio.wait(both, timeout=_STOP_S, return_when=first)
    await cancel_until_done(both)


async def ask_once(settings: Settings, conversation: Conversation, question: str) -> int:
    """One question from a pipe, its answer on stdout; the exit code."""
    out = Printer(sys.stdout, sys.stderr)
    async with open_client(settings, out.note) as client:
        conversation.suggestions = await _models(client)  # nor is one waited for that never was
        try:
            await answer(client, conversation, question, out)
        except Stopped as stopped:
            return 128 + stopped.by
    return 0


def talk(settings: Settings, conversation: Conversation) -> int:
    """A conversation at the terminal, to its end."""
    import readline  # noqa: F401  # pyright: ignore[reportUnusedImport] - history and editing

    out = Printer(sys.stdout, sys.stderr)
    last = ""
    # The loop runs only while something is asked: in between, Ctrl-C is a plain KeyboardInterrupt.
    with asyncio.Runner() as runner, _opened(runner, settings, out) as client:
        models = conversation.suggestions = runner.run(_models(client))
        if conversation.model is None and len(models) == 1:
            (conversation.model,) = models
        click.echo(f"{conversation.describe()} at {fleet_url(settings)}. /help, Ctrl-D leaves.")
        while True:
            try:
                line = _read_question()
            except EOFError:
                click.echo()
                return 0
            except KeyboardInterrupt:
                click.echo("\n(Ctrl-D leaves)")
                continue
            command, _, rest = line.partition(" ")
            if command in ("/quit", "/exit"):
                return 0
            if command == "/retry" and last:
                conversation.forget(last)
                _ask(runner, client, conversation, last, out)
            elif command == "/model" and not rest:
                conversation.suggestions = runner.run(_models(client))
                click.echo("\n".join(conversation.suggestions) or "No model is served yet.")
            elif command.startswith("/") and command[1:].isalpha():
                click.echo(conversation.change(command, rest.strip()), nl=False)
            elif line:
                last = line
                _ask(runner, client, conversation, line, out)


def _ask(
    runner: asyncio.Runner,
    client: FleetClient,
    conversation: Conversation,
    question: str,
    out: Printer,
) -> None:
    try:
        runner.run(answer(client, conversation, question, out))
    except Stopped as stopped:
        if stopped.by != signal.SIGINT:
            raise SystemExit(128 + stopped.by) from None
        click.echo("(stopped)")
    except MillstreamError as error:
        click.echo(f"millstream: {error.message}", err=True)


@contextlib.contextmanager
def _opened(runner: asyncio.Runner, settings: Settings, out: Printer) -> Generator[FleetClient]:
    context = open_client(settings, out.note)
    client = runner.run(_enter(context))
    try:
        yield client
    finally:
        runner.run(_leave(context))


async def _enter(context: AbstractAsyncContextManager[FleetClient]) -> FleetClient:
    return await context.__aenter__()


async def _leave(context: AbstractAsyncContextManager[FleetClient]) -> None:
    await context.__aexit__(None, None, None)


async def _models(client: FleetClient) -> dict[str, dict[str, float]]:
    """The models that are served, with what their makers suggest to sample with."""
    served = (await client.get("/v1/models"))["data"]
    return {model["id"]: model.get("suggested_sampling", {}) for model in served}


def _read_question() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines).strip()


def run(settings: Settings, conversation: Conversation) -> int:
    """Talk at a terminal; from a pipe, answer what comes and end."""
    if sys.stdin.isatty():
        return talk(settings, conversation)
    question = sys.stdin.read().strip()
    if not question:
        raise MillstreamError("there is no question: stdin is empty")
    return asyncio.run(ask_once(settings, conversation, question))
