"""Devices by name, as people write them; own devices, as they come."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.cost import hardware_table, this_machine
from octavo.cost.find_device import find_device
from octavo.cost.hardware import Device
from octavo.cost.hardware_table import devices
from octavo.cost.this_machine import device_of_engine


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("H100 SXM", "H100 SXM", 1),
        ("h200-sxm", "H200 SXM", 1),
        ("a100-sxm-80gb", "A100-80 SXM", 1),
        ("A100 80GB PCIe", "A100-80 PCIe", 1),
        ("sxm_a100_40", "A100-40 SXM", 1),
        ("rtx4090", "RTX 4090", 1),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 1),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 1),
        ("H100 SXM:8", "H100 SXM", 8),
        ("mi300x: 4", "MI300X", 4),
        ("GB200 (per GPU)", "GB200", 1),
        ("b200", "B200", 1),
        ("l4", "L4", 1),
        ("m3 max", "M3 Max (40c)", 1),
        ("epyc-genoa:2", "EPYC Genoa 12ch DDR5-4800", 2),
        ("Xeon Granite Rapids", "Xeon Granite Rapids 12ch DDR5-6400", 1),
    ],
)
def test_names_as_people_write_them(text, name, count):
    device, found = find_device(text)
    assert (device.name, found) == (name, count)


def test_every_device_is_called_by_its_names_and_by_no_other_s():
    named: dict[str, Device] = {}
    for device in devices():
        for name in (device.name, *device.aliases):
            assert find_device(name) == (device, 1)
            assert named.setdefault(name, device) is device
    assert len(devices()) >= 33


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(hardware_table._built_in()), st.randoms(), st.sampled_from(" -_"))
def test_order_case_and_separators_do_not_matter(device, rng, separator):
    words = re.split("[ -]", device.name)
    rng.shuffle(words)
    text = separator.join(rng.choice((str.upper, str.lower, str.title))(word) for word in words)
    assert find_device(text)[0] == device


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("A10", "A10"), ("a10g", "A10G"), ("a40", "A40"), ("l40", "L40"), ("L40S", "L40S")),
        *(("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA A100-SXM4-80GB", "A100-80 SXM")),
        *(("A100 80G PCIe", "A100-80 PCIe"), ("AMD Instinct MI300X", "MI300X")),
        *(("Apple M3 Max", "M3 Max (40c)"), ("rtx3090", "RTX 3090"), ("a6000", "RTX A6000")),
    ],
)
def test_a_letter_more_is_another_card(text, name):
    assert find_device(text)[0].name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "may be any of: H100 SXM, H100 PCIe, H100 NVL"),
        ("a100", "A100-40 SXM, A100-40 PCIe, A100-80 SXM, A100-80 PCIe"),
        ("M4 Ultra", "Apple made no M4 Ultra"),
        ("h300 sxm", "the nearest: H200 SXM, H100 SXM"),
        ("rtx 4900", "RTX 4090"),
        ("abacus", "`octavo hardware list` shows all"),
        ("", "names no device"),
        ("gpu", "names no device"),
        ("H100 SXM:0", "no number of devices"),
        ("H100 SXM:many", "no number of devices"),
        ("H100 SXM:-2", "no number of devices"),
    ],
)
def test_what_is_no_name(text, message):
    with pytest.raises(ConfigError, match=message):
        find_device(text)


@pytest.mark.parametrize(
    ("name", "ridge"),
    [
        ("A100-80 SXM", 153),
        ("H100 SXM", 295),
        ("H200 SXM", 206),
        ("B200", 293),
        ("MI300X", 247),
        ("L40S", 419),
        ("L4", 403),
        ("RTX 4090", 164),
        ("A10G", 117),
    ],
)
def test_ridges_of_sixteen_bits(name, ridge):
    """Reference case R20."""
    assert find_device(name)[0].ridge() == pytest.approx(ridge, rel=0.01)


def test_peaks_are_dense():
    """What sheets print with sparsity would be twice as much."""
    for device in devices():
        if device.kind == "gpu":
            assert device.peaks["fp16"] <= 2.6e15, device.name
            if "fp8" in device.peaks:
                assert device.peaks["fp8"] == pytest.approx(2 * device.peaks["fp16"], rel=0.02)
    l40s, h100 = find_device("l40s")[0], find_device("h100 sxm")[0]
    assert l40s.peak("fp8") == 733e12 and h100.peak("fp16") == 989.4e12


def test_what_there_is_no_peak_for_is_computed_in_more_bits():
    a100, h100 = find_device("a100-80 sxm")[0], find_device("h100 sxm")[0]
    assert a100.computed_in("fp8") == a100.computed_in("fp4") == "fp16"
    assert a100.computed_in("int8") == "int8" and h100.computed_in("fp4") == "fp8"
    m2 = find_device("m2 max")[0]
    assert m2.computed_in("int8") == m2.computed_in("fp16") == "fp32"
    bare = Device(name="bare", kind="gpu", memory_bytes=1, memory_bandwidth=1, peaks={"fp8": 1.0})
    with pytest.raises(ConfigError, match="bare: no peak is known for fp16"):
        bare.peak("fp16")


def test_processors_are_cores_times_clock_times_what_a_core_does():
    device, _ = find_device("sapphire rapids")
    assert device.kind == "cpu" and device.memory_bandwidth == 307.2e9
    assert device.peak("fp16") == 56 * 2.5e9 * 1024 and device.peak("int8") == 2 * device.peak(
        "fp16"
    )


# -- the user's own -------------------------------------------------------------------------------

CARD = """
[[devices]]
name = "My card"
memory_gib = 47.5
bandwidth_gb_s = 900
dense_tflops = { fp16 = 120, int8 = 240 }
usd_per_hour = [0.5, 0.75]
aliases = ["The one in the cellar"]
"""


def test_own_devices_are_found_like_others(home):
    (home / "hardware.toml").write_text(CARD)
    device, count = find_device("my-card:2")
    assert count == 2 and device.memory_bytes == 47.5 * 2**30 and device.peak("int8") == 240e12
    assert device.usd_per_hour == (0.5, 0.75) and device.kind == "gpu"
    assert device.trust == "uncertain" and device.source == str(home / "hardware.toml")
    assert find_device("cellar the one in")[0] == device
    assert devices()[0] == device


def test_a_file_of_ones_own_comes_first(home, tmp_path):
    (home / "hardware.toml").write_text(CARD)
    own = {"name": "my CARD", "memory_gib": 1, "bandwidth_gb_s": 2, "dense_tflops": {"fp32": 3}}
    l4 = {"name": "L4", "memory_gib": 9, "bandwidth_gb_s": 9, "cores": 4, "ghz": 2.0,
          "operations_per_cycle": {"fp32": 32}, "kind": "cpu"}  # fmt: skip
    path = tmp_path / "lab.json"
    path.write_text(json.dumps({"devices": [own, l4]}))
    assert find_device("my card", path)[0].memory_bandwidth == 2e9
    assert find_device("l4", path)[0].peak("fp32") == 4 * 2e9 * 32
    assert find_device("l4")[0].memory_bandwidth == 300e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[devices]]", r"devices\[0\].name\): is missing"),
        (CARD.replace("900", "-1"), r"devices\[0\].bandwidth_gb_s"),
        (CARD.replace("900", '"fast"'), "is not a number"),
        (CARD.replace("fp16", "fp17"), "fp17.*is not computed in"),
        (CARD.replace("memory_gib", "memory_gb"), "memory_gb.*is not known"),
        (CARD.replace("{ fp16 = 120, int8 = 240 }", "{}"), "needs at least one peak"),
        (CARD + 'kind = "tpu"', "'tpu' is none of gpu, cpu, unified"),
        (CARD.replace("[0.5, 0.75]", "[2, 1]"), "2.0 is more than 1.0"),
        (CARD.replace("dense_tflops", "ghz = 2\noperations_per_cycle"), "cores.*is missing"),
        ("devices = 3", "is not a list"),
        ("devices = [", "neither TOML nor JSON"),
        ("", "devices.*is missing"),
    ],
)
def test_what_is_wrong_in_a_file(home, text, message):
    (home / "hardware.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_device("my card")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot read hardware from .*none.toml: No such file"):
        devices(tmp_path / "none.toml")


# -- this machine ---------------------------------------------------------------------------------

RATES = {"bytes_per_s": 30e9, "int8_per_s": 900e9, "fp16_per_s": 400e9, "fp32_per_s": 200e9}


@pytest.fixture
def measured(monkeypatch):
    """A processor without a GPU, and the times that it was measured."""
    from octavo.kernels.cpu import library

    times: list[int] = []
    monkeypatch.setattr(this_machine.machine, "has_gpu_driver", lambda: False)
    monkeypatch.setattr(library, "choose", lambda: "avx2")
    monkeypatch.setattr(this_machine, "_measure", lambda: times.append(1) or RATES)
    return times


def test_auto_is_this_machine_measured_once(measured, home):
    device, count = find_device("auto")
    assert count == 1 and device.is_measured and device.kind == "cpu"
    assert device.memory_bandwidth == 30e9 and device.peak("int8") == 900e9
    assert device.memory_bytes > 0
    again, _ = find_device("AUTO")
    assert again.peaks == device.peaks and len(measured) == 1


@pytest.mark.parametrize("kept", ["", "[]", "{}", '{"cpu": "other"}', "null"])
def test_what_was_kept_of_another_machine_is_measured_anew(measured, home, kept):
    (home / "machine.json").write_text(kept)
    assert find_device("auto")[0].memory_bandwidth == 30e9
    assert len(measured) == 1
    sound = json.loads((home / "machine.json").read_text())
    (home / "machine.json").write_text(json.dumps({**sound, "threads": 999}))
    find_device("auto")
    (home / "machine.json").write_text(json.dumps({**sound, "bytes_per_s": 0}))
    find_device("auto")
    assert len(measured) == 3


def test_for_an_engine_nothing_is_measured(measured, home):
    with pytest.raises(ConfigError, match="`octavo hardware show auto` does it"):
        device_of_engine("cpu")
    find_device("auto")
    assert device_of_engine("cpu").memory_bandwidth == 30e9 and len(measured) == 1


def test_an_engine_runs_on_the_gpu_that_the_driver_names(monkeypatch):
    monkeypatch.setattr(this_machine, "gpu_name", lambda: "NVIDIA L40S")
    assert device_of_engine("cuda").name == "L40S"
    monkeypatch.setattr(this_machine, "gpu_name", lambda: "NVIDIA Unheard-of")
    with pytest.raises(ConfigError, match="no hardware 'NVIDIA Unheard-of'"):
        device_of_engine("cuda")
    monkeypatch.setattr(this_machine, "gpu_name", lambda: None)
    with pytest.raises(ConfigError, match="does not name"):
        device_of_engine("cuda")


def test_a_machine_can_be_measured_again(measured, home, monkeypatch):
    monkeypatch.setattr(this_machine.os, "getloadavg", lambda: (7.25, 0.0, 0.0))
    find_device("auto")
    faster = {**RATES, "bytes_per_s": 50e9}
    monkeypatch.setattr(this_machine, "_measure", lambda: faster)
    assert find_device("auto")[0].memory_bandwidth == 30e9
    assert this_machine.measured_anew().memory_bandwidth == 50e9
    assert find_device("auto")[0].memory_bandwidth == 50e9
    assert json.loads((home / "machine.json").read_text())["load"] == 7.25


def test_what_is_kept_has_a_date_and_says_what_ran_beside(measured, home, monkeypatch):
    cores = this_machine.machine.cpu().usable_cores
    monkeypatch.setattr(this_machine.os, "getloadavg", lambda: (10.0 * cores, 0.0, 0.0))
    begin = datetime(2026, 11, 23, 12, tzinfo=UTC)
    for days, said in ((0, "today"), (1, "1 day ago"), (40, "40 days ago")):
        now = begin + timedelta(days=days)
        monkeypatch.setattr(this_machine, "_now", lambda now=now: now)
        source = find_device("auto")[0].source
        assert f"measured here, 2026-11-23, {said}, beside others (load" in source
    kept = json.loads((home / "machine.json").read_text())
    del kept["measured_at"], kept["load"]
    (home / "machine.json").write_text(json.dumps(kept))
    assert find_device("auto")[0].source.startswith("measured here; kept in")  # of an older version
    assert len(measured) == 1


def test_where_the_system_does_not_say_how_busy_it_is(measured, home, monkeypatch):
    monkeypatch.delattr(this_machine.os, "getloadavg")
    assert this_machine.load_average() is None
    assert "beside others" not in find_device("auto")[0].source


def test_a_gpu_is_not_measured(monkeypatch):
    monkeypatch.setattr(this_machine.machine, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(this_machine, "gpu_name", lambda: "NVIDIA L40S")
    with pytest.raises(ConfigError, match="NVIDIA L40S: ceilings of GPUs are those of the table"):
        this_machine.measured_anew()


def test_a_gpu_is_called_by_its_driver(monkeypatch):
    monkeypatch.setattr(this_machine.machine, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(this_machine, "gpu_name", lambda: "NVIDIA L40S")
    assert find_device("auto")[0].name == "L40S"


def test_the_driver_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine.gpu_name() is None
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho NVIDIA L4\necho NVIDIA L4\n")
    driver.chmod(0o755)
    assert this_machine.gpu_name() == "NVIDIA L4"
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert this_machine.gpu_name() is None


def test_without_kernels_there_is_nothing_to_measure_with(monkeypatch):
    monkeypatch.setattr(this_machine.machine, "has_gpu_driver", lambda: False)
    monkeypatch.setenv("OCTAVO_ISA", "none")
    with pytest.raises(ConfigError, match="cannot be measured: .*Name the hardware"):
        find_device("auto")


@pytest.mark.skipif(not this_machine.machine.can_have_native_kernels(), reason="no native kernels")
def test_a_processor_is_measured():
    from octavo.kernels.cpu.library import runnable

    if not runnable():
        pytest.skip("no native library was built")
    rates = this_machine._measure()
    assert set(rates) == set(RATES) and min(rates.values()) > 1e8


def test_the_table_is_read_once(monkeypatch):
    find_device("l4")
    monkeypatch.setattr(hardware_table, "read_devices", None)
    assert find_device("l4")[0].name == "L4"


def test_processors_of_a_file_have_shared_memory_and_cores(tmp_path):
    path = tmp_path / "hardware.toml"
    card = """
[[devices]]
name = "Mine"
kind = "cpu"
memory_gib = 8
bandwidth_gb_s = 40
cores = 4
ghz = 2
operations_per_cycle = {fp32 = 32}
"""
    path.write_text(card)
    (found,) = hardware_table.read_devices(path)
    assert (found.num_cores, found.link_bandwidth, found.link_kind) == (4, 10e9, "shared memory")
    path.write_text(card + "link_gb_s = 60\nlink_kind = 'UPI'\n")
    (found,) = hardware_table.read_devices(path)
    assert (found.link_bandwidth, found.link_kind) == (60e9, "UPI")
