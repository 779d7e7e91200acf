"""Flag does what asyncio.Event does."""

import asyncio

import pytest

from millstream.api.flag import Flag


@pytest.mark.parametrize("kind", [Flag, asyncio.Event])
async def test_wakes_all_who_wait_and_holds_nobody_up_while_set(
    kind: type[Flag] | type[asyncio.Event],
) -> None:
    flag = kind()
    waiting = [asyncio.create_task(flag.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not flag.is_set()
    waiting[1].cancel()
    flag.set()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [False, True, False]
    assert done[0] is True
    assert await flag.wait()
    flag.clear()
    late = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    assert not late.done()
    flag.set()
    flag.clear()  # who waited at the set is woken nevertheless
    assert await late


def test_one_may_be_set_from_the_first() -> None:
    assert Flag(is_set=True).is_set()
    assert not Flag().is_set()
