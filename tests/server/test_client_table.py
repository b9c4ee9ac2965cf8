"""The table of clients in docs/server.md: every cell is a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import octavo

ROOT = Path(octavo.__file__).parents[1]
CLIENTS = ROOT / "tests" / "server" / "clients"


def test_each_cell_is_a_test() -> None:
    text = (ROOT / "docs" / "server.md").read_text()
    rows = re.findall(r"^\|[^|\n]*`(test_\w+\.py)`[^|\n]*\|(.*)\|$", text, re.MULTILINE)
    assert len(rows) >= 9
    for file, cells in rows:
        source = (CLIENTS / file).read_text()
        names = re.findall(r"`(test_\w+(?:\.py)?)`", cells)
        assert names, file
        for name in names:
            if name.endswith(".py"):
                assert (CLIENTS / name).exists(), name
            else:
                assert f"def {name}(" in source, f"{file}: {name}"
