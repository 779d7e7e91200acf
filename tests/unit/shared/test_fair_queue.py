"""The fair queue, simulated: the real scripts on a real Valkey, with workers that take no time.

Each step every running task makes some tokens; a slot that comes free is claimed at once.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from millstream.shared.keys import LEVELS, Keys
from millstream.shared.scripts import Scripts
from millstream.shared.states import Priority
from millstream.shared.steps import AppendRow, Claim, Submitted

SHARD = Keys(0)
CHUNK = 16  # tokens of a step


@dataclass
class Simulation:
    """A worker with some slots, and who was served how much and when."""

    scripts: Scripts
    slots: int
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of each task's answer."""
    caller: dict[str, str] = field(default_factory=dict)
    running: dict[str, tuple[Claim, int]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    """Made for each caller."""
    started: list[str] = field(default_factory=list)
    """Ids, in the order of their starts."""
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def submit(
        self,
        caller: str,
        length: int = CHUNK,
        priority: Priority = Priority.INTERACTIVE,
        weight: float = 1,
    ) -> str:
        task_id = f"t0-{next(self.numbers):06d}"
        answer = await self.scripts.submit(
            SHARD, task_id=task_id, model="m", caller=caller, request=b"{}", max_queue=100_000,
            live_ttl_s=1000, priority=priority, weight=weight,
        )  # fmt: skip
        assert isinstance(answer, Submitted)
        self.lengths[task_id], self.caller[task_id] = length, caller
        return task_id

    async def claim(self) -> None:
        if len(self.running) < self.slots:
            claims, _ = await self.scripts.claim(
                SHARD, worker="w", model="m", free=self.slots - len(self.running),
                running=len(self.running), lease_s=600, max_attempts=3, live_ttl_s=1000,
                result_ttl_s=10, max_task_s=1000, sweep=False,
            )  # fmt: skip
            for claim in claims:
                self.running[claim.task_id] = (claim, 0)
                self.started.append(claim.task_id)

    async def step(self) -> list[str]:
        """One step of all that run; the ids of those that ended by it."""
        await self.claim()
        rows: list[AppendRow] = []
        ended: list[str] = []
        for task_id, (claim, made) in self.running.items():
            count = min(CHUNK, self.lengths[task_id] - made)
            self.tokens[self.caller[task_id]] += count
            self.running[task_id] = (claim, made + count)
            over = made + count == self.lengths[task_id]
            ended += [task_id] * over
            # One event may carry many tokens, and takes the time of one.
            event = (",".join(["1"] * count), '"x"')
            ends = ("completed", "length") if over else ("", "")
            rows.append(AppendRow(task_id, claim.attempt, 2, made // CHUNK + 1, [event], *ends))
        for task_id in ended:
            del self.running[task_id]
        await self.scripts.append(SHARD, worker="w", model="m", result_ttl_s=10, rows=rows)
        return ended

    async def finish(self) -> None:
        """Until nobody waits and nothing runs."""
        await self.claim()
        while self.running:
            await self.step()
            await self.claim()

    def places(self, caller: str) -> list[int]:
        """At which starts a caller's tasks were."""
        return [at for at, task_id in enumerate(self.started) if self.caller[task_id] == caller]


@pytest.mark.parametrize("lengths", [(64, 64), (320, 32), (32, 320)])
async def test_two_callers_get_the_same_tokens_whatever_they_ask(
    scripts: Scripts, lengths: tuple[int, int]
) -> None:
    """At 10:1 clients, and with answers ten times as long as the other's."""
    fleet = Simulation(scripts, slots=8)
    for _ in range(100):
        await fleet.submit("heavy", lengths[0])
    for _ in range(10):
        await fleet.submit("light", lengths[1])
    for number in range(200):
        if number == 40:
            fleet.tokens.clear()
        for task_id in await fleet.step():  # each client sends its next when it has its answer
            caller = fleet.caller[task_id]
            await fleet.submit(caller, lengths[caller == "light"])
    heavy, light = fleet.tokens["heavy"], fleet.tokens["light"]
    assert abs(heavy - light) < 0.1 * (heavy + light) / 2


async def test_shares_follow_weights(scripts: Scripts) -> None:
    fleet = Simulation(scripts, slots=4)
    for number in range(200):
        for caller, weight in (("three", 3), ("one", 1)):
            if number < 40:
                await fleet.submit(caller, 64, weight=weight)
                await fleet.submit(caller, 64, weight=weight)
    for _ in range(100):
        await fleet.step()
    assert 2.6 < fleet.tokens["three"] / fleet.tokens["one"] < 3.4


async def test_a_thousand_of_one_delay_one_of_another_by_one_round(scripts: Scripts) -> None:
    fleet = Simulation(scripts, slots=4)
    for _ in range(1000):
        await fleet.submit("heavy", 64)
    for _ in range(40):
        await fleet.step()
    before = len(fleet.started)
    answer = await scripts.submit(
        SHARD, task_id="t0-light", model="m", caller="light", request=b"{}", max_queue=9999,
        live_ttl_s=100,
    )  # fmt: skip
    fleet.lengths["t0-light"], fleet.caller["t0-light"] = 64, "light"
    assert isinstance(answer, Submitted)
    assert answer.position <= 2
    while "t0-light" not in fleet.started:
        await fleet.step()
    assert fleet.started.index("t0-light") <= before + 1


async def test_who_asked_for_nothing_has_saved_nothing(scripts: Scripts) -> None:
    fleet = Simulation(scripts, slots=2)
    await fleet.submit("idle", 16)  # and then nothing for long
    for _ in range(100):
        await fleet.submit("busy", 64)
    for _ in range(100):
        await fleet.step()
    assert fleet.tokens["busy"] > 3000
    for _ in range(50):
        await fleet.submit("idle", 64)
    before = len(fleet.started)
    for _ in range(40):
        await fleet.step()
    first = [fleet.caller[task_id] for task_id in fleet.started[before : before + 12]]
    assert 4 <= first.count("busy") <= 8


async def test_ever_new_callers_starve_nobody(scripts: Scripts) -> None:
    """Each is new and has one task, and they fill the fleet; one who has more is served as well."""
    fleet = Simulation(scripts, slots=2)
    for number in range(20):
        await fleet.submit(f"first {number}")
    for _ in range(30):
        await fleet.submit("steady")
    for number in range(200):
        await fleet.submit(f"new {number}")
        await fleet.submit(f"newer {number}")
        await fleet.step()
    at = fleet.places("steady")
    assert len(at) >= 8
    assert max(after - before for before, after in itertools.pairwise(at)) < 60
    # And among the new ones none is passed by those who came much later.
    new = [int(fleet.caller[t].split()[1]) for t in fleet.started if fleet.caller[t][:3] == "new"]
    assert all(number >= max(new[:place]) - 20 for place, number in enumerate(new) if place)


async def test_batch_gets_its_share_and_no_more(scripts: Scripts) -> None:
    fleet = Simulation(scripts, slots=4)
    for _ in range(100):
        await fleet.submit("person", 64)
        await fleet.submit("nightly", 64, Priority.BATCH)
    for _ in range(70):
        for task_id in await fleet.step():
            if fleet.caller[task_id] == "person":
                await fleet.submit("person", 64)
    assert 6 < fleet.tokens["person"] / fleet.tokens["nightly"] < 10.5
    await fleet.finish()  # nobody comes any more
    assert fleet.tokens["nightly"] == 100 * 64


async def test_batch_alone_has_saved_nothing_against_people(scripts: Scripts) -> None:
    fleet = Simulation(scripts, slots=1)
    for _ in range(30):
        await fleet.submit("nightly", 64, Priority.BATCH)
    for _ in range(60):
        await fleet.step()
    before = len(fleet.started)
    person = [await fleet.submit("person", 64) for _ in range(4)]
    for _ in range(24):
        await fleet.step()
    assert fleet.started[before : before + 4] == person
    assert fleet.started[before + 4 :]


async def test_ten_thousand_callers_leave_little(scripts: Scripts) -> None:
    """Counters that say nothing go; those of who waits no more have a bound."""
    client = scripts.runner.client
    fleet = Simulation(scripts, slots=64)
    seeded = random.Random(7)
    for number in range(1000):
        await fleet.submit(f"caller {seeded.randrange(10_000)}")
        if number % 40 == 39:
            await fleet.step()
    assert await client.zcard(SHARD.spent("interactive", "m")) <= 200
    await fleet.finish()
    assert len(fleet.started) == 1000
    for level in LEVELS:
        assert await client.exists(SHARD.turns(level, "m")) == 0
        assert await client.zcard(SHARD.spent(level, "m")) <= 100
