"""MTP modules of a checkpoint, in both layouts, and the model that has one without them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_heads import (
    HIDDEN,
    TARGET,
    decoder_layer,
    embedding_of,
    engine_of,
    is_likely,
    last_norm_of,
    requests,
    rms,
    run,
    true_states,
)

from octavo.base.errors import ConfigError, ModelFileError
from octavo.kernels.cpu import library
from tests.conftest import TINY_CONFIG, write_tiny_model

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

LAYERS, HEADS, DIM = TARGET["num_hidden_layers"], TARGET["num_attention_heads"], 16
KV_HEADS, INNER = TINY_CONFIG["num_key_value_heads"], TINY_CONFIG["intermediate_size"]
DEEPSEEK = {
    "enorm": f"model.layers.{LAYERS}.enorm",
    "hnorm": f"model.layers.{LAYERS}.hnorm",
    "eh_proj": f"model.layers.{LAYERS}.eh_proj",
    "norm": f"model.layers.{LAYERS}.shared_head.norm",
    "layer": f"model.layers.{LAYERS}.",
}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0.",
}
LAYOUTS = {"deepseek": DEEPSEEK, "qwen": QWEN}


def tensors(names: dict[str, str]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    layer = names["layer"]
    made = {
        names["eh_proj"] + ".weight": normal(HIDDEN, 2 * HIDDEN),
        layer + "self_attn.q_proj.weight": normal(HEADS * DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": normal(KV_HEADS * DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": normal(KV_HEADS * DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * DIM),
        layer + "mlp.gate_proj.weight": normal(INNER, HIDDEN),
        layer + "mlp.up_proj.weight": normal(INNER, HIDDEN),
        layer + "mlp.down_proj.weight": normal(HIDDEN, INNER),
    }
    for norm in ("enorm", "hnorm", "norm"):
        made[names[norm] + ".weight"] = 1 + normal(HIDDEN)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        made[f"{layer}{norm}.weight"] = 1 + normal(HIDDEN)
    return made


def with_module(plain: Path, folder: Path, module: dict[str, np.ndarray]) -> Path:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(plain, folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **module}, path)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("mtp") / "tiny", **TARGET)


@pytest.fixture(scope="module")
def plain(model):
    return run(engine_of(model), requests()).token_ids


def reference_logits(
    model, names: dict[str, str], known: list[int], drafted: tuple[int, ...], normed: bool
) -> list[np.ndarray]:
    made = tensors(names)
    states = rms(true_states(model, known[:-1], [LAYERS])[0], last_norm_of(model))
    embedding, tokens, logits = embedding_of(model), known[1:], []
    for token_id in drafted:
        e = rms(embedding[tokens], made[names["enorm"] + ".weight"])
        h = rms(states, made[names["hnorm"] + ".weight"])
        x = np.concatenate([e, h], axis=1) @ made[names["eh_proj"] + ".weight"].T
        layer = names["layer"]
        x = decoder_layer(
            rms(x, made[layer + "input_layernorm.weight"]), x, made, layer, HEADS, DIM
        )
        y = rms(x, made[names["norm"] + ".weight"])
        logits.append(embedding @ y[-1])  # which is the head too
        states = np.concatenate([states, (y if normed else x)[-1:]])
        tokens = [*tokens, token_id]
    return logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_what_the_module_says_of_the_true_states(model, plain, tmp_path, layout):
    names = LAYOUTS[layout]
    folder = with_module(model, tmp_path / "model", tensors(names))
    drafted = run(engine_of(folder, None, "mtp", kv_cache_dtype="f32"), requests(4))
    assert {len(draft) for _, draft in drafted.drafts} >= {2}
    for known, draft in drafted.drafts[::9]:
        true = reference_logits(model, names, known, draft.token_ids, layout == "qwen")
        for token_id, logits in zip(draft.token_ids, true, strict=True):
            assert is_likely(logits, token_id)


def test_answers_are_those_without(model, plain, tmp_path):
    folder = with_module(model, tmp_path / "model", tensors(DEEPSEEK))
    settings_of = [{}, {"max_num_batched_tokens": 9}]
    if sys.platform == "linux":  # where ranks share memory
        settings_of.append({"pipeline_parallel_size": 2, "threads": 2})
    for settings in settings_of:
        drafted = run(engine_of(folder, None, "mtp", **settings), requests())
        assert drafted.token_ids == plain
        assert len(drafted.drafts) > 20


def test_a_module_may_lie_beside_the_model(model, plain, tmp_path):
    folder = with_module(model, tmp_path / "model", tensors(QWEN))
    drafted = run(engine_of(model, folder, "mtp"), requests())
    assert drafted.token_ids == plain
    assert drafted.drafts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_with_a_module_runs_without_it(model, plain, tmp_path, layout):
    folder = with_module(model, tmp_path / "model", tensors(LAYOUTS[layout]))
    assert run(engine_of(folder), requests()).token_ids == plain


def test_layers_that_are_no_module_are_still_left_over(model, tmp_path):
    extra = tensors(DEEPSEEK)
    del extra[DEEPSEEK["eh_proj"] + ".weight"]
    folder = with_module(model, tmp_path / "model", extra)
    with pytest.raises(ModelFileError, match="tensors that a LlamaForCausalLM does not have"):
        engine_of(folder)


def test_a_model_without_a_module_says_so(model):
    with pytest.raises(ConfigError, match="mtp: .* has no MTP module"):
        engine_of(model, None, "mtp")


def test_a_module_of_another_size_is_refused(model, tmp_path):
    made = tensors(QWEN)
    made["mtp.fc.weight"] = np.zeros((HIDDEN, HIDDEN), np.float32)
    folder = with_module(model, tmp_path / "model", made)
    with pytest.raises(ModelFileError, match=r"mtp\.fc\.weight.*shape"):
        engine_of(folder, None, "mtp")
