"""The roster becomes lines for a person."""

import json
import shlex

from millstream.fleet.announcement import ready_text
from millstream.fleet.readiness import Progress, summary
from millstream.shared.registry import WorkerInfo
from millstream.shared.states import WorkerState

NAMES = {1: "worker-0", 2: "worker-1"}


def worker(pid: int, state: WorkerState, note: str = "") -> WorkerInfo:
    return WorkerInfo(
        id=str(pid), pid=pid, host="h", model="m", engine="fake", state=state, slots=1, note=note
    )


def lines(progress: Progress, *workers: WorkerInfo) -> list[str]:
    return [line for _, line in progress.news(NAMES, workers)]


def test_only_news_is_told() -> None:
    progress = Progress()
    assert lines(progress, worker(1, WorkerState.STARTING, "reading weights 10 %")) == [
        "worker-0: m: reading weights 10 %"
    ]
    assert lines(progress, worker(1, WorkerState.STARTING, "reading weights 55 %")) == []
    assert lines(progress, worker(1, WorkerState.STARTING, "converting")) == [
        "worker-0: m: converting"
    ]
    ready = worker(1, WorkerState.READY)
    assert lines(progress, ready) == ["worker-0: m is ready"]
    assert lines(progress, ready) == []
    assert lines(progress, worker(1, WorkerState.STALLED)) == ["worker-0: m is stalled"]


def test_another_fleets_workers_are_not_told() -> None:
    assert lines(Progress(), worker(9, WorkerState.READY)) == []


def test_a_process_started_again_is_news() -> None:
    progress = Progress()
    lines(progress, worker(1, WorkerState.READY))
    again = progress.news({5: "worker-0"}, [worker(5, WorkerState.READY)])
    assert again == [(WorkerState.READY, "worker-0: m is ready")]


def test_the_summary_names_those_that_are_not_ready() -> None:
    assert summary(NAMES, []) == "worker-0: starting · worker-1: starting"
    assert summary(NAMES, [worker(1, WorkerState.READY)]) == "worker-1: starting"
    both = [worker(1, WorkerState.READY), worker(2, WorkerState.STARTING, "loading")]
    assert summary(NAMES, both) == "worker-1: m: loading"
    assert summary(NAMES, [worker(1, WorkerState.READY), worker(2, WorkerState.STALLED)]) == ""


def test_the_curl_line_survives_the_shell_whatever_the_models_name() -> None:
    text = ready_text(["http://h:1", "http://h:2"], model='it\'s "x"', keyed=False, state="")
    assert 'api_key="none"' in text
    assert "http://h:1 (also http://h:2)" in text
    (line,) = [line for line in text.splitlines() if "curl" in line]
    words = shlex.split(line)
    assert words[:3] == ["curl", "-sSN", "http://h:1/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == 'it\'s "x"'
    assert body["stream"] is True


def test_a_fleet_with_keys_says_where_to_put_one() -> None:
    text = ready_text(["http://h:1"], model="m", keyed=True, state="")
    (line,) = [line for line in text.splitlines() if "curl" in line]
    words = shlex.split(line)
    assert words[3:5] == ["-H", "Authorization: Bearer $MILLSTREAM_API_KEY"]
    assert '-H "Authorization' in line  # the shell fills it in
    assert 'api_key=os.environ["MILLSTREAM_API_KEY"]' in text
    assert "It asks for a key" in text
    assert "none" not in text
