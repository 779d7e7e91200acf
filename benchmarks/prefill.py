"""What a prompt of 1,000 tokens takes, alone, beside 16 streams, and with a beginning seen before.

    python -m benchmarks.prefill [--rounds 3] [--json FILE]

The bundled model in this process, without queue and relay. A prompt is new to the cache each time,
but for the shared beginning. `itl_ms` is the time between two tokens of those who have theirs
already: in the median before the prompt comes and while it is read, and at its longest.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Coroutine

from benchmarks.support.alone import PROMPTS, Alone
from benchmarks.support.report import Row, finish
from millstream.shared.schemas import Message

LENGTH = 1000
STREAMS = 16
SETTLED = 8  # tokens of each stream before and after the prompt comes


class Case:
    """Prompts of the wanted length, none like another."""

    def __init__(self, alone: Alone) -> None:
        self._alone = alone
        self._number = 0

    def text(self) -> str:
        """A new one."""
        self._number += 1
        words = " ".join(f"Mill {self._number} grinds sack {sack}." for sack in range(LENGTH))
        tokenizer = self._alone.engine.tokenizer
        return tokenizer.decode(tokenizer.encode(words)[:LENGTH])

    async def by_itself(self) -> dict[str, float]:
        """Nobody else is there."""
        heard = self._alone.ask(Message("user", self.text()), tokens=2)
        await heard.done.wait()
        return {"ttft_ms": heard.ttft_ms}

    async def beside_others(self) -> dict[str, float]:
        """The others go on with their answers meanwhile."""
        others = [
            self._alone.ask(Message("user", prompt), tokens=40) for prompt in PROMPTS[:STREAMS]
        ]
        for other in others:
            await other.reached(SETTLED)
        heard = self._alone.ask(Message("user", self.text()), tokens=2)
        await heard.reached(1)
        for other in others:
            await other.done.wait()
        before = [gap for other in others for gap in other.gaps_ms(other.times[1], heard.asked)]
        while_read = [gap for other in others for gap in other.gaps_ms(heard.asked, heard.times[0])]
        return {
            "ttft_ms": heard.ttft_ms,
            "itl_ms_before": statistics.median(before),
            "itl_ms": statistics.median(while_read),
            "itl_ms_longest": max(while_read),
        }

    async def shared(self) -> dict[str, float]:
        """A system prompt of that length: for the first caller, and for the next."""
        system = Message("system", self.text())
        first, second = [
            await self._after(system, question) for question in ("Who mills?", "What is milled?")
        ]
        return {"ttft_ms_new": first, "ttft_ms": second, "of_new": second / first}

    async def _after(self, system: Message, question: str) -> float:
        heard = self._alone.ask(system, Message("user", question), tokens=2)
        await heard.done.wait()
        return heard.ttft_ms


async def run(options: argparse.Namespace) -> list[Row]:
    """All cases in turns."""
    told: dict[str, list[dict[str, float]]] = {}
    async with Alone(dtype=options.dtype) as alone:
        case = Case(alone)
        cases: dict[str, Callable[[], Coroutine[None, None, dict[str, float]]]] = {
            f"{LENGTH:,} tokens alone": case.by_itself,
            f"{LENGTH:,} tokens beside {STREAMS} streams": case.beside_others,
            f"{LENGTH:,} tokens seen before": case.shared,
        }
        await alone.stories(STREAMS, 4)
        for _ in range(options.rounds):
            for name, measure in cases.items():
                told.setdefault(name, []).append(await measure())
    return [
        Row(
            "millstream",
            name,
            {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]},
        )
        for name, rounds in told.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", help="as MILLSTREAM_DTYPE")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("prefill", asyncio.run(run(options)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
