"""What the documents take from the code, and the code that they show.

`python -m tests.support.readme` (or `make docs`) writes the parts between `<!-- begin NAME -->` and
<!-- end NAME -->` anew; tests/unit/test_docs.py fails while a setting or a module is missing.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millstream.shared.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SETTINGS = ROOT / "docs" / "settings.md"
SOURCE = ROOT / "src" / "millstream"
ADDRESS = "http://localhost:8000"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    language: str
    text: str
    line: int
    """Of its first line of text, from 1."""

    @property
    def name(self) -> str:
        """What a test run calls it."""
        return f"{self.language}-line-{self.line}"


def blocks(markdown: str, *languages: str) -> list[Block]:
    """The fenced blocks of a document in some languages, in order."""
    fenced = re.finditer(r"^```(\w+)\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    return [
        Block(match[1], match[2], markdown.count("\n", 0, match.start()) + 2)
        for match in fenced
        if match[1] in languages
    ]


def table_rows(markdown: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its head."""
    after = markdown.split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert table is not None, f"no table after {heading}"
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code_spans(cell: str) -> list[str]:
    """What a cell has between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def settings_table() -> str:
    """Name, default and meaning of every setting."""
    lines = ["| name | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = field.default
        if field.default_factory is not None:  # it depends on others; the meaning says how
            default = field.get_default(
                call_default_factory=True,
                validated_data={"redis_url": Settings.model_fields["redis_url"].default},
            )
        default = f"{default:g}" if isinstance(default, float) else default
        default = str(default).lower() if isinstance(default, bool) else str(default)
        shown = f"`{default}`" if default else "none"
        lines.append(f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(lines)


def source_files(folder: str) -> list[Path]:
    """The modules and scripts that lie in a folder of the package itself, by name."""
    files = (SOURCE / folder).iterdir()
    return sorted(file for file in files if file.suffix in (".py", ".lua") and file.is_file())


def source_folders() -> list[str]:
    """The folders of the package that have modules or scripts."""
    folders = sorted(path for path in SOURCE.rglob("*") if path.is_dir())
    names = [str(path.relative_to(SOURCE)) for path in folders]
    return ["."] + [name for name in names if source_files(name)]


def module_table(folder: str) -> str:
    """Every file of a folder with what it says of itself first."""
    rows = [
        f"| `{file.name}` | {_job(file)} |"
        for file in source_files(folder)
        if file.name != "__init__.py"
    ]
    return "\n".join(["| file | its job |", "| --- | --- |", *rows])


def _job(file: Path) -> str:
    text = file.read_text("utf-8")
    if file.suffix == ".lua":
        comments = [line[3:] for line in text.splitlines() if line.startswith("-- ")]
        told = " ".join(comments)
        return told.partition(". ")[0].rstrip(".") + "."
    return " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())


def parts() -> Iterator[tuple[Path, str, Callable[[], str]]]:
    """All that is written from the code: in which file, under which name, and what."""
    yield SETTINGS, "settings", settings_table
    for folder in source_folders():
        yield (
            ROOT / "docs" / "architecture.md",
            f"modules {folder}",
            lambda folder=folder: module_table(folder),
        )


def part_of(markdown: str, name: str) -> str:
    """What a document has between the marks of a part."""
    found = _marks(name).search(markdown)
    assert found is not None, f"no place for {name!r}: put its two marks where it belongs"
    return found[2]


def with_part(markdown: str, name: str, body: str) -> str:
    """A document with one of its parts written anew."""
    part_of(markdown, name)  # tells where there is no place for it
    return _marks(name).sub(lambda found: f"{found[1]}{body}\n{found[3]}", markdown)


def _marks(name: str) -> re.Pattern[str]:
    begin, end = re.escape(f"<!-- begin {name} -->\n"), re.escape(f"<!-- end {name} -->")
    return re.compile(f"({begin})(.*?)({end})", re.DOTALL)


def main() -> None:
    """Write all parts anew."""
    for file, name, make in parts():
        before = file.read_text("utf-8")
        after = with_part(before, name, make())
        if after != before:
            file.write_text(after, "utf-8")
            sys.stdout.write(f"{file.relative_to(ROOT)}: {name}\n")


if __name__ == "__main__":
    main()
