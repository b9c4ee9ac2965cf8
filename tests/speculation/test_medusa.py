"""Medusa heads: what they draft, that answers do not depend on it, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from loading import load_model
from tiny_heads import (
    HIDDEN,
    TARGET,
    VOCAB,
    engine_of,
    is_likely,
    requests,
    rms,
    run,
    save_head,
    silu,
    true_states,
)

from octavo.base.errors import ConfigError, ModelFileError
from octavo.core.batch import Draft
from octavo.core.drafting import DraftingRequest
from octavo.kernels.cpu import library
from octavo.speculation.draft_tree import DraftTreeShape
from octavo.speculation.head_program import TokenCandidate
from octavo.speculation.medusa import MedusaProposer
from octavo.speculation.state_proposer import LastStates
from tests.conftest import write_tiny_model

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

ROWS, HEADS = 96, 3
CONFIG = {
    "architectures": ["MedusaModel"],
    "hidden_size": HIDDEN,
    "num_heads": HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "truncated_vocab_size": ROWS,
    "octavo": {"tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("medusa") / "tiny", **TARGET)


def tensors(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    made = {"token_map": rng.permutation(VOCAB)[:ROWS].astype(np.int64)}
    for head in range(HEADS):
        made[f"blocks.{head}.layers.0.weight"] = normal(HIDDEN, HIDDEN)
        made[f"blocks.{head}.layers.0.bias"] = normal(HIDDEN)
        made[f"lm_heads.{head}.weight"] = normal(ROWS, HIDDEN)
    return made


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return save_head(tmp_path_factory.mktemp("medusa") / "heads", CONFIG, tensors())


@pytest.fixture(scope="module")
def plain(model):
    return run(engine_of(model), requests()).token_ids


def reference_logits(model, known: list[int], head: int) -> np.ndarray:
    """Of the shortlist, as the paper has it, from the true hidden state."""
    made = tensors()
    norm = load_model(model).model.model.norm.weight.value
    x = rms(true_states(model, known[:-1], [TARGET["num_hidden_layers"]])[0][-1], norm)
    x = x + silu(made[f"blocks.{head}.layers.0.weight"] @ x + made[f"blocks.{head}.layers.0.bias"])
    return made[f"lm_heads.{head}.weight"] @ x


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 9}, {"max_num_seqs": 2, "gpu_memory_utilization": 0.5}],
)
def test_answers_are_those_without(model, heads, plain, settings):
    drafted = run(engine_of(model, heads, "medusa", **settings), requests())
    assert drafted.token_ids == plain
    assert len(drafted.drafts) > 20


def test_drafts_are_what_the_heads_say_of_the_true_states(model, heads):
    drafted = run(engine_of(model, heads, "medusa", kv_cache_dtype="f32"), requests(3))
    row_of = {int(token): row for row, token in enumerate(tensors()["token_map"])}
    for known, draft in drafted.drafts[::7]:
        assert draft.parents == tuple(range(-1, len(draft) - 1))
        for head, token_id in enumerate(draft.token_ids):
            assert is_likely(reference_logits(model, known, head), row_of[token_id])


def test_a_chain_ends_where_it_is_unlikely(model, heads):
    lengths = {}
    for least in (0.0, 0.2, 1.0):
        engine = engine_of(model, heads, "medusa", speculation={"min_probability": least})
        lengths[least] = [len(draft) for _, draft in run(engine, requests(3)).drafts]
    assert set(lengths[0.0]) <= {1, 2, HEADS} and HEADS in lengths[0.0]
    assert 0 < sum(lengths[0.2]) < sum(lengths[0.0])
    assert not lengths[1.0]


def test_fewer_tokens_than_heads(model, heads, plain):
    engine = engine_of(model, heads, "medusa", speculation={"num_speculative_tokens": 1})
    drafted = run(engine, requests())
    assert drafted.token_ids == plain
    assert {len(draft) for _, draft in drafted.drafts} == {1}


def test_a_head_that_is_no_number_costs_nothing_but_time(model, plain, tmp_path):
    broken = tensors()
    broken["lm_heads.1.weight"][5] = np.nan
    broken["blocks.2.layers.0.bias"][:] = np.inf
    folder = save_head(tmp_path / "heads", CONFIG, broken)
    drafted = run(engine_of(model, folder, "medusa"), requests())
    assert drafted.token_ids == plain
    assert {len(draft) for _, draft in drafted.drafts} == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size of 32, and .* one of 64"),
        ({"vocab_size": 261}, "vocab_size of 261, and .* one of 260"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "medusa serves MedusaModel, and .* has a Ll",
        ),
        ({"num_heads": 4}, r"blocks\.3\.layers\.0\.weight.* missing"),
        ({"num_heads": 2}, "tensors that no such head has"),
        ({"truncated_vocab_size": 95}, "token_map.*96 tokens for 95 rows"),
        ({"octavo": {"tree": [[0, 0]]}}, "tree.*does not extend a path"),
        ({"octavo": {"tree": [[0], ["x"]]}}, "tree"),
    ],
)
def test_heads_that_do_not_fit_are_refused(model, tmp_path, changes, message):
    folder = save_head(tmp_path / "heads", CONFIG | changes, tensors())
    with pytest.raises((ConfigError, ModelFileError), match=message):
        engine_of(model, folder, "medusa")


def test_a_token_that_the_model_has_not_is_refused(model, tmp_path):
    made = tensors()
    made["token_map"][3] = VOCAB
    folder = save_head(tmp_path / "heads", CONFIG, made)
    with pytest.raises(ModelFileError, match="outside of a vocabulary of 260"):
        engine_of(model, folder, "medusa")


def test_reference_ops_are_refused(model, heads):
    with pytest.raises(ConfigError, match="medusa needs the native CPU kernels"):
        engine_of(model, heads, "medusa", kernels="reference")


class SaidBefore:
    """In place of a head's program: the same tokens for all rows, in the order of their ids."""

    def __init__(self, first: int):
        self._first = first
        self._input = np.zeros((8, HIDDEN), np.float32)

    def input(self, name):
        return self._input

    def run(self, num_rows, rows, num_top):
        best = [TokenCandidate(self._first + rank, -1.0) for rank in range(num_top)]
        return [best if row else [] for row in rows]  # the numbers of the first row are none


def test_a_tree_has_the_tokens_of_the_heads_at_its_nodes():
    tree = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]
    programs = [SaidBefore(10), SaidBefore(20), SaidBefore(30)]
    token_ids = np.arange(100) + 1000
    proposer = MedusaProposer(
        programs, token_ids, LastStates(4), tree, DraftTreeShape(6, 3, 1, 1, 0.0)
    )
    openings = [DraftingRequest(request, 6) for request in requests(2)]
    drafts = proposer.draft(openings, np.zeros((2, HIDDEN), np.float32))
    assert drafts == {
        "r1": Draft((1010, 1011, 1020, 1021, 1020, 1030), (-1, -1, 0, 0, 1, 3)),
    }
