"""Links as they were measured: kept, found, and refused where they are damaged."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.calibration import store
from octavo.calibration.link_run import keep
from octavo.cost.networks import Network, measured_network

NETWORK = Network(
    name="node-1",
    latency_s=40e-6,
    latency_p99_s=90e-6,
    bandwidth=1.1e9,
    measured_at="2026-11-28T16:00:00+00:00",
)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))


def test_a_link_is_found_by_its_name():
    path = keep(NETWORK)
    assert measured_network("node-1") == NETWORK
    assert path.parent == store.folder()


def test_it_is_no_calibration_of_a_model():
    keep(NETWORK)
    assert store.find({}) is None


def test_one_that_was_not_measured_is_refused_with_those_that_were():
    with pytest.raises(ConfigError, match="no link to 'a' was measured: `octavo calibrate --link`"):
        measured_network("a")
    keep(NETWORK)
    with pytest.raises(ConfigError, match="no link to 'a' was measured, but to node-1"):
        measured_network("a")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"link_schema": 9}', '{"link_schema": 1, "name": "node-1"}']
)
def test_damaged_files_are_refused(text):
    keep(NETWORK).write_text(text)
    with pytest.raises(ConfigError):
        measured_network("node-1")


def test_names_of_hosts_stay_in_the_folder():
    path = keep(
        Network(
            **{**{n: getattr(NETWORK, n) for n in NETWORK.__slots__}, "name": "../../fe80::1%0"}
        )
    )
    assert path.parent == store.folder()
    assert measured_network("../../fe80::1%0").name == "../../fe80::1%0"
