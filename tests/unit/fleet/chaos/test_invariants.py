"""Hand-made bad evidence: each promise that is broken is found, and none in good evidence."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date

import pytest
from msgspec import structs

from millstream.fleet.chaos.evidence import Entry, Evidence, TaskRecord
from millstream.fleet.chaos.history import Connection, Form, History, Look, Seen, Stopped
from millstream.fleet.chaos.invariants import Broken, judge, missed, numbers_of, unlucky
from millstream.fleet.chaos.prompts import Prompt
from millstream.fleet.chaos.schedule import Fault
from millstream.shared.events import Event
from millstream.shared.schemas import SamplingParams, TaskRequest
from millstream.shared.usage import DayOfUsage

CANARY = "canary-0123456789abcdef"
FOREIGN = "canary-fedcba9876543210"


@dataclass
class Case:
    """A completed task of five tokens, its one reader, and what else was seen."""

    task: TaskRecord
    history: History
    evidence: Evidence

    @property
    def seen(self) -> list[Seen]:
        return self.history.connections[0].seen

    def found(self) -> set[str]:
        return {broken.invariant for broken in judge(self.evidence)}


def completed(form: Form = Form.NATIVE, *, poison: bool = False) -> Case:
    """Evidence of a task that went well."""
    text = f'@fake {{"tokens": 5}}\nTell me of {CANARY}.'
    request = TaskRequest("fake", prompt=text, sampling=SamplingParams(max_tokens=9))
    task = TaskRecord("t0-a", request, {"state": "completed", "attempt": "2"}, [])
    reference = task.reference
    assert reference.tokens == 5
    assert reference.finish_reason == "stop"
    task.log = [
        Entry(1 if number < 3 else 2, Event(number, "t", *event))
        for number, event in enumerate(reference.events, 1)
    ]
    usage = {
        "prompt_tokens": reference.prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": reference.prompt_tokens + 5,
    }
    data = json.dumps({"finish_reason": "stop", "usage": usage})
    task.log.append(Entry(2, Event(6, "completed", "", data)))
    history = History(
        form, Prompt(text, CANARY, {}, poison), posts=1, task_ids=["t0-a"], ended=True
    )
    connection = history.connect()
    connection.task_id = "t0-a"
    connection.done, connection.finish_reason, connection.usage = True, "stop", usage
    for _, event in task.log:
        if form.numbered:
            data = event.text if event.kind == "t" else event.data
            kind = "token" if event.kind == "t" else event.kind
            connection.seen.append(Seen(event.seq, kind, data, 0.0))
        elif event.kind == "t":
            connection.seen.append(Seen(None, "token", event.text, 0.0))
    return Case(task, history, Evidence([history], {"t0-a": task}))


@pytest.mark.parametrize("form", [form for form in Form if form != Form.POLL])
def test_good_evidence_breaks_nothing(form: Form) -> None:
    assert judge(completed(form).evidence) == []


def test_resuming_is_no_duplicate() -> None:
    case = completed()
    case.seen[3:] = []
    first = case.history.connections[0]
    second = case.history.connect()
    assert (second.after, second.task_id) == (3, "t0-a")
    second.seen = completed().seen[3:]
    second.done, second.finish_reason, second.usage = True, "stop", first.usage
    first.done, first.finish_reason, first.usage = False, None, None
    assert judge(case.evidence) == []
    second.seen.insert(0, completed().seen[2])  # and what it had already is one
    assert case.found() == {"I1"}


def lose_a_token(case: Case) -> None:
    del case.seen[2]


def lose_the_first(case: Case) -> None:
    del case.seen[0]


def lose_the_end(case: Case) -> None:
    case.seen.pop()


def show_one_twice(case: Case) -> None:
    case.seen.insert(2, case.seen[1])


def show_out_of_order(case: Case) -> None:
    case.seen[1], case.seen[2] = case.seen[2], case.seen[1]


def gap_in_the_log(case: Case) -> None:
    del case.task.log[1]


def change_what_was_shown(case: Case) -> None:
    case.seen[1] = case.seen[1].__class__(2, "token", " else", 0.0)


def change_between_looks(case: Case) -> None:
    usage: dict[str, int] = {}
    case.history.looks = [Look("running", "a", usage, None), Look("running", "b", usage, None)]


def go_on_after_the_end(case: Case) -> None:
    _, event = case.task.log[0]
    case.task.log.append(Entry(2, structs.replace(event, seq=7)))


def lose_the_terminal_event(case: Case) -> None:
    case.task.log.pop()


def disagree_about_the_end(case: Case) -> None:
    case.task.fields["state"] = "cancelled"
    case.history.stop_sent = True


def let_a_zombie_write(case: Case) -> None:
    case.task.log[3] = Entry(1, case.task.log[3].event)


def never_end(case: Case) -> None:
    case.task.fields["state"] = "running"


def forget_the_task(case: Case) -> None:
    case.evidence.tasks.clear()


def make_it_twice(case: Case) -> None:
    case.history.key = "k"
    case.history.posts = 2
    twin = replace(case.task, id="t0-b")
    case.evidence.tasks["t0-b"] = twin


def make_it_for_nobody(case: Case) -> None:
    case.evidence.histories.clear()


def undo_a_stop(case: Case) -> None:
    case.history.stop_sent = True
    case.history.stops = [Stopped("t0-a", "cancelled", {"completion_tokens": 5})]


def go_on_after_a_stop(case: Case) -> None:
    case.history.stops = [Stopped("t0-a", "completed", {"completion_tokens": 4})]


def count_wrongly(case: Case) -> None:
    attempt, event = case.task.log[5]
    data = event.data.replace('"completion_tokens": 5', '"completion_tokens": 6')
    case.task.log[5] = Entry(attempt, structs.replace(event, data=data))
    case.seen[5] = Seen(6, "completed", data, 0.0)


def tell_another_usage(case: Case) -> None:
    case.history.connections[0].usage = {"prompt_tokens": 1}


def exceed_the_budget(case: Case) -> None:
    case.task.request = TaskRequest(
        "fake", prompt=case.task.prompt, sampling=SamplingParams(max_tokens=4)
    )


def show_another_canary(case: Case) -> None:
    case.history.looks = [Look("running", f"so {FOREIGN}", {}, None)]


def write_another_token(case: Case) -> None:
    attempt, event = case.task.log[2]
    case.task.log[2] = Entry(attempt, structs.replace(event, data='" other"'))
    case.seen[2] = Seen(3, "token", " other", 0.0)


def leave_something(case: Case) -> None:
    case.evidence.unrest = ["1 tasks wait"]


def stay_slow(case: Case) -> None:
    case.evidence.healed_after_s = None


def answer_wrongly(case: Case) -> None:
    case.history.troubles = ["500: oh"]


def be_unready(case: Case) -> None:
    case.evidence.unready = ["api-1"]


def log_in_a_loop(case: Case) -> None:
    case.evidence.log_rates = {"worker-1": 200.0}


def die_by_itself(case: Case) -> None:
    case.evidence.ends = Counter({1: 1})


@pytest.mark.parametrize(
    ("do", "invariant"),
    [
        (lose_a_token, "I1"),
        (lose_the_first, "I1"),
        (lose_the_end, "I1"),
        (show_one_twice, "I1"),
        (show_out_of_order, "I1"),
        (gap_in_the_log, "I1"),
        (change_what_was_shown, "I2"),
        (change_between_looks, "I2"),
        (go_on_after_the_end, "I3"),
        (lose_the_terminal_event, "I3"),
        (disagree_about_the_end, "I3"),
        (let_a_zombie_write, "I4"),
        (never_end, "I5"),
        (forget_the_task, "I5"),
        (make_it_twice, "I5"),
        (make_it_for_nobody, "I5"),
        (undo_a_stop, "I7"),
        (go_on_after_a_stop, "I7"),
        (count_wrongly, "I8"),
        (tell_another_usage, "I8"),
        (exceed_the_budget, "I8"),
        (show_another_canary, "I10"),
        (write_another_token, "I11"),
        (leave_something, "I13"),
        (stay_slow, "I16"),
        (answer_wrongly, "I17"),
        (be_unready, "I17"),
        (log_in_a_loop, "I17"),
        (die_by_itself, "I17"),
    ],
)
def test_what_is_broken_is_found(do: Callable[[Case], None], invariant: str) -> None:
    case = completed()
    do(case)
    assert invariant in case.found()


def cancelled(form: Form = Form.NATIVE) -> Case:
    """A task that was stopped after two tokens."""
    case = completed(form)
    case.task.fields["state"] = "cancelled"
    usage = {
        "prompt_tokens": case.task.reference.prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": case.task.reference.prompt_tokens + 2,
    }
    end = Event(3, "cancelled", "", json.dumps({"usage": usage}))
    case.task.log[2:] = [Entry(1, end)]
    connection = case.history.connections[0]
    connection.seen[2:] = [Seen(3, "cancelled", end.data, 0.0)] if form == Form.NATIVE else []
    connection.finish_reason, connection.usage = None, usage
    connection.done = form == Form.NATIVE
    return case


def test_a_task_is_cancelled_only_by_someone() -> None:
    case = cancelled()
    assert case.found() == {"I5"}
    case.history.stop_sent = True
    assert case.found() == set()


def test_a_false_end_is_found() -> None:
    """A chat that was cut is told that it is finished (I12)."""
    case = cancelled(Form.CHAT_STREAM)
    case.history.left = True
    assert case.found() == set()
    case.history.connections[0].finish_reason = "stop"
    assert case.found() == {"I12"}


def test_a_finished_chat_that_lacks_a_token_is_found() -> None:
    case = completed(Form.CHAT_STREAM)
    del case.seen[0]
    assert case.found() == {"I2", "I12"}
    case = completed(Form.CHAT_STREAM)
    case.seen.pop()
    assert case.found() == {"I12"}
    case = completed(Form.CHAT_STREAM)
    case.seen.insert(1, case.seen[0])
    assert "I2" in case.found()


def failed(*, poison: bool, attempt: int = 3, lost: int = 3) -> Case:
    """A task that was given up after two tokens of its first attempt."""
    case = completed(poison=poison)
    case.task.fields |= {"state": "failed", "attempt": str(attempt)}
    data = json.dumps({"error": {"code": "max_attempts"}})
    case.task.log[2:] = [Entry(attempt, Event(3, "failed", "", data))]
    case.seen[2:] = [Seen(3, "failed", data, 0.0)]
    connection = case.history.connections[0]
    connection.finish_reason = connection.usage = None
    case.evidence.dead = {"t0-a": [lost]}
    return case


def test_poison_fails_after_so_many_losses() -> None:
    assert failed(poison=True).found() == set()
    assert failed(poison=True, lost=2).found() == {"I14"}
    assert completed(poison=True).found() == {"I14"}


def test_who_is_no_poison_fails_only_after_as_many_losses_in_a_row() -> None:
    case = failed(poison=False)
    assert unlucky(case.evidence) == [case.task]
    assert [item.task_id for item in judge(case.evidence)] == [""]  # one of one is too many
    for number in range(100):
        case.evidence.tasks[f"t0-{number}"] = replace(completed().task, id=f"t0-{number}")
    case.history.posts = 101
    assert judge(case.evidence) == []
    # The second attempt had a token to show: the losses were not in a row.
    attempt, event = case.task.log[1]
    case.task.log[1] = Entry(attempt + 1, event)
    assert judge(case.evidence) == [
        Broken("I14", "t0-a", "failed with max_attempts, though it is no poison")
    ]


def test_numbers_of_a_connection() -> None:
    def numbers(*got: int, after: int = 0) -> tuple[int, int, int]:
        seen = [Seen(number, "token", "", 0.0) for number in got]
        return tuple(numbers_of(Connection(after, seen=seen)))

    assert numbers() == (0, 0, 0)
    assert numbers(1, 2, 3) == (0, 0, 0)
    assert numbers(4, 5, after=3) == (0, 0, 0)
    assert numbers(1, 2, 5) == (2, 0, 0)
    assert numbers(5, after=3) == (1, 0, 0)
    assert numbers(1, 2, 2, 3) == (0, 1, 0)
    assert numbers(3, 4, after=3) == (0, 1, 0)
    assert numbers(1, 3, 2, 4) == (0, 0, 1)


def test_a_fault_that_never_hit_is_named() -> None:
    assert missed(Counter(dict.fromkeys(Fault, 1))) == []
    assert missed(Counter({fault: 1 for fault in Fault if fault != Fault.POISON})) == [Fault.POISON]


def test_usage_that_was_counted_twice_is_found() -> None:
    case = completed()
    prompt = case.task.reference.prompt_tokens
    case.task.fields["prompt_tokens"] = str(prompt)
    row = DayOfUsage(date(2026, 3, 1), "anonymous", "fake", 1, prompt, 5)
    case.evidence.used = [row]
    assert case.found() == set()
    for rows in ([row, row], [], [structs.replace(row, completion_tokens=6)]):
        case.evidence.used = rows
        assert case.found() == {"I8"}
