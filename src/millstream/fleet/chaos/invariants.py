"""The promises, each as a function that finds where the evidence breaks it.

Their numbers are those of docs/reliability.md.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from millstream.fleet.chaos.evidence import TERMINAL, Evidence, TaskRecord
from millstream.fleet.chaos.history import Connection
from millstream.fleet.chaos.schedule import Fault

LOG_LINES_PER_S = 10
"""A process that says more, over some seconds, goes round in a loop."""

UNLUCKY_SHARE = 0.05
"""More tasks than this lost too often in a row are no bad luck."""

CRASHED = 70
"""The exit code of a worker that a poison task ended."""

_CANARY = re.compile(r"canary-[0-9a-f]{16}")


class Broken(NamedTuple):
    """A promise that did not hold."""

    invariant: str
    task_id: str
    what: str


class Numbers(NamedTuple):
    """What is wrong with the event numbers that came over one connection."""

    lost: int
    duplicated: int
    reordered: int


def numbers_of(connection: Connection) -> Numbers:
    """Compare the numbers with after + 1, after + 2, …"""
    got = [seen.seq for seen in connection.seen if seen.seq is not None]
    if not got:
        return Numbers(0, 0, 0)
    new = {seq for seq in got if seq > connection.after}
    return Numbers(
        lost=max(got) - connection.after - len(new),
        duplicated=len(got) - len(new),
        reordered=sum(after < before for before, after in pairwise(got)),
    )


def logs_are_contiguous(evidence: Evidence) -> Iterator[Broken]:
    """I1: events have the numbers 1 to N."""
    for task in evidence.tasks.values():
        numbers = [entry.event.seq for entry in task.log]
        if numbers != list(range(1, len(numbers) + 1)):
            yield Broken("I1", task.id, f"the log has the numbers {numbers}")


def readers_miss_nothing(evidence: Evidence) -> Iterator[Broken]:
    """I1: a reader sees each event once, in order, over all its connections."""
    for history in evidence.histories:
        task_id = history.task_id or ""
        for connection in history.connections:
            lost, duplicated, reordered = numbers_of(connection)
            if lost or duplicated or reordered:
                what = f"a reader had {lost} lost, {duplicated} duplicated, {reordered} reordered"
                yield Broken("I1", task_id, what)
        task = evidence.tasks.get(task_id)
        if task is None or not history.ended or not history.form.numbered:
            continue
        if history.last_seq != len(task.log):
            what = f"its reader ended at event {history.last_seq} of {len(task.log)}"
            yield Broken("I1", task_id, what)


def shown_text_stays(evidence: Evidence) -> Iterator[Broken]:
    """I2: what a client ever saw is what the log says, or its beginning."""
    for history in evidence.histories:
        for connection in history.connections:
            task = evidence.tasks.get(connection.task_id or "")
            if task is None:
                continue
            if not history.form.numbered:
                if not task.text.startswith(connection.text):
                    yield Broken("I2", task.id, f"a client was shown {connection.text[-80:]!r}")
                continue
            for seen in connection.seen:
                number = seen.seq or 0
                event = task.log[number - 1].event if 0 < number <= len(task.log) else None
                if event is None:
                    yield Broken("I2", task.id, f"event {seen.seq} was shown and is not in the log")
                elif seen.kind == event.kind == "failed" and not seen.data:
                    continue  # of an error a response tells less than the log
                elif (event.text if event.kind == "t" else event.data) != seen.data:
                    yield Broken("I2", task.id, f"event {seen.seq} was shown as {seen.data!r}")
        texts = [look.text for look in history.looks]
        if any(not after.startswith(before) for before, after in pairwise(texts)):
            yield Broken("I2", history.task_id or "", "its text changed between two looks")


def one_end_comes_last(evidence: Evidence) -> Iterator[Broken]:
    """I3: a terminal event, one, the last, and the task's state is its kind."""
    for task in evidence.tasks.values():
        ends = [entry.event.seq for entry in task.log if entry.event.terminal]
        if task.state in TERMINAL and ends != [len(task.log)]:
            yield Broken("I3", task.id, f"terminal events at {ends} of {len(task.log)}")
        elif task.last is not None and task.last.kind != task.state:
            yield Broken("I3", task.id, f"{task.state}, but its log ends in {task.last.kind}")


def attempts_never_go_back(evidence: Evidence) -> Iterator[Broken]:
    """I4: nothing was written by an attempt that had lost the task."""
    for task in evidence.tasks.values():
        attempts = [entry.attempt for entry in task.log]
        if any(after < before for before, after in pairwise(attempts)):
            yield Broken("I4", task.id, f"attempts in its log: {attempts}")


def accepted_is_accounted(evidence: Evidence) -> Iterator[Broken]:
    """I5: every accepted task ended, and was not ended without anyone's wish."""
    made: dict[str, list[TaskRecord]] = defaultdict(list)
    for task in evidence.tasks.values():
        history = evidence.asked_by(task)
        if history is None:
            yield Broken("I5", task.id, "nobody asked for it")
            continue
        made[history.prompt.canary].append(task)
        if task.state not in TERMINAL:
            yield Broken("I5", task.id, f"is still {task.state}")
        elif task.state == "cancelled" and not (
            history.stop_sent or (history.attached and history.left)
        ):
            yield Broken("I5", task.id, "was cancelled, and nobody had stopped it")
    for history in evidence.histories:
        for task_id in set(history.task_ids) - evidence.tasks.keys():
            yield Broken("I5", task_id, "was accepted and is not there")
        most = history.posts if history.key is None else 1
        ids = [task.id for task in made[history.prompt.canary]]
        if len(ids) > most:
            yield Broken("I5", ids[0], f"{len(ids)} tasks of {history.posts} requests: {ids}")


def stops_hold(evidence: Evidence) -> Iterator[Broken]:
    """I7: what a stop was answered is how the task ended; no token came after it."""
    for history in evidence.histories:
        for stop in history.stops:
            task = evidence.tasks.get(stop.task_id)
            if task is None:
                continue
            if task.last is None or task.last.kind != stop.status:
                yield Broken("I7", task.id, f"a stop said {stop.status}; it is {task.state}")
            elif stop.usage["completion_tokens"] != task.tokens:
                told = stop.usage["completion_tokens"]
                yield Broken("I7", task.id, f"{told} tokens at the stop, {task.tokens} now")


def usage_is_exact(evidence: Evidence) -> Iterator[Broken]:
    """I8: usage counts the log, over all attempts; no answer is longer than asked for."""
    for task in evidence.tasks.values():
        most = task.request.sampling.max_tokens
        if most is not None and task.tokens > most:
            yield Broken("I8", task.id, f"{task.tokens} tokens of {most} at the most")
        usage = task.last.body.get("usage") if task.last is not None else None
        if usage is None:
            continue
        prompt = task.reference.prompt_tokens if task.tokens else usage["prompt_tokens"]
        right = {
            "prompt_tokens": prompt,
            "completion_tokens": task.tokens,
            "total_tokens": prompt + task.tokens,
        }
        if usage != right:
            yield Broken("I8", task.id, f"the usage is {usage}, not {right}")
        history = evidence.asked_by(task)
        if history is None or history.task_id != task.id:
            continue
        told = [item.usage for item in history.connections if item.done]
        told += [look.usage for look in history.looks if look.status in TERMINAL]
        for one in told:
            if one is not None and one != right:
                yield Broken("I8", task.id, f"a client was told {one}, not {right}")


def usage_is_counted_once(evidence: Evidence) -> Iterator[Broken]:
    """I8: what was counted for callers is the sum of their tasks that ended."""
    if evidence.used is None:
        return
    ended = [task for task in evidence.tasks.values() if task.state in TERMINAL]
    right = (
        len(ended),
        sum(int(task.fields.get("prompt_tokens", 0)) for task in ended),
        sum(task.tokens for task in ended),
    )
    counted = (
        sum(row.tasks for row in evidence.used),
        sum(row.prompt_tokens for row in evidence.used),
        sum(row.completion_tokens for row in evidence.used),
    )
    if counted != right:
        yield Broken("I8", "", f"tasks, prompt and other tokens: counted {counted}, are {right}")


def canaries_stay_at_home(evidence: Evidence) -> Iterator[Broken]:
    """I10: no client got a word of another's."""
    for history in evidence.histories:
        texts = [connection.text for connection in history.connections]
        texts += [look.text for look in history.looks[-1:]]
        foreign = {canary for text in texts for canary in _CANARY.findall(text)}
        for canary in foreign - {history.prompt.canary}:
            what = f"a client was shown {canary}, which is another's"
            yield Broken("I10", history.task_id or "", what)


def texts_are_undisturbed(evidence: Evidence) -> Iterator[Broken]:
    """I11: token ids and text are those of a run without faults, or their beginning."""
    for task in evidence.tasks.values():
        events = [(event.ids, event.data) for _, event in task.log if event.kind == "t"]
        right = list(task.reference.events)
        if events != (right if task.state == "completed" else right[: len(events)]):
            pairs = enumerate(zip(events, right, strict=False), 1)
            at = next((number for number, (one, other) in pairs if one != other), len(events) + 1)
            what = f"{len(events)} events of {len(right)}; number {at} is another"
            yield Broken("I11", task.id, what)


def ends_are_true(evidence: Evidence) -> Iterator[Broken]:
    """I12: a client was told of an end only as the log has it, and with the whole text."""
    for history in evidence.histories:
        for connection in history.connections:
            if not connection.done and connection.finish_reason is None:
                continue
            task = evidence.tasks.get(connection.task_id or "")
            last = task.last if task is not None else None
            if task is None or last is None:
                yield Broken("I12", history.task_id or "", "an end was told that is not in the log")
            elif connection.finish_reason != last.body.get("finish_reason"):
                what = f"told {connection.finish_reason}, the log says {last.data[:80]}"
                yield Broken("I12", task.id, what)
            elif connection.finish_reason and not task.text.endswith(connection.text):
                yield Broken("I12", task.id, "a finished answer lacks text")
            elif connection.finish_reason and not connection.after and connection.text != task.text:
                yield Broken("I12", task.id, "a finished answer is not the whole text")


def nothing_is_left(evidence: Evidence) -> Iterator[Broken]:
    """I13: at rest, nothing waits, runs, or is subscribed to any more."""
    for what in evidence.unrest:
        yield Broken("I13", "", what)


def unlucky(evidence: Evidence) -> list[TaskRecord]:
    """Tasks that harm nobody and yet were lost too often in a row without a token in between.

    With a worker a second dying, that happens to a few; nothing that Redis can see tells them from
    poison. Whoever has a token to show since the last loss is none of them.
    """
    found: list[TaskRecord] = []
    for task in evidence.tasks.values():
        history = evidence.asked_by(task)
        if task.state != "failed" or history is None or history.prompt.poison:
            continue
        fruitful = max((entry.attempt for entry in task.log if not entry.event.terminal), default=0)
        fruitless = int(task.fields["attempt"]) - fruitful
        lost = evidence.dead.get(task.id) == [evidence.max_attempts]
        if lost and fruitless >= evidence.max_attempts - 1:
            found.append(task)
    return found


def poison_ends_alone(evidence: Evidence) -> Iterator[Broken]:
    """I14: a poison task fails after so many losses; others do not, or were lost as often."""
    excused = unlucky(evidence)
    if len(excused) > UNLUCKY_SHARE * len(evidence.tasks):
        yield Broken("I14", "", f"{len(excused)} of {len(evidence.tasks)} tasks were given up")
    for task in evidence.tasks.values():
        history = evidence.asked_by(task)
        poison = history is not None and history.prompt.poison
        code = task.last.body["error"]["code"] if task.state == "failed" and task.last else None
        if poison and code != "max_attempts":
            yield Broken("I14", task.id, f"poison that ended {task.state} with {code}")
        elif poison and evidence.dead.get(task.id) != [evidence.max_attempts]:
            yield Broken("I14", task.id, f"dead letters: {evidence.dead.get(task.id)}")
        elif not poison and code is not None and task not in excused:
            yield Broken("I14", task.id, f"failed with {code}, though it is no poison")


def the_fleet_heals(evidence: Evidence) -> Iterator[Broken]:
    """I16: first tokens come as fast as before, without anyone's doing."""
    if evidence.healed_after_s is None:
        yield Broken("I16", "", "first tokens are slower than before the faults")


def signs_are_true(evidence: Evidence) -> Iterator[Broken]:
    """I17: pods say they are ready, answers are as documented, logs are calm, ends are ours."""
    for name in evidence.unready:
        yield Broken("I17", "", f"{name} does not say that it is ready")
    for history in evidence.histories:
        for trouble in history.troubles:
            yield Broken("I17", history.task_id or "", trouble)
    for name, rate in evidence.log_rates.items():
        if rate > LOG_LINES_PER_S:
            yield Broken("I17", "", f"{name} logged {rate:g} lines a second")
    by_us = {-9: evidence.struck[Fault.KILL_WORKER], 0: evidence.struck[Fault.DRAIN_WORKER]}
    for code, count in evidence.ends.items():
        if count > by_us.get(code, 0) and not (code == CRASHED and evidence.struck[Fault.POISON]):
            yield Broken(
                "I17", "", f"{count} workers ended with {code}, {by_us.get(code, 0)} by us"
            )


INVARIANTS: tuple[Callable[[Evidence], Iterator[Broken]], ...] = (
    logs_are_contiguous,
    readers_miss_nothing,
    shown_text_stays,
    one_end_comes_last,
    attempts_never_go_back,
    accepted_is_accounted,
    stops_hold,
    usage_is_exact,
    usage_is_counted_once,
    canaries_stay_at_home,
    texts_are_undisturbed,
    ends_are_true,
    nothing_is_left,
    poison_ends_alone,
    the_fleet_heals,
    signs_are_true,
)


def judge(evidence: Evidence) -> list[Broken]:
    """All promises that did not hold."""
    return [broken for invariant in INVARIANTS for broken in invariant(evidence)]


def missed(struck: Counter[Fault]) -> list[Fault]:
    """Faults that never hit: a run without them proves nothing of them."""
    return [fault for fault in Fault if not struck[fault]]
