"""Other people's scripts are those that were published."""

import hashlib
import re
from pathlib import Path

import millstream.api

VENDOR = Path(millstream.api.__file__).parent / "static" / "vendor"


def test_the_files_are_those_written_down() -> None:
    rows = re.findall(r"^\| (\S+) \| ([0-9a-f]{64}) \|$", (VENDOR / "README.md").read_text(), re.M)
    there = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert dict(rows) == there
