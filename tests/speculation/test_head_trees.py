"""Trees of heads: answers are those without, what is right of a tree is kept, and drafts go on."""

from __future__ import annotations

import random

import pytest
from tiny_heads import TARGET, engine_of, is_likely, requests, run, save_head

from octavo.core.batch import Draft
from octavo.kernels.cpu import library
from tests.conftest import write_tiny_model
from tests.runtime import test_hidden_states as following
from tests.speculation import test_eagle, test_medusa, test_redrafter

pytestmark = pytest.mark.skipif(not library.runnable(), reason="no native library was built")

METHODS = {"medusa": test_medusa, "recurrent": test_redrafter, "eagle": test_eagle}
NODES = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("trees") / "tiny", **TARGET)


@pytest.fixture(scope="module")
def plain(model):
    return run(engine_of(model), requests(8)).token_ids


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_without(model, plain, method, tmp_path):
    kind = METHODS[method]
    config = {"octavo": {"acceptance": [0.3, 0.2]}, **kind.CONFIG}
    folder = save_head(tmp_path / "heads", config, kind.tensors())
    engine = engine_of(model, folder, method, speculation={"num_speculative_tokens": NODES})
    drafted = run(engine, requests(8))
    assert drafted.token_ids == plain
    trees = [draft for _, draft in drafted.drafts if draft.parents != tuple(range(-1, NODES - 1))]
    assert len(trees) > 20
    assert max(map(len, trees)) == NODES


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_of_a_tree_the_path_that_was_right_is_seen(kernels, tmp_path):
    model = write_tiny_model(tmp_path / "tiny", **TARGET)
    load, drain, engine_with = following.load, following.drain, following.engine_with
    plain = drain(engine_with(load(model, kernels), following.Recorder()))
    truth = {tuple(r.prompt_token_ids): r.token_ids for r in plain}
    rng = random.Random(2)

    def propose(prompt, position):
        """The right tokens among wrong ones, in no order of the path's."""
        right = truth[tuple(prompt)][position : position + 3]
        token_ids, parents, at = [], [], -1
        for token_id in right:
            wrong = (token_id + 1) % 256
            pair = [(token_id, at), (wrong, at)]
            rng.shuffle(pair)
            for each, parent in pair:
                token_ids.append(each)
                parents.append(parent)
            at = len(token_ids) - 2 + pair.index((token_id, parents[-1]))
        return Draft(tuple(token_ids), tuple(parents)) if right else None

    recorder = following.Recorder()
    for request in drain(engine_with(load(model, kernels), recorder, propose)):
        assert request.token_ids == truth[tuple(request.prompt_token_ids)]
        following.check(model, request, recorder)


def test_drafts_after_a_tree_are_of_the_true_states(model, tmp_path):
    kind = test_eagle
    config = {"octavo": {"acceptance": [0.3, 0.2]}, **kind.CONFIG}
    folder = save_head(tmp_path / "heads", config, kind.tensors())
    settings = {"kv_cache_dtype": "f32", "speculation": {"num_speculative_tokens": NODES}}
    drafted = run(engine_of(model, folder, "eagle", **settings), requests(4))
    made = kind.tensors()
    rows = {int(token): row for row, token in enumerate(made["d2t"] + range(kind.ROWS))}
    for known, draft in drafted.drafts[::8]:
        children = [i for i, parent in enumerate(draft.parents) if parent >= 0]
        first = draft.token_ids[draft.parents[children[0]] if children else 0]
        second = draft.token_ids[children[0]] if children else first
        true = kind.reference_logits(model, made, known, (first, second), before=False)
        assert is_likely(true[0], rows[first])
        assert not children or is_likely(true[1], rows[second])
