"""A scripted server in a process of its own, so that its times are not those of the tests."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.workload.requests import WorkloadRequest


@pytest.fixture(autouse=True)
def _on_a_quiet_machine(quiet_machine: None) -> None:
    """Nothing here probes the machine; a test that wants another result of that says which."""


class FakeServer:
    """``log()`` is what it did since it was last asked."""

    def __init__(self, url: str):
        self.url = url
        self._seen = 0

    def log(self) -> list[dict[str, Any]]:
        requests = self._fetch()["requests"]
        new, self._seen = requests[self._seen :], len(requests)
        return new

    def in_flight(self) -> int:
        """The most requests at once, since it began."""
        return self._fetch()["in_flight"]

    def _fetch(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + "/log", timeout=10) as answer:
            return json.load(answer)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    """A fresh server; see fake_server.py for what prompts make it do."""
    script = Path(__file__).with_name("fake_server.py")
    server = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield FakeServer(f"http://127.0.0.1:{int(server.stdout.readline())}")
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.fixture
def scripted():
    """A request that makes the fake server do something; see fake_server.py."""

    def create(index: int, **script: Any) -> WorkloadRequest:
        script = {"first": 0.0, "gaps": [], **script}
        return WorkloadRequest(str(index), prompt=json.dumps(script), output_len=8)

    return create
