"""EAGLE-3 heads: what they draft over the whole context, and that answers do not depend on it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from tiny_heads import (
    HIDDEN,
    TARGET,
    VOCAB,
    decoder_layer,
    embedding_of,
    engine_of,
    is_likely,
    requests,
    rms,
    run,
    save_head,
    true_states,
)

from octavo.base.errors import ConfigError, ModelFileError
from octavo.kernels.cpu import library
from tests.conftest import write_tiny_model

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux alone")

ROWS, INNER, HEADS, KV_HEADS, DIM, EPS = 96, 96, 4, 2, 16, 1e-5
LAYERS = [1, 2, 4]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "draft_vocab_size": ROWS,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "eagle_aux_hidden_state_layer_ids": LAYERS,
    "norm_before_residual": False,
}


def tensors(*, embedding: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    tokens = np.sort(rng.permutation(VOCAB)[:ROWS])
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    made = {
        "d2t": (tokens - np.arange(ROWS)).astype(np.int64),
        "t2d": np.isin(np.arange(VOCAB), tokens),
        "fc.weight": normal(HIDDEN, len(LAYERS) * HIDDEN),
        "norm.weight": 1 + normal(HIDDEN),
        "lm_head.weight": normal(ROWS, HIDDEN),
        attention + "q_proj.weight": normal(HEADS * DIM, 2 * HIDDEN),
        attention + "k_proj.weight": normal(KV_HEADS * DIM, 2 * HIDDEN),
        attention + "v_proj.weight": normal(KV_HEADS * DIM, 2 * HIDDEN),
        attention + "o_proj.weight": normal(HIDDEN, HEADS * DIM),
        mlp + "gate_proj.weight": normal(INNER, HIDDEN),
        mlp + "up_proj.weight": normal(INNER, HIDDEN),
        mlp + "down_proj.weight": normal(HIDDEN, INNER),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made[f"midlayer.{norm}.weight"] = 1 + normal(HIDDEN)
    if embedding:
        made["embed_tokens.weight"] = normal(VOCAB, HIDDEN)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("eagle") / "tiny", **TARGET)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return save_head(tmp_path_factory.mktemp("eagle") / "heads", CONFIG, tensors())


@pytest.fixture(scope="module")
def plain(model):
    return run(engine_of(model), requests()).token_ids


def reference_logits(
    model, made: dict[str, np.ndarray], known: list[int], drafted: tuple[int, ...], before: bool
) -> list[np.ndarray]:
    """Of the head's rows for each drafted token, all positions at once and without a cache."""
    states = true_states(model, known[:-1], LAYERS)
    features = np.concatenate(states, axis=1) @ made["fc.weight"].T
    embedding = made.get("embed_tokens.weight", embedding_of(model))
    tokens, logits = known[1:], []
    for token_id in drafted:
        e = rms(embedding[tokens], made["midlayer.input_layernorm.weight"], EPS)
        f = rms(features, made["midlayer.hidden_norm.weight"], EPS)
        x = decoder_layer(
            np.concatenate([e, f], axis=1), f if before else features, made, "midlayer.", HEADS, DIM
        )
        logits.append(rms(x[-1], made["norm.weight"], EPS) @ made["lm_head.weight"].T)
        features, tokens = np.concatenate([features, x[-1:]]), [*tokens, token_id]
    return logits


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"enable_prefix_caching": False},
        pytest.param({"tensor_parallel_size": 2, "threads": 2}, marks=ON_LINUX),
    ],
)
def test_answers_are_those_without(model, heads, plain, settings):
    drafted = run(engine_of(model, heads, "eagle", **settings), requests())
    assert drafted.token_ids == plain
    assert len(drafted.drafts) > 20


@pytest.mark.parametrize(("before", "embedding"), [(False, False), (True, True)])
@pytest.mark.parametrize("budget", [11, 64])
def test_drafts_are_what_the_head_says_of_the_true_states(
    model, tmp_path, before, embedding, budget
):
    made = tensors(embedding=embedding)
    folder = save_head(tmp_path / "heads", CONFIG | {"norm_before_residual": before}, made)
    settings = {"kv_cache_dtype": "f32", "enable_prefix_caching": False}
    engine = engine_of(model, folder, "eagle", max_num_batched_tokens=budget, **settings)
    drafted = run(engine, requests(4))
    rows = {int(token): row for row, token in enumerate(made["d2t"] + np.arange(ROWS))}
    assert {len(draft) for _, draft in drafted.drafts} >= {2, 3}
    for known, draft in drafted.drafts[::11]:
        true = reference_logits(model, made, known, draft.token_ids, before)
        for token_id, logits in zip(draft.token_ids, true, strict=True):
            assert is_likely(logits, rows[token_id])


def test_a_prefix_that_another_request_has_computed_is_of_use(model, heads):
    """Its keys and values are there: drafts are those of a request that computed it itself."""
    drafts = []
    for cached in (True, False):
        engine = engine_of(model, heads, "eagle", enable_prefix_caching=cached)
        first, second = requests(2)
        second.prompt_token_ids[:] = first.prompt_token_ids[:]
        second.token_ids[:] = first.token_ids[:]
        run(engine, [first])
        drafts.append(run(engine, [second]).drafts)
        assert (second.stats.num_cached_tokens > 0) == cached
    same = [a[1].token_ids == b[1].token_ids for a, b in zip(*drafts, strict=True)]
    assert sum(same) >= 0.9 * len(same)


def test_a_layer_that_gives_no_numbers_costs_nothing_but_time(model, plain, tmp_path):
    broken = tensors()
    broken["midlayer.self_attn.v_proj.weight"][0] = np.nan
    folder = save_head(tmp_path / "heads", CONFIG, broken)
    drafted = run(engine_of(model, folder, "eagle"), requests())
    assert drafted.token_ids == plain
    assert not drafted.drafts


def test_its_keys_and_values_count_as_memory(model, heads):
    engine = engine_of(model, heads, "eagle")
    layer = engine.scheduler.proposer.proposer._kv_cache
    assert layer.num_blocks == engine.scheduler.block_manager.num_blocks
    assert layer.num_bytes == layer.num_blocks * 16 * KV_HEADS * DIM * 2 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size of 32"),
        ({"vocab_size": 300}, "vocab_size of 300"),
        ({"draft_vocab_size": 90}, "d2t.*96 tokens for 90 rows"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc\.weight"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "eagle_aux_hidden_state_layer_ids"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight.*shape"),
        ({"architectures": ["MedusaModel"]}, "eagle serves .* has a MedusaModel"),
    ],
)
def test_heads_that_do_not_fit_are_refused(model, tmp_path, changes, message):
    folder = save_head(tmp_path / "heads", CONFIG | changes, tensors())
    with pytest.raises((ConfigError, ModelFileError), match=message):
        engine_of(model, folder, "eagle")
