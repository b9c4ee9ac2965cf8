"""What a model takes, by the planner's ledger."""

from __future__ import annotations

import shutil

import pytest

from octavo.base.errors import ModelFileError
from octavo.llm import LLM
from octavo.server.engine.generation import EngineFacts
from octavo.server.registry.memory_need import MemoryNeed, plan_model
from octavo.settings.engine import EngineArgs

MIB = 1 << 20


def planned(path, *, part=64 * MIB, budget=256 * MIB, **settings):
    return plan_model(EngineArgs.from_kwargs(str(path), **settings), path, part=part, budget=budget)


def test_an_engine_gets_the_pool_that_was_counted(tiny_model):
    found = planned(tiny_model, max_num_seqs=4)
    assert found.args.kv_cache_memory == found.need.kv > 0
    assert "kv_cache_memory" in found.args.given_settings()
    assert found.need.total <= 64 * MIB
    engine = LLM(str(tiny_model), **found.args.given_settings()).engine_info()
    assert engine["kv_blocks"] * engine["block_size"] >= 4 * 256  # all that can be used at once


def test_a_smaller_part_makes_a_smaller_pool_until_one_request_would_not_fit(tiny_model):
    large, small = (planned(tiny_model, part=part * MIB).need for part in (64, 1))
    assert large.kv > small.kv
    least = planned(tiny_model, part=1000).need  # of all that there is, then
    assert least.kv > small.kv
    assert (least.weights, least.activations) == (large.weights, large.activations)


def test_what_was_asked_for_counts_as_it_was_asked_for(tiny_model):
    assert planned(tiny_model, kv_cache_memory="3MiB").need.kv <= 3 * MIB
    blocks = planned(tiny_model, num_blocks=7)
    assert blocks.args.kv_cache_memory is None
    assert 0 < blocks.need.kv < MIB
    swapped = planned(tiny_model, num_blocks=7, swap_space=1.0).need.kv
    assert swapped == blocks.need.kv + (1 << 30)


def test_the_engine_knows_better(tiny_model):
    facts = EngineFacts(64, 8, 97, 10, 4, info={"weights_bytes": 5}, kv_bytes_per_token=2.0)
    assert MemoryNeed(1, 2, 3).corrected_by(facts) == MemoryNeed(5, 80, 3)


def test_numbers_are_said_in_words():
    words = MemoryNeed(1 << 29, 1 << 30, 1 << 28).in_words()
    assert words == "1.75 GiB (weights 0.50, KV 1.00, activations 0.25)"


def test_a_damaged_file_is_an_error_that_names_it(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        planned(folder)
