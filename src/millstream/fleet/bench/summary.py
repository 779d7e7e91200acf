"""The figures of a run, under the names of vLLM's `bench serve`, so that tools read both."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from millstream.fleet.bench.request import Outcome

PERCENTILES = (50, 90, 99)
_METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def summarize(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """Rates over `duration` seconds, latencies in milliseconds, errors by kind."""
    done = [outcome for outcome in outcomes if not outcome.error]
    output = sum(outcome.output_tokens for outcome in done)
    prompt = sum(outcome.prompt_tokens for outcome in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_concurrent_requests": _most_at_once(outcomes),
    }
    samples = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [outcome.tpot for outcome in done if outcome.tpot is not None],
        "itl": [gap for outcome in done for gap in outcome.itl],
        "e2el": [outcome.e2el for outcome in done],
    }
    for name, seconds in samples.items():
        figures |= _spread(name, sorted(1000 * value for value in seconds))
    return figures


def _spread(name: str, sorted_ms: list[float]) -> dict[str, float | None]:
    if not sorted_ms:
        rows: dict[str, float | None] = {f"mean_{name}_ms": None}
        return rows | {f"p{percentile}_{name}_ms": None for percentile in PERCENTILES}
    mean = math.fsum(sorted_ms) / len(sorted_ms)
    return {
        f"mean_{name}_ms": mean,
        **{f"p{at}_{name}_ms": percentile(sorted_ms, at) for at in PERCENTILES},
        f"max_{name}_ms": sorted_ms[-1],
    }


def percentile(ordered: Sequence[float], at: float) -> float:
    """The value under which `at` per cent of them lie, between neighbours by a straight line."""
    place = (len(ordered) - 1) * at / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    steps = sorted([(o.began, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def table(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    lines = [
        f"Requests           {figures['completed']} completed, {figures['failed']} failed "
        f"in {figures['duration']:.1f} s, at most {figures['max_concurrent_requests']} at once",
        f"Throughput         {figures['request_throughput']:.2f} requests/s, "
        f"{figures['output_throughput']:.1f} output tokens/s, "
        f"{figures['total_token_throughput']:.1f} tokens/s in all",
        f"Tokens             {figures['total_input_tokens']} in, "
        f"{figures['total_output_tokens']} out",
    ]
    lines += [f"Error              {kind}: {count}" for kind, count in figures["errors"].items()]
    head = f"{'ms':42}{'mean':>10}" + "".join(f"{'p' + str(at):>10}" for at in PERCENTILES)
    lines += ["", head]
    for name, title in _METRICS.items():
        keys = [f"mean_{name}_ms", *(f"p{at}_{name}_ms" for at in PERCENTILES)]
        lines.append(f"{title:42}" + "".join(_cell(figures[key]) for key in keys))
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>10.1f}"
