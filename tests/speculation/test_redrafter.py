"""The recurrent head: what it drafts, that answers do not depend on it, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_heads import (
    HIDDEN,
    TARGET,
    VOCAB,
    embedding_of,
    engine_of,
    is_likely,
    last_norm_of,
    requests,
    rms,
    run,
    save_head,
    silu,
    true_states,
)

from octavo.base.errors import ConfigError, ModelFileError
from octavo.kernels.cpu import library
from tests.conftest import write_tiny_model

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

ROWS, INNER, EPS = 96, 96, 1e-5
CONFIG = {
    "architectures": ["OctavoRecurrentDraft"],
    "model_type": "octavo_recurrent_draft",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "draft_vocab_size": ROWS,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "octavo": {"acceptance": [0.3, 0.2, 0.1]},
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    made = {"token_map": np.sort(rng.permutation(VOCAB)[:ROWS]).astype(np.int64)}
    made["embed_norm.weight"] = 1 + normal(HIDDEN)
    made["lm_head.weight"] = normal(ROWS, HIDDEN)
    for layer, width in ((0, 2 * HIDDEN), (1, HIDDEN)):
        made[f"layers.{layer}.input_norm.weight"] = 1 + normal(HIDDEN)
        made[f"layers.{layer}.gate_proj.weight"] = normal(INNER, width)
        made[f"layers.{layer}.up_proj.weight"] = normal(INNER, width)
        made[f"layers.{layer}.down_proj.weight"] = normal(HIDDEN, INNER)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("recurrent") / "tiny", **TARGET)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return save_head(tmp_path_factory.mktemp("recurrent") / "heads", CONFIG, tensors())


@pytest.fixture(scope="module")
def plain(model):
    return run(engine_of(model), requests()).token_ids


def reference_logits(model, known: list[int], drafted: tuple[int, ...]) -> list[np.ndarray]:
    """Of the shortlist, after the last known token and after each drafted one but the last."""
    made = tensors()
    state = true_states(model, known[:-1], [TARGET["num_hidden_layers"]])[0][-1]
    state = rms(state, last_norm_of(model))
    logits = []
    for token_id in (known[-1], *drafted[:-1]):
        e = rms(embedding_of(model)[token_id], made["embed_norm.weight"], EPS)
        for layer in (0, 1):
            x = rms(state, made[f"layers.{layer}.input_norm.weight"], EPS)
            x = np.concatenate([x, e]) if layer == 0 else x
            gate, up, down = (
                made[f"layers.{layer}.{n}_proj.weight"] for n in ("gate", "up", "down")
            )
            state = state + down @ (silu(gate @ x) * (up @ x))
        logits.append(made["lm_head.weight"] @ state)
    return logits


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 3}])
def test_answers_are_those_without(model, heads, plain, settings):
    drafted = run(engine_of(model, heads, "recurrent", **settings), requests())
    assert drafted.token_ids == plain
    assert len(drafted.drafts) > 20


def test_drafts_are_what_the_head_says_of_the_true_states(model, heads):
    drafted = run(engine_of(model, heads, "recurrent", kv_cache_dtype="f32"), requests(4))
    row_of = {int(token): row for row, token in enumerate(tensors()["token_map"])}
    assert max(len(draft) for _, draft in drafted.drafts) == 3
    for known, draft in drafted.drafts[::9]:
        for token_id, logits in zip(
            draft.token_ids, reference_logits(model, known, draft.token_ids), strict=True
        ):
            assert is_likely(logits, row_of[token_id])


def test_a_state_that_is_no_number_ends_the_draft(model, plain, tmp_path):
    broken = tensors()
    broken["layers.1.down_proj.weight"][:] = np.nan
    folder = save_head(tmp_path / "heads", CONFIG, broken)
    drafted = run(engine_of(model, folder, "recurrent"), requests())
    assert drafted.token_ids == plain
    assert not drafted.drafts


@pytest.mark.parametrize(
    ("method", "message"), [("medusa", "has a OctavoRecurrentDraft"), ("eagle", "eagle serves")]
)
def test_another_method_says_whose_heads_these_are(model, heads, method, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(model, heads, method)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 64}, r"layers\.0\.gate_proj.*shape is \[96, 128\], not \[64, 128\]"),
        ({"num_hidden_layers": 1}, "tensors that no such head has"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"draft_vocab_size": 95}, "token_map"),
    ],
)
def test_heads_that_do_not_fit_are_refused(model, tmp_path, changes, message):
    folder = save_head(tmp_path / "heads", CONFIG | changes, tensors())
    with pytest.raises((ConfigError, ModelFileError), match=message):
        engine_of(model, folder, "recurrent")
