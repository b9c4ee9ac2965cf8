"""Runs that are ended before they are done, and those that go on from there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.base.errors import ModelFileError
from octavo.models.checkpoint import open_checkpoint
from octavo.quantize import pipeline, quantization_job
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.methods import QuantizeRequest
from octavo.quantize.quantization_job import make
from octavo.quantize.resume import KeptMatrices
from octavo.quantize.scheme import Scheme
from octavo.sources.open import load_tokenizer
from tests.conftest import write_tiny_model

pytestmark = pytest.mark.usefixtures("few_steps")

NAMES = [f"model.layers.{i}.{m}.weight" for i in (0, 1) for m in ("mlp.up_proj", "mlp.gate_proj")]
SCHEMES = dict.fromkeys(NAMES, Scheme(4, 16))
WANTED = QuantizeRequest("gptq", group_size=32, calibration_tokens=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return write_tiny_model(tmp_path_factory.mktemp("sources") / "llama", **sizes, **heads)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a text to look at. " * 200)
    return path


def kept_of(folder, out, wanted=WANTED, schemes=SCHEMES) -> KeptMatrices:
    return KeptMatrices(out, open_checkpoint(folder), wanted, schemes)


def matrix():
    return quantize_to_nearest(torch.randn(8, 48), Scheme(4, 16))


def test_what_is_kept_is_found_again(folder, tmp_path):
    kept, made = kept_of(folder, tmp_path / "out"), matrix()
    assert list(tmp_path.iterdir()) == [] and NAMES[1] not in kept
    kept.keep(NAMES[1], made)
    again = kept_of(folder, tmp_path / "out")
    assert list(again) == [NAMES[1]] and len(again) == 1 and again.get(NAMES[0]) is None
    found = again[NAMES[1]]
    assert torch.equal(found.codes, made.codes) and found.scheme == made.scheme
    assert torch.equal(found.scales, made.scales) and torch.equal(found.zeros, made.zeros)


def test_what_was_made_otherwise_is_not(folder, tmp_path, text):
    first = replace(WANTED, calibration=text)
    kept_of(folder, tmp_path / "out", first).keep(NAMES[0], matrix())
    assert NAMES[0] in kept_of(folder, tmp_path / "out", first)
    fewer, learned = replace(first, calibration_tokens=256), replace(first, method="autoround")
    for other in (WANTED, fewer, learned):
        assert len(kept_of(folder, tmp_path / "out", other)) == 0
    assert len(kept_of(folder, tmp_path / "out", first, {NAMES[0]: Scheme(3, 16)})) == 0
    assert len(kept_of(folder, tmp_path / "another", first)) == 0
    assert len(kept_of(write_tiny_model(tmp_path / "llama"), tmp_path / "out", first)) == 0
    text.write_text("another text")
    assert len(kept_of(folder, tmp_path / "out", first)) == 0


def test_nothing_is_kept_of_what_is_done(folder, tmp_path):
    stranger = tmp_path / "output"
    kept_of(folder, stranger).keep(NAMES[0], matrix())
    for wanted in (WANTED, replace(WANTED, calibration_tokens=256)):
        kept_of(folder, tmp_path / "out", wanted).keep(NAMES[0], matrix())
    assert len(list(tmp_path.iterdir())) == 3
    kept_of(folder, tmp_path / "out").remove()
    assert len(kept_of(folder, stranger)) == len(list(tmp_path.iterdir())) == 1


def test_a_damaged_file_is_named(folder, tmp_path):
    kept = kept_of(folder, tmp_path / "out")
    kept.keep(NAMES[0], matrix())
    (path,) = tmp_path.rglob("*.npz")
    for damage in (b"", path.read_bytes()[:300], b"no zip at all"):
        path.write_bytes(damage)
        with pytest.raises(ModelFileError, match=r"up_proj\.weight\.npz: is damaged.*remove it"):
            kept[NAMES[0]]


@pytest.mark.parametrize("method", ["gptq", "autoround"])
def test_a_run_goes_on_where_another_was_ended(method, folder, tmp_path, monkeypatch):
    checkpoint, tokenizer = open_checkpoint(folder), load_tokenizer(folder)
    wanted = replace(WANTED, method=method, symmetric=True)
    make(checkpoint, tokenizer, tmp_path / "whole", wanted)
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()

    def stop_in_the_second_layer(what, done, total):
        if what == "quantizing" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(checkpoint, tokenizer, tmp_path / "out", wanted, stop_in_the_second_layer)
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.rglob("out.*.octavo.resume/*.npz"))) == 7

    rounded, gptq = [], pipeline.quantize_gptq
    monkeypatch.setattr(
        pipeline,
        "quantize_gptq",
        lambda *args, **kwargs: (rounded.append(1), gptq(*args, **kwargs))[1],
    )
    make(checkpoint, tokenizer, tmp_path / "out", wanted)
    assert len(rounded) == 7  # those of the second layer
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_what_is_made_quickly_is_not_kept(method, folder, tmp_path, monkeypatch):
    """Nor what belongs to scaled channels."""
    monkeypatch.setattr(quantization_job, "KeptMatrices", None)  # not to be called
    wanted = replace(WANTED, method=method)
    make(open_checkpoint(folder), load_tokenizer(folder), tmp_path / "out", wanted)
