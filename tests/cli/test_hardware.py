"""``octavo hardware``: the table, and one device of it."""

from __future__ import annotations

import json

import pytest

from octavo.cli import main
from octavo.cost import this_machine


@pytest.fixture
def hardware(capsys, tmp_path, monkeypatch):
    """``hardware("list")``: status, stdout and stderr."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["hardware", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_list(hardware):
    status, out, err = hardware("list")
    assert (status, err) == (0, "")
    lines = {line[:12].strip(): line for line in out.splitlines()}
    assert "3,350" in lines["H100 SXM"] and "1.99-5.00" in lines["H100 SXM"]
    assert lines["M2 Max"].endswith("-")  # no link, no price


def test_list_as_json(hardware, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        '[[devices]]\nname = "Mine"\nmemory_gib = 8\nbandwidth_gb_s = 100\n'
        "dense_tflops = { fp16 = 10 }\n"
    )
    status, out, _ = hardware("list", "--hardware-file", str(own), "--json")
    first, *others = json.loads(out)["devices"]
    assert status == 0 and first["name"] == "Mine" and first["ridge_flops_per_byte"] == 100
    assert "H200 SXM" in [device["name"] for device in others]


def test_show(hardware):
    status, out, _ = hardware("show", "h200-sxm:8")
    fields = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert status == 0
    assert fields["name"] == "H200 SXM" and fields["count"] == "8" and fields["trust"] == "sure"
    status, out, _ = hardware("show", "rtx4090", "--json")
    shown = json.loads(out)
    assert shown["memory_bytes"] == 25_250_627_584 and shown["count"] == 1
    assert shown["dense_tflops"]["fp16"] == pytest.approx(165.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "h100"), "may be any of: H100 SXM"),
        (("show", "M4 Ultra"), "no M4 Ultra"),
        (("list", "--hardware-file", "none.toml"), "cannot read hardware from none.toml"),
    ],
)
def test_what_is_refused(hardware, arguments, message):
    status, out, err = hardware(*arguments)
    assert (status, out) == (1, "") and message in err


@pytest.fixture
def processor(monkeypatch):
    """A machine without a GPU, that others keep busy, and what is measured there in turn."""
    rates = iter([dict.fromkeys(RATES, number * 1000000000.0) for number in (10, 20)])
    monkeypatch.setattr(this_machine.machine, "has_gpu_driver", lambda: False)
    monkeypatch.setattr(this_machine, "_measure", lambda: next(rates))
    monkeypatch.setattr(this_machine.os, "getloadavg", lambda: (99.0, 0.0, 0.0))


RATES = ("bytes_per_s", "int8_per_s", "fp16_per_s", "fp32_per_s")


def test_this_machine_is_measured_anew_where_that_is_asked_for(hardware, processor):
    _, out, err = hardware("show", "auto")
    assert "10.0 GB/s" in out and "today" in out and err == ""
    status, out, err = hardware("show", "auto", "--measure", "--json")
    assert status == 0 and json.loads(out)["bandwidth_gb_s"] == 20
    assert "warning: others use this machine (a load of 99.0" in err
    assert "20.0 GB/s" in hardware("show", "auto")[1]


def test_only_this_machine_is_measured(hardware):
    status, _, err = hardware("show", "l4", "--measure")
    assert status == 2 and "not of l4" in err
