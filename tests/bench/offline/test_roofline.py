"""Utilisation of a machine, by hand and on a small model."""

from __future__ import annotations

import json
import shutil
import time

import pytest
from safetensors.torch import load_file, save_file

from octavo.bench.offline import roofline
from octavo.bench.offline.roofline import Ceilings, WeightKind, place
from octavo.bench.offline.session import OfflineSession, StepTiming
from octavo.core.executor import NoModel
from octavo.cost.loaded_model import live_rank_model
from octavo.cost.rank_model import AttentionOp, MatrixOp, RankModel
from octavo.cost.work import ResourceUse, Span
from octavo.kernels.cpu.library import runnable
from octavo.models import footprint
from octavo.models.checkpoint import open_checkpoint
from octavo.models.footprint import WeightMatrix
from octavo.settings.engine import EngineArgs
from octavo.workload.requests import WorkloadRequest

MODEL = RankModel(
    matrices=(
        MatrixOp("linear", 1, 0, 0, num_params=100, num_bytes=50),
        MatrixOp("head", 1, 0, 0, num_params=30, num_bytes=60, sampled_only=True),
    ),
    attention=(AttentionOp("attention", 1, flops_per_score=4 * 2, kv_bytes_per_token=4),),
    hidden_size=0,
    vocab_size=0,
    num_layers=1,
    activation_bytes=0,
)
CEILINGS = Ceilings(
    bytes_per_s=10.0, linear=100.0, head=20.0, attention=8.0, arithmetic=("a", "b", "c")
)
NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(not runnable(), reason="no native library was built")
)


def step(*chunks: tuple[int, int, bool], wall_s: float = 100.0, num_steps: int = 1) -> StepTiming:
    parts = tuple(Span(*chunk) for chunk in chunks)
    tokens = sum(part.num_tokens for part in parts)
    is_decode = all(part.num_tokens == 1 for part in parts)
    return StepTiming(len(parts), tokens, is_decode, num_steps, wall_s, wall_s, 0.0, parts)


def test_decode_by_hand():
    drawn = place(MODEL, CEILINGS, [step((4, 1, True))])
    assert drawn.prefill is None and drawn.decode is not None
    decode = drawn.decode.as_json()
    # weights 50 + 60, five keys read and one written
    assert decode["bytes"] == 110 + 6 * 4
    assert decode["ops"] == 2 * 100 + 2 * 30 + 4 * 2 * 5
    memory, compute = 134 / 10, 200 / 100 + 60 / 20 + 40 / 8
    assert decode["bound"] == "memory" and memory > compute
    assert decode["mbu"] == pytest.approx(memory / 100)
    assert decode["mfu"] == pytest.approx(compute / 100)
    assert decode["achieved"] == pytest.approx(memory / 100)
    assert decode["floor_ms"] == pytest.approx(memory * 1e3)
    assert decode["step_ms"] == pytest.approx(100e3)
    assert decode["gbytes_per_s"] == pytest.approx(134 / 100 / 1e9)
    assert decode["gops"] == pytest.approx(300 / 100 / 1e9)


def test_prefill_by_hand():
    drawn = place(MODEL, CEILINGS, [step((0, 10, False)), step((10, 10, True))])
    assert drawn.decode is None and drawn.prefill is not None
    prefill = drawn.prefill.as_json()
    assert prefill["steps"] == 2
    assert prefill["bytes"] == 2 * 50 + 60 + (10 + 10 + 20 + 10) * 4
    assert prefill["ops"] == 2 * 100 * 20 + 2 * 30 + 4 * 2 * (20 * 21 / 2)
    assert prefill["bound"] == "compute"
    compute = 4000 / 100 + 60 / 20 + 1680 / 8
    assert prefill["floor_ms"] == pytest.approx(compute / 2 * 1e3)
    assert prefill["achieved"] == prefill["mfu"] == pytest.approx(compute / 200)


def test_multi_steps_read_the_weights_each_time():
    one = place(MODEL, CEILINGS, [step((4, 1, True))]).decode
    three = place(MODEL, CEILINGS, [step((4, 1, True), num_steps=3)]).decode
    assert one is not None and three is not None
    assert three.work.linear == ResourceUse(3 * 50, 3 * 200) and three.work.head.bytes == 3 * 60
    assert three.work.attention == ResourceUse((6 + 7 + 8) * 4, 8 * (5 + 6 + 7))


def test_steps_of_both_kinds_are_kept_apart():
    drawn = place(MODEL, CEILINGS, [step((0, 3, True), (9, 1, True)), step((3, 1, True))])
    assert drawn.prefill is not None and drawn.prefill.num_steps == 1
    assert drawn.decode is not None and drawn.decode.num_steps == 1
    assert place(MODEL, CEILINGS, []).as_json()["decode"] is None


def test_twice_the_time_is_half_the_use():
    slow, fast = (
        place(MODEL, CEILINGS, [step((4, 1, True), wall_s=wall_s)]).decode for wall_s in (2.0, 1.0)
    )
    assert slow is not None and fast is not None
    assert fast.mbu == pytest.approx(2 * slow.mbu) and fast.mfu == pytest.approx(2 * slow.mfu)


# ---- An engine

HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 48, 80, 260, 2, 6, 2, 16
LINEAR = LAYERS * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER)


@pytest.fixture
def bf16_model(tiny_model, tmp_path):
    """The tiny model in bfloat16, its head tied to the embedding or with a tensor of its own."""

    def create(tied: bool):
        folder = shutil.copytree(tiny_model, tmp_path / "bf16")
        tensors = load_file(folder / "model.safetensors")
        if not tied:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file({n: t.bfloat16() for n, t in tensors.items()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        return folder

    return create


@pytest.fixture(scope="module", params=["reference", NATIVE])
def session(request, tiny_model):
    args = EngineArgs(model=str(tiny_model), kernels=request.param, kv_cache_dtype="f32", threads=1)
    with OfflineSession(args) as session:
        yield session


def test_weights_are_counted_as_a_step_reads_them(session):
    model = session.rank_model
    *linear, head = model.matrices
    assert head.sampled_only and not any(op.sampled_only for op in linear)
    assert sum(op.count * op.num_params for op in linear) == LINEAR
    assert head.num_params == HIDDEN * VOCAB
    # The embedding is tied: it is read once, as the head. Packed tiles are of 16 columns.
    assert sum(op.count * op.num_bytes for op in linear) == 4 * LINEAR
    assert 4 * HIDDEN * VOCAB <= head.num_bytes < 4 * HIDDEN * (VOCAB + 16)
    (attention,) = model.attention
    kv_bytes = KV_HEADS * HEAD_DIM * 2 * 4
    assert attention == AttentionOp("attention", LAYERS, 4 * HEADS * HEAD_DIM, kv_bytes)


def planned(path, kernels: str, kv_dtype: str) -> RankModel:
    """Of a model in a file, of which no weight is read."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    types = footprint.weight_types(checkpoint, config)
    if kernels == "native":
        matrices = footprint.matrices(config, types)
        kv_bytes = footprint.native_kv_bytes_per_token(config, kv_dtype)
        return live_rank_model(config, matrices, kv_bytes)
    matrices = footprint.matrices(config, types, footprint.as_stored)
    return live_rank_model(config, matrices, footprint.kv_bytes_per_token(config, "float32"))


def test_the_plan_is_what_is_loaded(session, tiny_model):
    assert planned(tiny_model, session.info["kernels"], "float32") == session.rank_model


@pytest.mark.parametrize("kernels", ["reference", NATIVE])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_of_another_type(tmp_path, kernels, tied, bf16_model):
    folder = bf16_model(tied)
    args = EngineArgs(model=str(folder), kernels=kernels, threads=1, num_blocks=8)
    with OfflineSession(args) as session:
        assert planned(folder, kernels, "bfloat16") == session.rank_model


def test_the_work_of_a_run_is_its_closed_form(session):
    prompt, output = 40, 9
    ids = tuple(range(1, prompt + 1))
    timing = session.run([WorkloadRequest("a", prompt_token_ids=ids, output_len=output)])
    model = session.rank_model
    drawn = place(model, CEILINGS, timing.steps)
    assert drawn.prefill is not None and drawn.decode is not None
    total = drawn.prefill.work + drawn.decode.work
    positions = prompt + output - 1  # the last token is not put in
    head_bytes = model.matrices[-1].num_bytes
    linear_bytes = model.weights_bytes - head_bytes
    assert total.linear == ResourceUse(output * linear_bytes, 2 * LINEAR * positions)
    assert total.head == ResourceUse(output * head_bytes, 2 * HIDDEN * VOCAB * output)
    assert total.attention.flops == 4 * LAYERS * HEADS * HEAD_DIM * positions * (positions + 1) / 2
    keys = prompt + sum(range(prompt + 1, positions + 1)) + positions
    assert total.attention.bytes == keys * model.kv_bytes_per_token


def test_ceilings_are_measured_in_what_is_computed_in(session):
    ceilings = roofline.measure_ceilings(session.probe)
    assert min(ceilings.bytes_per_s, ceilings.linear, ceilings.head, ceilings.attention) > 1e6
    kind = "float32" if session.info["kernels"] == "native" else "torch float32"
    assert ceilings.arithmetic == (kind, kind, kind)
    better = roofline.measure_ceilings(session.probe, 1e15)
    assert better.bytes_per_s == 1e15


def test_a_whole_drawing_is_json(session):
    timing = session.run([WorkloadRequest("a", prompt_token_ids=(1, 2, 3), output_len=3)])
    document = roofline.draw(session, timing.steps, 1e9).as_json()
    assert set(document) == {"ceilings", "prefill", "decode"}
    (weights,) = document["ceilings"]["weights"]
    assert (
        weights["params"] == LINEAR + HIDDEN * VOCAB and weights["bytes"] >= 4 * weights["params"]
    )
    for part in ("prefill", "decode"):
        assert document[part]["bound"] in ("memory", "compute")
        assert 0 < document[part]["achieved"] < 10
        assert document[part]["achieved"] == max(document[part]["mbu"], document[part]["mfu"])


class Mixed(NoModel):
    """A model whose layers are of two types, on a device that counts in whole seconds."""

    attention_arithmetic = "other"

    def __init__(self, now):
        self._now = now

    def matrices(self):
        return [
            WeightMatrix(False, 100, 1, "slow"),
            WeightMatrix(False, 100, 1, "fast"),
            WeightMatrix(True, 7, 1, "fast"),
        ]

    def products(self, arithmetic):
        return lambda rounds: self._work(
            rounds * {"slow": 10.0, "fast": 30.0, "other": 5.0}[arithmetic]
        )

    def reads(self):
        return lambda: self._work(4.0)

    def _work(self, amount):
        self._now[0] += 1.0
        return amount


def test_parts_of_mixed_types_take_the_time_of_each(monkeypatch):
    """Half of the weights at 10 a second, half at 30: 15 together."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(roofline, "best_rate", lambda run: run(1))
    ceilings = roofline.measure_ceilings(Mixed(now))
    assert ceilings.linear == pytest.approx(15.0) and ceilings.head == pytest.approx(30.0)
    assert ceilings.attention == 5.0 and ceilings.bytes_per_s == 4.0
    assert ceilings.arithmetic == ("slow, fast", "fast", "other")
    assert ceilings.weights == (WeightKind("slow", 100, 1, 10.0), WeightKind("fast", 107, 2, 30.0))


@pytest.mark.cuda
def test_ceilings_of_a_gpu(tiny_model):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with OfflineSession(EngineArgs(model=str(tiny_model), device="cuda")) as session:
        ceilings = roofline.measure_ceilings(session.probe, 1.0)
        assert ceilings.arithmetic[0] == "torch bfloat16"
        assert ceilings.bytes_per_s > 50e9 and ceilings.linear > 1e12
