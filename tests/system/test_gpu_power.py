"""The energy of a GPU, by a double of NVML."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from octavo.system.gpu_power import Draw, NotMetered, open_energy


class NVMLError(Exception):
    pass


class FakeNVML(SimpleNamespace):
    """One board that has taken 5 kJ."""

    NVMLError = NVMLError
    problem: str | None = None

    def nvmlInit(self):
        if self.problem == "init":
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-12-34":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.problem == "counter":
            raise NVMLError("Not Supported")
        return 5_000_000

    def nvmlDeviceGetPowerUsage(self, handle):
        return 350_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize("uuid", ["12-34", "GPU-12-34"])
def test_joules_and_watts_are_of_the_board(nvml, uuid):
    meter = open_energy(uuid)
    assert (meter.joules, meter.watts, meter.limit_watts) == (5000.0, 350.5, 700.0)


@pytest.mark.parametrize(
    ("problem", "uuid", "said"),
    [
        ("init", "12-34", "Driver Not Loaded"),
        ("counter", "12-34", "Not Supported"),
        (None, "other", "Not Found"),
    ],
)
def test_what_is_not_there_is_said(nvml, problem, uuid, said):
    nvml.problem = problem
    with pytest.raises(NotMetered, match=said):
        open_energy(uuid)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotMetered, match="octavo\\[gpu\\]"):
        open_energy("12-34")


def test_mean_power():
    assert Draw(joules=700.0, seconds=2.0).watts == 350.0
    assert Draw(joules=0.0, seconds=0.0).watts == 0.0
