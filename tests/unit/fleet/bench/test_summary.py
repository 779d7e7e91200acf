"""The figures of a run, from requests whose times are known."""

import pytest

from millstream.fleet.bench.plot import page
from millstream.fleet.bench.request import Outcome
from millstream.fleet.bench.summary import percentile, summarize, table

DONE = Outcome(10.0, 11.0, [10.2, 10.4, 10.8], prompt_tokens=7, output_tokens=3)
SHORT = Outcome(10.5, 10.9, [10.6], prompt_tokens=5, output_tokens=1)
REFUSED = Outcome(10.5, 10.51, error="503 queue_full")


def test_the_figures() -> None:
    figures = summarize([DONE, SHORT, REFUSED], duration=2.0)
    assert figures["completed"] == 2
    assert figures["failed"] == 1
    assert figures["errors"] == {"503 queue_full": 1}
    assert figures["total_input_tokens"] == 12
    assert figures["total_output_tokens"] == 4
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 2.0
    assert figures["total_token_throughput"] == 8.0
    assert figures["max_concurrent_requests"] == 3
    assert figures["mean_ttft_ms"] == pytest.approx(150)
    assert figures["p50_ttft_ms"] == pytest.approx(150)
    assert figures["p99_ttft_ms"] == pytest.approx(199)
    assert figures["mean_tpot_ms"] == pytest.approx(300)  # of the one with a second token
    assert figures["p50_itl_ms"] == pytest.approx(300)
    assert figures["max_itl_ms"] == pytest.approx(400)
    assert figures["mean_e2el_ms"] == pytest.approx(700)
    assert "503 queue_full: 1" in table(figures)
    assert "2 completed, 1 failed" in table(figures)


def test_nothing_completed() -> None:
    figures = summarize([REFUSED], duration=1.0)
    assert figures["mean_ttft_ms"] is None
    assert figures["p99_itl_ms"] is None
    assert "-" in table(figures)
    assert "<svg" in page([REFUSED], figures, {}, 10.0)


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([0, 10, 20], at) for at in (0, 25, 50, 100)] == [0, 5, 10, 20]
    assert percentile([3], 99) == 3


def test_the_page_shows_text_as_text() -> None:
    figures = summarize([DONE], duration=2.0)
    shown = page([DONE], figures, {"model": "<script>alert(1)</script>"}, 10.0)
    assert "<script" not in shown
    assert shown.count("<svg") == 4
