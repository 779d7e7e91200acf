"""The targets, and where the figures of a run say how far they are met: one table of all."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """A figure, and what it is to be.

    Args:
        what: What is measured.
        unit: Its unit, as it is printed after numbers.
        where: The benchmark, and the case in it.
        figure: Its name there.
        most: At most so much; or
        least: at least so much. Neither: it is told for what it tells.
        peers: The cases in which peers do the same, where they have other names.
        rival: The peer that the target was set by, and its figure on that day's machine.
    """

    what: str
    unit: str
    where: tuple[str, str]
    figure: str
    most: float | None = None
    least: float | None = None
    peers: tuple[str, ...] = ()
    rival: tuple[str, float] | None = None

    @property
    def bound(self) -> str:
        """The target as it is printed."""
        if self.most is not None:
            return f"≤ {number(self.most)}{self.unit}"
        return f"≥ {number(self.least)}{self.unit}" if self.least is not None else ""

    def met(self, value: float) -> bool:
        """Whether a figure is as it is to be."""
        if self.most is not None:
            return value <= self.most
        return self.least is None or value >= self.least

    def against(self, value: float, peers: Mapping[str, float]) -> dict[str, Any] | None:
        """The figure over the rival's of the same run, which is the target on another machine."""
        bound = self.most if self.most is not None else self.least
        if self.rival is None or bound is None:
            return None
        name, then = self.rival
        for peer, figure in peers.items():
            if peer.startswith(name):
                ratio = value / figure
                return {
                    "rival": name, "ratio": ratio, "target": bound / then,
                    "met": self.met(ratio * then),
                }  # fmt: skip
        return None


TARGETS = (
    Target("first token, added by queue and relay, p50", " ms", ("ttft", "first token"),
           "added_p50_ms", most=0.6, rival=("smg", 0.34)),
    Target("the same, p99", " ms", ("ttft", "first token"), "added_p99_ms", most=1.0,
           rival=("smg", 0.41)),
    Target("first token of those that come 1 ms apart, p50", " ms", ("ttft", "apart"),
           "added_p50_ms"),
    Target("the same, p99", " ms", ("ttft", "apart"), "added_p99_ms"),
    Target("submits a core-second of a pod", "", ("ttft", "submit"), "submits_per_core_s"),
    Target("tokens a core-second of a pod, in step", "", ("relay", "in step, 200"),
           "tokens_per_core_s", least=120_000, peers=("in step", "flood"), rival=("smg", 165_000)),
    Target("the same, 8 behind", "", ("relay", "8 behind, 200"), "tokens_per_core_s",
           least=400_000, peers=("flood",), rival=("smg", 165_000)),
    Target("the same, flooded", "", ("relay", "flood, 200"), "tokens_per_core_s", peers=("flood",)),
    Target("publish to client, 100 x 30 tokens/s, p50", " ms", ("relay", "paced, 100 x 30/s"),
           "p50_ms", most=0.2, peers=("paced",), rival=("smg", 0.22)),
    Target("the same, p99", " ms", ("relay", "paced, 100 x 30/s"), "p99_ms", most=0.4,
           peers=("paced",), rival=("smg", 0.47)),
    Target("pod's CPU a token, 100 x 30 tokens/s", " µs", ("relay", "paced, 100 x 30/s"),
           "pod_us_per_token", peers=("paced",)),
    Target("memory of 1,000 task streams that wait", " MB", ("relay", "idle tasks"),
           "mb_per_1000", most=15, peers=("idle tasks",), rival=("a subscription each", 61)),
    Target("the same, chats", " MB", ("relay", "idle chats"), "mb_per_1000", peers=("idle chats",)),
    Target("Valkey, of a core at 10,000 tokens/s, in step", " %", ("relay", "in step, 200"),
           "valkey_percent_at_10k", most=5.5, peers=("in step",)),
    Target("the same, 8 behind", " %", ("relay", "8 behind, 200"), "valkey_percent_at_10k",
           most=5.5),
    Target("worker's own CPU a token, 16 streams", " µs", ("worker_cost", "16 streams"),
           "us_per_token", most=5, rival=("redis-py", 14)),
    Target("tokens/s over the engine's own, 16 streams", "", ("fleet_over_engine", "16 streams"),
           "ratio", least=0.97),
    Target("tokens/s, one stream", "", ("fleet_over_engine", "1 streams"), "tokens_per_s"),
    Target("the same, 16 streams", "", ("fleet_over_engine", "16 streams"), "tokens_per_s"),
    Target("the same, 32 streams", "", ("fleet_over_engine", "32 streams"), "tokens_per_s"),
    Target("first token of 16 at once, p50", " ms", ("fleet_over_engine", "16 streams"),
           "ttft_ms"),
    Target("first token after 1,000 of a prompt", " ms", ("prefill", "1,000 tokens alone"),
           "ttft_ms"),
    Target("the same, a prompt seen before, over a new one", "",
           ("prefill", "1,000 tokens seen before"), "of_new"),
    Target("time between tokens of 16 streams meanwhile", " ms",
           ("prefill", "1,000 tokens beside"), "itl_ms"),
    Target("tokens/s all sampled, over all greedy", "", ("sampling_cost", "sampled"),
           "of_greedy", least=0.95),
    Target("gap at kill -9 of a worker: lease 2 s, sweep, prefill", " s", ("gaps", "kill -9"),
           "gap_s", most=3.25),
    Target("gap at SIGTERM of a worker", " s", ("gaps", "SIGTERM"), "gap_s", most=1.0),
    Target("store's CPU a token, 100 workers over that of 1", "", ("scale", "workers"), "ratio",
           most=1.1),
    Target("the same, 10,000 open streams over that of 160", "", ("scale", "open streams"),
           "ratio", most=1.1),
    Target("the same, 16 shards over that of 1", "", ("scale", "shards"), "ratio", most=1.1),
    Target("pod's CPU a token, 200 of 10,000 streams over 200", "", ("relay", "of many"),
           "ratio", most=1.1),
    Target("a flooded fleet: the light caller's share of tokens", "", ("fair_queue", "10"),
           "share"),
    Target("millstream --help", " s", ("startup", "millstream --help"), "wall_s", most=0.2),
    Target("import of the API", " s", ("startup", "import the API"), "wall_s", most=0.6),
    Target("`up`, warm, to the first token", " s", ("startup", "first token"), "wall_s", most=8),
)  # fmt: skip


def number(value: float) -> str:
    """As people write it: three digits that count, thousands apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each benchmark that has left some: who, case, figures."""
    told: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        whole = json.loads(path.read_text("utf-8"))
        if "rows" in whole:
            told[path.stem] = whole["rows"]
    return told


def figures_of(target: Target, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Who has which figure."""
    found: dict[str, float] = {}
    for row in rows:
        ours = row["who"] == "millstream"
        cases = (target.where[1],) if ours or not target.peers else target.peers
        if row["case"].startswith(cases) and target.figure in row["figures"]:
            found[row["who"]] = row["figures"][target.figure]
    return found


def joint(told: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """All targets, with the figures that there are."""
    rows: list[dict[str, Any]] = []
    for target in TARGETS:
        found = figures_of(target, told.get(target.where[0], ()))
        ours = found.pop("millstream", None)
        rows.append(
            {
                "what": target.what, "unit": target.unit, "target": target.bound,
                "millstream": ours, "peers": found,
                "met": None if ours is None or not target.bound else target.met(ours),
                "against": None if ours is None else target.against(ours, found),
            }
        )  # fmt: skip
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same in Markdown."""
    peers = sorted({who for row in rows for who in row["peers"]})
    lines = [
        "| what | target | Millstream | over its peer (target) | "
        + "".join(f"{peer} | " for peer in peers),
        "| --- " * (4 + len(peers)) + "|",
    ]
    for row in rows:
        if row["millstream"] is None:
            continue
        missed = ": not met" if row["met"] is False else ""
        ours = f"{number(row['millstream'])}{row['unit']}{missed}"
        ratio = ""
        if (against := row["against"]) is not None:
            missed = "" if against["met"] else ": not met"
            ratio, bound = number(against["ratio"]), number(against["target"])
            ratio = f"{ratio} of {against['rival']} ({bound}){missed}"
        others = [number(row["peers"][peer]) if peer in row["peers"] else "" for peer in peers]
        lines.append(" | ".join([f"| {row['what']}", row["target"], ours, ratio, *others]) + " |")
    if without := sum(row["millstream"] is None for row in rows):
        why = "what measures them failed or was left out, as by `--quick`; `make bench` runs all"
        lines.append(f"\n{without} of {len(rows)} rows are not here: {why}.")
    return "\n".join(line.rstrip() for line in lines)
