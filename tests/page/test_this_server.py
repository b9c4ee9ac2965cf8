"""What is served, in the pickers of pictures: computed as the planner computes it of the files."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from octavo.cost import this_machine
from octavo.cost.engine_profile import Limits
from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.precision import weights_bytes
from octavo.cost.work import Span
from octavo.models.checkpoint import open_checkpoint
from octavo.planner import Traffic, plan
from octavo.planner.page_export import hardware_json, model_json

pytestmark = pytest.mark.slow

DEVICE = replace(find_device("epyc-genoa")[0], name="The processor here")
SETTINGS = {"max_model_len": 128, "max_num_seqs": 3, "step_tokens": 64}


@pytest.fixture
def spec(site, tiny_model, monkeypatch):
    """Of the model that the site serves."""
    spec = open_spec(tiny_model)
    monkeypatch.setattr(this_machine, "device_of_engine", lambda kind: DEVICE)
    facts = SimpleNamespace(runs_as={"device": "cpu"})
    monkeypatch.setattr(site.served, "engine", SimpleNamespace(facts=facts))
    monkeypatch.setattr(site.served, "model_path", tiny_model)
    site.deployment = {
        "model": {**model_json(spec), "name": "tiny"},
        "hardware": hardware_json([DEVICE]),
        "settings": SETTINGS,
        "unknown": [],
    }
    yield spec
    site.deployment = None


def test_this_server_is_in_the_pickers_and_in_the_address(tab, spec):
    tab.open("pictures#kv-growth?model=this&hardware=this")
    tab.wait_for("document.querySelector('.figures .figure') !== null")
    chosen = tab.js(
        "[...document.querySelectorAll('.controls select')].map((s) => s.selectedOptions[0].text)"
    )
    assert chosen[0] == "this server: tiny"
    assert chosen[3] == f"this server: {DEVICE.name}"
    command = tab.text(".command code")
    assert command.startswith("octavo plan tiny --hardware auto")
    assert "--max-num-seqs 3" in command


def test_it_is_computed_of_what_its_files_hold(tab, spec, tiny_model):
    tab.open("pictures")
    told = tab.js("""(async () => {
        const { loadWorld } = await import("/static/pictures/world.js");
        const { contextOf } = await import("/static/pictures/picker.js");
        const world = await loadWorld();
        const values = { model: "this", hardware: "this", precision: "published", kv: "auto" };
        const picture = { needs: { model: true, hardware: true } };
        const { deployment } = await new Promise((done) => {
            const look = () => {
                const context = contextOf(picture, values, world, look);
                if (!context.isWaiting) done(context);
            };
            look();
        });
        const { limits, memory } = deployment;
        const seconds = deployment.step([[10, 1], [20, 1]]).total.value;
        return { limits, memory, seconds };
    })()""")
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=128)
    found = plan(str(tiny_model), "epyc-genoa", limits=limits, traffic=Traffic(8, 8)).deployment
    assert told["limits"]["max_model_len"] == 128
    assert told["limits"]["max_num_seqs"] == 3
    assert told["limits"]["max_num_batched_tokens"] == 64
    assert told["memory"]["weights_bytes"] == weights_bytes(spec, found.precision)
    assert told["memory"]["pool_bytes"] == pytest.approx(found.memory.kv_bytes, rel=1e-9)
    seconds = found.step_time([Span(10, 1), Span(20, 1)]).value
    assert told["seconds"] == pytest.approx(seconds, rel=1e-9)


def test_without_an_answer_there_is_no_such_choice(tab):
    tab.open("pictures#kv-growth?model=this")
    tab.wait_for("document.querySelector('.figures .figure') !== null")
    assert "this server" not in tab.text(".controls")


@pytest.fixture
def checkpoint(site, tmp_path):
    """Weights that the site serves."""
    draw = torch.Generator().manual_seed(1)
    tensors = {
        "up/proj": torch.randn(40, 600, generator=draw),
        "broken": torch.zeros(8, 256),
        "norm": torch.ones(600),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    site.checkpoint = open_checkpoint(tmp_path)
    yield tensors
    site.checkpoint = None


def test_a_tensor_of_its_model_is_rounded(tab, checkpoint):
    tab.open("pictures#quantization?tensor=up%2Fproj&down=1&across=1&type=fp8")
    tab.wait_for_text(".hint", "up/proj, 40 × 600 in F32: rows 32–39, columns 256–511")
    names = tab.js("[...document.querySelector('.controls select').options].map((o) => o.text)")
    assert names == ["a sample", "broken", "up/proj"]  # those that have room for a piece
    tab.js("document.querySelector('.chart-table').open = true")
    shown = tab.wait_for("document.querySelector('.chart-table tbody td')?.innerText")
    value = checkpoint["up/proj"][32, 256 + 4 * 32].item()  # of the fifth block
    assert float(shown.replace("−", "-")) == pytest.approx(value, rel=0.01)
    tab.js("location.hash = '#quantization?tensor=broken'")
    tab.wait_for_text(".hint", "did not read these weights: the file is damaged")
    assert "SmolLM2" in tab.text(".hint")  # and shows the sample
    assert tab.js("[...document.querySelectorAll('.control')].filter((c) => c.hidden).length") == 0
    tab.js("location.hash = '#quantization?tensor=gone'")
    tab.wait_for("[...document.querySelectorAll('.control')].filter((c) => c.hidden).length === 2")
