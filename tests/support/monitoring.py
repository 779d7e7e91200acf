"""What the dashboard and the alert rules ask Prometheus for."""

import json
import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.support.exposition import Scrape
from tests.support.readme import ROOT

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
_DASHBOARD = ROOT / "deploy" / "grafana" / "millstream.json"
_SELECTOR = re.compile(r"\b((?:millstream|process)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def alerts(file: Path = ALERTS) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(file.read_text("utf-8"))["groups"]
    return group["rules"]


def panels() -> list[dict[str, Any]]:
    return json.loads(_DASHBOARD.read_text())["panels"]


def expressions() -> list[str]:
    """All that they ask, with the dashboard's variables filled in."""
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    filled = [text.replace("$model", ".*").replace("$__rate_interval", "1m") for text in asked]
    return filled + [rule["expr"] for rule in alerts()]


@dataclass(frozen=True, order=True)
class Selector:
    """A metric as an expression names it: `name{label="value"}`."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    """Label, operator, value; without those that a scrape does not have."""

    def __str__(self) -> str:
        inner = ",".join(f'{label}{how}"{value}"' for label, how, value in self.matchers)
        return f"{self.name}{{{inner}}}" if inner else self.name

    def value(self, scrape: Scrape) -> float | None:
        """The sum of what it selects; None where the process has no such metric."""
        family = re.sub("_(bucket|sum|count)$", "", self.name)
        if not {family, self.name} & scrape.families:
            return None
        found = [sample for sample in scrape.samples if sample.name == self.name]
        return sum(sample.value for sample in found if self._takes(sample.labels))

    def _takes(self, labels: dict[str, str]) -> bool:
        return all(_match(how, labels.get(label, ""), value) for label, how, value in self.matchers)


def _match(how: str, found: str, value: str) -> bool:
    if how.endswith("~"):
        return (re.fullmatch(value, found) is not None) == (how == "=~")
    return (operator.eq if how == "=" else operator.ne)(found, value)


def selectors(text: str) -> set[Selector]:
    """All that an expression selects of a process of ours."""
    return {
        Selector(
            name,
            tuple(
                found for found in _MATCHER.findall(inner) if found[0] not in ("job", "instance")
            ),
        )
        for name, inner in _SELECTOR.findall(text)
    }
