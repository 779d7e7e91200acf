"""Events as Server-Sent Events; pure functions from event to frame.

WHATWG HTML, "Server-sent events". All data is JSON without raw line breaks, so no model, prompt or
name can forge a field. Frames are text here: what has piled up is joined and encoded once.
"""

from millstream.shared.events import TOKEN, Event
from millstream.shared.schemas import to_json

OPENING = ": ok\n\n"
PING = ": ping\n\n"
# The openai client takes a blank line after a comment for the end of an event where an `id:` line
# came before; a lone comment line is skipped by everyone.
OPENAI_PING = ": ping\n"
DONE = "data: [DONE]\n\n"


def native_data(event: Event) -> str:
    """The data of an event as native readers get it, on any transport."""
    if event.kind != TOKEN:
        return event.data
    if event.data.startswith("{"):
        return f'{event.data[:-1]},"n":{event.token_count}}}'
    return f'{{"text": {event.data}, "n": {event.token_count}}}'


def native_name(event: Event) -> str:
    """What native readers call an event."""
    return "token" if event.kind == TOKEN else event.kind


def native_frame(event: Event) -> str:
    """An event of the native stream, with its number as the id to resume from."""
    return f"id: {event.seq}\nevent: {native_name(event)}\ndata: {native_data(event)}\n\n"


def queued_frame(position: int, eta_s: float | None) -> str:
    """A hint where the task stands in the queue; no id, since it is not part of the log."""
    eta = "null" if eta_s is None else f"{eta_s:.1f}"
    return f'event: queued\ndata: {{"position": {position}, "eta_s": {eta}}}\n\n'


def retry_frame(milliseconds: int) -> str:
    """Ask the client to connect again, after so long, with the last id it has."""
    return f"retry: {milliseconds}\n\n"


def data_frame(value: object) -> str:
    """A frame that is data alone, as on OpenAI's routes."""
    return f"data: {to_json(value).decode()}\n\n"


def error_frame(value: object) -> str:
    """An error of the stream itself, not of the task: no id."""
    return f"event: error\ndata: {to_json(value).decode()}\n\n"
