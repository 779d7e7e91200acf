"""docker-compose.yml as Compose reads it: YAML, then variables; and the Dockerfiles it names."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|\{(?P<name>\w+)(?:(?P<kind>:?-)(?P<default>[^}]*))?\})"
)
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def interpolate(node: Any, variables: Mapping[str, str]) -> Any:
    """Put in variables: `${NAME}`, `${NAME-default}`, `${NAME:-default}` and `$$`."""

    def put_in(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        value = variables.get(match["name"])
        if value is None or (value == "" and match["kind"] == ":-"):
            assert match["kind"], f"{match[0]} has no default"
            return match["default"]
        return value

    if isinstance(node, str):
        return VARIABLE.sub(put_in, node)
    if isinstance(node, list):
        return [interpolate(item, variables) for item in node]
    if isinstance(node, dict):
        return {key: interpolate(value, variables) for key, value in node.items()}
    return node


def load(**variables: str) -> dict[str, Any]:
    """The file with its variables put in; those not given have their defaults."""
    return interpolate(yaml.safe_load(COMPOSE_FILE.read_text()), variables)


def used_variables() -> set[str]:
    """The names of all variables in the file."""
    text = re.sub(r"^\s*#.*$", "", COMPOSE_FILE.read_text(), flags=re.MULTILINE)
    return {match["name"] for match in VARIABLE.finditer(text) if match["name"]}


def seconds(duration: str) -> float:
    """A duration of Compose (`1m30s`) in seconds."""
    parts = re.findall(r"(\d+)(ms|[smh])", duration)
    assert "".join(number + unit for number, unit in parts) == duration
    return sum(int(number) * UNITS[unit] for number, unit in parts)


@dataclass
class Image:
    """What the last stage of a Dockerfile says."""

    instructions: list[tuple[str, str]]
    """All stages, continued lines joined."""
    environment: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    """Destination → source, of what comes from the repository."""

    @classmethod
    def read(cls, path: Path) -> "Image":
        text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
        lines = re.sub(r"\\\n\s*", " ", text).splitlines()
        image = cls(
            [(word, rest) for line in lines if line for word, _, rest in [line.partition(" ")]]
        )
        for word, rest in image.last_stage:
            if word == "ENV":
                image.environment.update(pair.split("=", 1) for pair in rest.split())
            if word == "COPY" and not rest.startswith("--from"):
                source, destination = rest.split()
                image.copies[destination] = source
        return image

    @property
    def last_stage(self) -> list[tuple[str, str]]:
        start = max(i for i, (word, _) in enumerate(self.instructions) if word == "FROM")
        return self.instructions[start:]

    def last(self, word: str) -> str:
        """What the last stage's last such instruction says."""
        return [rest for name, rest in self.last_stage if name == word][-1]

    @property
    def entrypoint(self) -> list[str]:
        return json.loads(self.last("ENTRYPOINT"))
