"""A subscription on a real Valkey: what it hears, and what becomes of it when it cannot."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import NoPermissionError
from tests.support.link import Way
from tests.support.store import Store
from tests.support.waiting import until

from millstream.fleet.chaos.link import Link
from millstream.shared import subscription as subscription_module
from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.subscription import Subscription

CHANNEL = Keys(0).pod("p")


class Ear:
    """A subscription that runs, and what it told, in order."""

    def __init__(self, url: str) -> None:
        self.told: list[bytes | str] = []
        self.subscription = Subscription(
            url,
            CHANNEL,
            on_open=lambda: self.told.append("open"),
            on_message=self._hear,
            on_pulse=lambda: self.told.append("pulse"),
        )
        self.running = asyncio.create_task(self.subscription.run())

    def _hear(self, payload: bytes) -> None:
        if payload == b"bug":
            raise ValueError("on purpose")
        self.told.append(payload)

    async def opened(self, times: int = 1) -> None:
        await until(lambda: self.subscription.open and self.subscription.opened == times)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})


@pytest.fixture
async def scripts(store: Store) -> AsyncIterator[Scripts]:
    async with open_redis(store.url) as client:
        yield Scripts(client)


@pytest.fixture
async def ear(link: Link) -> AsyncIterator[Ear]:
    heard = Ear(link.url)
    yield heard
    await heard.end()


async def test_all_is_heard_once_and_in_order(ear: Ear, scripts: Scripts) -> None:
    """Also what comes in many pieces, and what comes with others in one."""
    await ear.opened()
    said = [b"%d " % number + number * 9_000 * b"x" for number in range(40)]
    await asyncio.gather(*(scripts.publish(CHANNEL, payload) for payload in said))
    await until(lambda: len(ear.told) == 41)
    assert ear.told[0] == "open"
    assert sorted(map(len, ear.told[1:])) == sorted(map(len, said))
    assert set(ear.told[1:]) == set(said)
    for payload in said:
        await scripts.publish(CHANNEL, payload)
    await until(lambda: len(ear.told) == 81)
    assert ear.told[41:] == said


async def test_a_lost_connection_is_made_again(ear: Ear, scripts: Scripts, link: Link) -> None:
    for times in (1, 2, 3):
        await ear.opened(times)
        await scripts.publish(CHANNEL, b"x")
        await until(lambda: ear.told[-1] == b"x")
        link.reset()
        await until(lambda: not ear.subscription.open)
    await ear.opened(4)
    assert ear.told == ["open", b"x", "open", b"x", "open", b"x", "open"]


async def test_one_that_is_given_up_is_made_again(ear: Ear, scripts: Scripts) -> None:
    await ear.opened()
    ear.subscription.drop()
    await ear.opened(2)
    await ear.subscription.prove(scripts.publish)
    await until(lambda: ear.told[-1] == "pulse")


async def test_one_whose_transport_tells_of_nothing_can_be_given_up(ear: Ear) -> None:
    await ear.opened()
    assert ear.subscription._line is not None
    ear.subscription._line._transport.set_protocol(asyncio.Protocol())
    ear.subscription.drop()
    await ear.opened(2)


async def test_one_that_never_opens_is_tried_again(
    link: Link, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "OPEN_S", 0.3)
    link.silence()
    ear = Ear(link.url)
    await until(lambda: way.made >= 2)
    assert not ear.subscription.open
    link.heal()
    await ear.opened()
    await ear.end()


async def test_what_is_refused_is_asked_for_again(
    store: Store, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "RECONNECT_MOST_S", 0.05)
    refused: list[BaseException] = []
    listen = Subscription._listen

    async def noting(self: Subscription, pool: object) -> None:
        try:
            await listen(self, pool)
        except NoPermissionError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(Subscription, "_listen", noting)
    client = scripts._client
    await client.execute_command("ACL", "SETUSER", "deaf", "on", ">x", "+@all")
    ear = Ear(store.url.replace("redis://", "redis://deaf:x@"))
    await until(lambda: len(refused) >= 2)
    assert not ear.subscription.open
    await client.execute_command("ACL", "SETUSER", "deaf", "allchannels")
    await ear.opened()
    await ear.end()


async def test_a_bug_of_who_listens_is_no_lost_connection(ear: Ear, scripts: Scripts) -> None:
    await ear.opened()
    await scripts.publish(CHANNEL, b"bug")
    with pytest.raises(ValueError, match="on purpose"):
        async with asyncio.timeout(5):
            await ear.running
    assert not ear.subscription.open
