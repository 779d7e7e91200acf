"""The documents against the code: what they list is what there is."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from tests.support.readme import (
    README,
    ROOT,
    SETTINGS,
    code_spans,
    module_table,
    part_of,
    settings_table,
    source_folders,
    table_rows,
    with_part,
)

from millstream.shared.settings import PREFIX, Settings
from millstream.worker.engines.fake_script import Directive

DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
AUDIT = (DOCS / "bug-audit.md").read_text("utf-8")
TESTING = (DOCS / "testing.md").read_text("utf-8")
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
DECISIONS = sorted((DOCS / "adr").glob("*.md"))


# What is written from the code.


def test_the_settings_are_those_of_the_code() -> None:
    text = SETTINGS.read_text("utf-8")
    assert text == with_part(text, "settings", settings_table()), "run `make docs`"


@pytest.mark.parametrize("folder", source_folders())
def test_every_module_is_named(folder: str) -> None:
    # Not its sentence: who mends a docstring need not think of this page at once.
    named, there = (
        re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE)
        for table in (part_of(ARCHITECTURE, f"modules {folder}"), module_table(folder))
    )
    assert named == there, "run `make docs`"


def test_every_folder_of_the_package_has_its_place() -> None:
    places = re.findall(r"<!-- begin modules (\S+) -->", ARCHITECTURE)
    assert sorted(places) == sorted(source_folders())


# README.md


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            assert goal.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(goal), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_settings_named_without_their_prefix_exist() -> None:
    known = {name.upper() for name in Settings.model_fields}
    known |= {PREFIX + name for name in known}
    others = {
        "STOP_GRACE_PERIOD",
        "PUBLISH_ADDRESS",
        "PYTEST_ARGS",
        "PIP_ARGS",
        "HF_TOKEN",
        "STARTING",
    }
    for page in (README, DOCS / "api.md", DOCS / "protocol.md", DOCS / "architecture.md"):
        spans = set(re.findall(r"`([A-Z][A-Z_]*_[A-Z]+)`", page.read_text("utf-8")))
        assert spans <= known | others, page.name


# architecture.md


def test_decisions_are_numbered_and_listed() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert len(set(numbers)) == len(numbers)
    for number, page in zip(numbers, DECISIONS, strict=True):
        text = page.read_text("utf-8")
        assert text.startswith(f"# {number}. "), page.name
        assert "\n## Context\n" in text, page.name
        assert "\n## Decision\n" in text, page.name
        assert len(text.split()) < 600, f"{page.name} is longer than a page"
        assert f"](adr/{page.name})" in ARCHITECTURE, page.name


# bug-audit.md


def test_every_bug_of_the_list_has_its_line() -> None:
    (numbers,) = re.findall(r"numbers are those of .*?: ([\d, \-\n]+)\.", AUDIT)
    listed: list[int] = []
    for part in numbers.split(","):
        first, _, last = part.strip().partition("-")
        listed += range(int(first), int(last or first) + 1)
    rows = re.findall(r"^\| B(\d+) \| .+ \| (.+) \|$", AUDIT, re.MULTILINE)
    assert [int(number) for number, _ in rows] == listed
    missing: list[str] = []
    for number, here in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", here)
        assert tests or "not built yet: issue" in here, f"B{number} has no test"
        for file, name in tests:
            path = ROOT / "tests" / file
            text = path.read_text("utf-8") if path.exists() else ""
            if not re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE):
                missing.append(f"B{number}: {file}::{name}")
    assert not missing


# testing.md


def test_the_directives_are_those_of_the_fake_engine() -> None:
    described = {code_spans(row[0])[0] for row in table_rows(TESTING, "## The fake engine")}
    assert described == {field.encode_name for field in msgspec.structs.fields(Directive)}


def test_the_markers_are_those_of_pytest() -> None:
    described = [code_spans(row[0])[0] for row in table_rows(TESTING, "### Markers")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    markers = project["tool"]["pytest"]["ini_options"]["markers"]
    assert described == [marker.partition(":")[0] for marker in markers]
