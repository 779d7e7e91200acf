"""Events are read as they were written."""

import msgspec
import pytest
from hypothesis import given, strategies as st

from millstream.shared.events import Event, decode_log, decode_pod_message, token_data
from millstream.shared.schemas import new_task_id, shard_of


@given(st.text())
def test_token_data_is_json_on_one_line(text: str) -> None:
    data = token_data(text)
    assert "\n" not in data
    assert "\r" not in data
    assert Event(1, "t", "5", data).text == text


@pytest.mark.parametrize(
    ("ids", "count", "token_ids"), [("", 0, []), ("7", 1, [7]), ("7,8,9", 3, [7, 8, 9])]
)
def test_ids(ids: str, count: int, token_ids: list[int]) -> None:
    event = Event(1, "t", ids, '""')
    assert (event.token_count, event.token_ids) == (count, token_ids)


def test_a_log_entry_with_fields_of_a_newer_version() -> None:
    fields = [b"k", b"t", b"a", b"1", b"new", b"x", b"i", b"3", b"d", b'"hi"']
    assert decode_log([(b"12-0", fields)]) == [Event(12, "t", "3", '"hi"')]


def test_a_pod_message_numbers_events_in_a_row() -> None:
    payload = msgspec.msgpack.encode(
        [["a", 3, "t", "1", '"x"', "t", "2", '"y"'], ["b", 9, "completed", "", "{}"]]
    )
    assert decode_pod_message(payload) == [
        ("a", [Event(3, "t", "1", '"x"'), Event(4, "t", "2", '"y"')]),
        ("b", [Event(9, "completed", "", "{}")]),
    ]


@pytest.mark.parametrize("shard", [0, 7, 1023])
def test_a_task_id_carries_its_shard(shard: int) -> None:
    assert shard_of(new_task_id(shard)) == shard


@pytest.mark.parametrize("text", ["", "t0-", "t00-" + "a" * 26, "t0-" + "A" * 26, "t0-" + "a" * 27])
def test_what_is_no_task_id_has_no_shard(text: str) -> None:
    assert shard_of(text) is None
