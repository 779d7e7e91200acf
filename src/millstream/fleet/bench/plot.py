"""A page with the run's curves: plain HTML and SVG, no script, nothing loaded from elsewhere."""

import html
import json
from collections.abc import Sequence
from typing import Any

from millstream.fleet.bench.request import Outcome
from millstream.fleet.bench.summary import table

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 220, 60, 28
_MOST_POINTS = 4000


def page(
    outcomes: Sequence[Outcome], figures: dict[str, Any], setup: dict[str, Any], start: float
) -> str:
    """The figures, tokens per second over time, and each request's TTFT and end."""
    done = [outcome for outcome in outcomes if not outcome.error]
    per_second: dict[int, int] = {}
    for outcome in done:
        for at in outcome.chunks:
            per_second[int(at - start)] = per_second.get(int(at - start), 0) + 1
    speed = [
        (float(second), float(per_second.get(second, 0)))
        for second in range(int(figures["duration"]) + 1)
    ]
    gaps = sorted(1000 * gap for outcome in done for gap in outcome.itl)
    step = max(1, len(gaps) // _MOST_POINTS)
    charts = [
        _chart("Pieces of text per second", "s", "1/s", [speed]),
        _chart(
            "Time to first token, by start",
            "s",
            "ms",
            [[(o.began - start, 1000 * o.ttft) for o in done]],
            dots=True,
        ),
        _chart(
            "Inter-token latency, share of gaps below",
            "%",
            "ms",
            [[(100 * at / len(gaps), gaps[at]) for at in range(0, len(gaps), step)]],
        ),
        _chart("Requests in flight", "s", "", [_in_flight(outcomes, start)]),
    ]
    return (
        "<!doctype html><meta charset=utf-8><title>millstream bench</title><style>"
        "body{font:15px system-ui;margin:2rem auto;max-width:1340px;padding:0 1rem}"
        "pre{background:#f4f6f8;padding:1rem;overflow-x:auto}figure{margin:0}"
        "div{display:flex;flex-wrap:wrap;gap:1rem}svg{border:1px solid #d5dbe1}"
        "</style><h1>millstream bench</h1>"
        f"<pre>{html.escape(table(figures))}</pre><div>{''.join(charts)}</div>"
        f"<h2>Setup</h2><pre>{html.escape(json.dumps(setup, indent=2))}</pre>"
    )


def _in_flight(outcomes: Sequence[Outcome], start: float) -> list[tuple[float, float]]:
    steps = sorted([(o.began, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])
    points, now = [(0.0, 0.0)], 0
    for at, change in steps:
        points.append((at - start, float(now)))
        now += change
        points.append((at - start, float(now)))
    return points


def _chart(
    title: str,
    x_unit: str,
    y_unit: str,
    lines: Sequence[Sequence[tuple[float, float]]],
    *,
    dots: bool = False,
) -> str:
    points = [point for line in lines for point in line]
    right = max((x for x, _ in points), default=1.0) or 1.0
    top = max((y for _, y in points), default=1.0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / right * (_WIDTH - _LEFT - 10),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _BOTTOM - 12),
        )

    marks: list[str] = []
    for line in lines:
        placed = [place(x, y) for x, y in line]
        if dots:
            marks += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#0b6b74"/>' for x, y in placed
            ]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            marks.append(f'<polyline points="{path}" fill="none" stroke="#0b6b74"/>')
    low = _HEIGHT - _BOTTOM
    axes = (
        f'<path d="M{_LEFT} 8V{low}H{_WIDTH - 8}" fill="none" stroke="#52606d"/>'
        f'<text x="{_LEFT - 6}" y="16" text-anchor="end">{top:.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{low}" text-anchor="end">0 {y_unit}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 8}" text-anchor="end">{right:.4g} {x_unit}</text>'
    )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" font-size="12">'
        f"{axes}{''.join(marks)}</svg></figure>"
    )
