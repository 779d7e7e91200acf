"""Reads a request's body: bounded, strict JSON, checked against a schema; names what is wrong."""

import asyncio
import json
import re
from typing import Any, TypeVar, cast

import msgspec
import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from millstream.shared.errors import InvalidRequest, RequestTooLarge

# curl -d says it sends a form; whoever types that means JSON, and a real form is not valid JSON.
_JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")

Model = TypeVar("Model", bound=BaseModel)


_GAP = re.compile(r"[ \t\r\n,:]*")  # between the names and values of an object

MOST_FIELDS = 1_024
BODY_S = 30.0  # a body of the largest size takes less over any line a person would wait at


def largest_body(max_prompt_chars: int) -> int:
    """Bytes a body may have: a character escaped in JSON takes up to 12, plus the other fields."""
    return 12 * max_prompt_chars + 65_536


def most_values(max_prompt_chars: int) -> int:
    """Values a body may have, since making and checking them holds up a whole pod: some 0.1 s.

    A token id counts as four characters of a prompt; ten thousand messages in parts have 60,000.
    """
    return 65_536 + max_prompt_chars // 4


async def read_body(
    request: Request, schema: type[Model], *, max_prompt_chars: int
) -> tuple[Model, bytes]:
    """Read, parse and check a JSON body; the checked value and the bytes it came from.

    Raises:
        RequestTooLarge: it has more than `largest_body` bytes; the rest is not kept.
        InvalidRequest: it is compressed, or no JSON (NaN, lone surrogates and nesting beyond
            orjson's 1,024 levels included), or a field is not as it must be.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequest(
            f"The body must come as it is, without Content-Encoding ({encoding[:100]!r}).",
            param="Content-Encoding",
            code="unsupported_content_encoding",
        )
    raw = await _read(request, largest_body(max_prompt_chars))
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in _JSON_TYPES and not content_type.endswith("+json"):
        raise InvalidRequest(
            f"The body must be JSON (Content-Type application/json), not {content_type[:100]!r}.",
            param="Content-Type",
            code="unsupported_content_type",
        )
    return parse_body(raw, schema, max_prompt_chars=max_prompt_chars), raw


def parse_body(raw: bytes, schema: type[Model], *, max_prompt_chars: int) -> Model:
    """Parse and check JSON, however it came.

    Raises:
        InvalidRequest: as `read_body`, or it has more than `most_values`.
    """
    most = most_values(max_prompt_chars)
    if _value_count(raw, enough=most) > most:
        raise InvalidRequest(f"The body has more than {most} values.", param=_bulk_field(raw))
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error}.",
            param=_unreadable_field(raw),
            code="invalid_json",
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    fields = cast("dict[str, Any]", value)
    _refuse_crowds(fields)
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _explain(error, fields) from None


def read_query(request: Request, schema: type[Model]) -> Model:
    """Check a request's query against a schema; what is repeated is a list.

    Raises:
        InvalidRequest: a value is not as it must be.
    """
    values: dict[str, Any] = {}
    for name in dict.fromkeys(request.query_params):
        given = request.query_params.getlist(name)
        values[name] = given[0] if len(given) == 1 else given
    try:
        return schema.model_validate(values, strict=False)  # all of it is text
    except ValidationError as error:
        raise _explain(error, values) from None


async def _read(request: Request, most: int) -> bytes:
    too_large = RequestTooLarge(f"The request body may have {most} bytes at the most.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise InvalidRequest("The body ended early.", code="invalid_json")
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise InvalidRequest(
            f"The body did not come within {BODY_S:g} s.", code="body_timeout"
        ) from None
    return b"".join(parts)


def _value_count(raw: bytes, *, enough: int) -> int:
    """How many values a body has, before any is made; of one with few enough, no less than that.

    Each comes after a comma, or is the first in brackets that are not empty, or is the body;
    what stands in strings is left out.
    """
    separators = (b",", b"[", b"{")
    if (count := 1 + sum(map(raw.count, separators))) <= enough:
        return count
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    if (strings := plain.count(b'"') // 2) > 2 * enough + 1:
        return strings // 2  # each is a value, or the name of one
    outside = b'"'.join(plain.split(b'"')[::2]).translate(None, b" \t\r\n")
    return 1 + sum(map(outside.count, separators)) - sum(map(outside.count, (b"[]", b"{}")))


def _bulk_field(raw: bytes) -> str | None:
    """The field of a body that takes most of its bytes, if one does; no value is made for it."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    bulky = (name for name, value in fields.items() if 2 * len(bytes(value)) > len(raw))
    return next(bulky, "")[:200] or None


def _refuse_crowds(fields: dict[str, Any]) -> None:
    """Refuse a body with an object of so many fields that none of ours could be meant."""
    if len(fields) > MOST_FIELDS:
        raise InvalidRequest(f"The body has more than {MOST_FIELDS} fields.", code="invalid_json")
    for name, value in fields.items():
        if _has_crowd(value):
            raise InvalidRequest(
                f"Invalid value for {name[:100]}: an object has more than {MOST_FIELDS} fields.",
                param=name[:200],
            )


def _has_crowd(value: Any) -> bool:
    """Whether some object has so many fields that telling what is wrong with each would take long.

    Goes as deep as orjson let it be, 1,024 levels, without recursion.
    """
    left: list[Any] = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            fields = cast("dict[str, Any]", item)
            if len(fields) > MOST_FIELDS:
                return True
            left.extend(fields.values())
        elif isinstance(item, list):
            left.extend(cast("list[Any]", item))
    return False


def _unreadable_field(raw: bytes) -> str | None:
    """The field whose value is no JSON though Python's parser, which takes more, can tell its end.

    NaN, 1e400, lone surrogates, line breaks within strings and bytes of another encoding are sent
    by clients that did not mean to; "line 1 column 59" would not help their authors.
    """
    opening, _, text = raw.decode("utf-8", "surrogateescape").partition("{")
    if opening.strip():
        return None
    name, end = "", 0
    scan = json.JSONDecoder(strict=False).raw_decode
    for _ in range(MOST_FIELDS):
        at = _past_gap(text, end)
        if not text.startswith('"', at):
            return None
        try:
            name, end = scan(text, at)
            at = _past_gap(text, end)
            _, end = scan(text, at)
            orjson.loads(text[at:end].encode("utf-8", "surrogateescape"))
        except orjson.JSONDecodeError:
            break
        except json.JSONDecodeError:  # wrong for both: the fault may lie before it
            return None
        except (ValueError, RecursionError):  # thousands of digits or levels
            break
    else:
        return None
    return name[:200].encode("utf-8", "replace").decode()


def _past_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return gap.end() if gap else at


def _explain(error: ValidationError, value: dict[str, Any]) -> InvalidRequest:
    faults = error.errors(include_url=False, include_context=False)
    field = faults[0]["loc"][:1]
    # A union reports each of its branches; the one that got furthest is what the caller meant. But
    # of a part of another type nothing else is worth telling: it never was to be as ours are.
    param, first = max(
        (
            (_path(fault["loc"], value, missing=fault["type"] == "missing"), fault)
            for fault in faults
            if fault["loc"][:1] == field
        ),
        key=lambda pair: (
            pair[0].endswith(".type"),
            len(pair[0]),
            not str(pair[1]["type"]).endswith("_type"),  # it has a branch's type
        ),
    )
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            f"Unrecognized request argument: {param[:100]}.", param=param, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return InvalidRequest(
            f"Missing required parameter: {param}.", param=param, code="missing_required_parameter"
        )
    message = str(first["msg"]).removeprefix("Value error, ").removesuffix(".")
    if first["type"] == "model_type":
        message = "Input should be an object"  # pydantic would name our class
    where = f"Invalid value for {param}: " if param else ""
    return InvalidRequest(f"{where}{message}.", param=param or None)


def _path(location: tuple[int | str, ...], value: Any, *, missing: bool) -> str:
    """`messages[0].content`: the parts of pydantic's location that lie in the input.

    The others name the branch of a union, or a validator.
    """
    path = ""
    for at, part in enumerate(location):
        if isinstance(part, int):
            rows = cast("list[Any]", value) if isinstance(value, list) else []
            if part < len(rows):
                path += f"[{part}]"
                value = rows[part]
        elif isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            if part in fields or (missing and at == len(location) - 1):
                path += f".{part[:200]}" if path else part[:200]
                value = fields.get(part)
    return path
