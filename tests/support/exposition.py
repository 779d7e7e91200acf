"""Metrics as a scraper reads them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_PART = re.compile("_(bucket|sum|count)$")


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one process told at one moment."""

    text: str
    samples: list[Sample]

    @classmethod
    def of(cls, text: str) -> "Scrape":
        families = text_string_to_metric_families(text)
        return cls(text, [sample for family in families for sample in family.samples])

    def matching(self, name: str, **labels: str) -> Iterator[Sample]:
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample

    def value(self, name: str, **labels: str) -> float:
        """The sum of what has these labels, and maybe others; 0 where the metric has none such."""
        assert f"\n# TYPE millstream_{_PART.sub('', name)} " in self.text, f"no {name}"
        return sum(sample.value for sample in self.matching(f"millstream_{name}", **labels))

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}

    @property
    def families(self) -> set[str]:
        """As they are declared, a counter with its `_total`."""
        return {line.split()[2] for line in self.text.splitlines() if line.startswith("# TYPE")}


async def scrape(url: str) -> Scrape:
    """GET /metrics of a pod or a worker."""
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.get(f"{url}/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape.of(answer.text)
