"""The table of layouts in docs/parallelism.md has what plans say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.planner import Traffic, plan

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
ROW = re.compile(r"^\| (?:`(\S+)` `(\S+)`)? ?\| `([^`]+)`[^|]* \| ([\d.,]+) \| ([\d.,]+) \|$", re.M)


def rows() -> Iterator[tuple[str, str, dict[str, int], str, str]]:
    model = hardware = ""
    for named, on, flags, alone, together in ROW.findall(PAGE.read_text("utf-8")):
        model, hardware = named or model, on or hardware
        degrees = {name: int(count) for name, count in re.findall(r"--(\w+) (\d+)", flags)}
        yield model, hardware, degrees, alone, together


def test_the_table_is_found():
    assert len(list(rows())) == 14


@pytest.mark.parametrize(("model", "hardware", "degrees", "alone", "together"), list(rows()))
def test_a_layout_does_what_its_row_says(model, hardware, degrees, alone, together):
    def service(concurrency: int):
        found = plan(model, hardware, Traffic(1000, 200, concurrency=concurrency), **degrees)
        assert found.service is not None
        return found.service

    assert f"{1e3 * service(1).latency().tpot.value:.1f}" == alone
    assert f"{200 * service(64).requests_per_second.value:,.0f}" == together
