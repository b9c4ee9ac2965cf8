"""A machine on which computing takes longer than whatever KV takes to come, as far as is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.cost.this_machine import this_machine


@contextmanager
def slow_computing(home: Path) -> Iterator[None]:
    """Have this process, and those that it starts, find the rates of such a machine in ``home``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_HOME", str(home))
        this_machine()
        file = home / "machine.json"
        known = json.loads(file.read_text())
        rates = {name: value / 1e5 for name, value in known.items() if name.endswith("_per_s")}
        file.write_text(json.dumps({**known, **rates}))
        yield
