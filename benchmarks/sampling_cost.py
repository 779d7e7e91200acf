"""What the sampling parameters cost: the bundled model in this process, 16 streams.

    python -m benchmarks.sampling_cost [--ways greedy sampled] [--json FILE]

All ways are measured in turns. `of_greedy` is the median, over the rounds, of the tokens/s of a way
over those of greedy decoding in the same round; CPU time per token is steadier on a busy machine.
"""

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.support.alone import Alone, Stories
from benchmarks.support.report import Row, finish

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "greedy, penalties": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "greedy, 1,024 biases": {"logit_bias": dict.fromkeys(range(1024), 1.0)},
    "sampled, min_p": {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
    "greedy, 20 logprobs": {"logprobs": 20},
}


async def run(options: argparse.Namespace) -> list[Row]:
    """All ways in turns."""
    told: dict[str, list[Stories]] = {way: [] for way in options.ways}
    async with Alone(dtype=options.dtype) as alone:
        await alone.stories(options.streams, 4)
        for at in range(options.rounds):
            # Who is first in a round finds the machine as another left it: each is, in its turn.
            ways = list(told)
            for way in ways[at % len(ways) :] + ways[: at % len(ways)]:
                stories = await alone.stories(options.streams, options.tokens, **WAYS[way])
                told[way].append(stories)
    rows: list[Row] = []
    for way, rounds in told.items():
        figures = {
            "tokens_per_s": statistics.median(each.tokens_per_s for each in rounds),
            "cpu_ms_per_token": statistics.median(each.cpu_ms_per_token for each in rounds),
        }
        if "greedy" in told:
            pairs = zip(rounds, told["greedy"], strict=True)
            figures["of_greedy"] = statistics.median(
                each.tokens_per_s / greedy.tokens_per_s for each, greedy in pairs
            )
        rows.append(Row("millstream", f"{way}, {options.streams} streams", figures))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--dtype", default="auto", help="as MILLSTREAM_DTYPE")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("sampling_cost", asyncio.run(run(options)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
