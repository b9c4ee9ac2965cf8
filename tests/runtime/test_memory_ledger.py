"""Where the memory of a GPU goes: of a fake one that has as many bytes as a test says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineArgs, resolve
from octavo.errors import ConfigError
from octavo.models.loader import load_config
from octavo.runtime import torch_backend
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.memory_ledger import (
    GRAPHS,
    KV,
    WEIGHTS,
    MemoryUse,
    activations_line,
    check_weights,
    graphs_line,
    logits_line,
    open_ledger,
)
from octavo.runtime.rank import Rank

MIB, GIB = 1 << 20, 1 << 30
PLANNED = (activations_line(300 * MIB), logits_line(256, 1 << 17), graphs_line(256))


def ledger_of(total: int = 24 * GIB, weights: int = 15 * GIB, others: int = GIB, own: int = 0):
    """Of a fake GPU on which there are weights, other tensors of ours, and other programs."""
    own += weights
    return open_ledger(MemoryUse(total, total - own - others, own), 0.9, weights, PLANNED)


@given(
    *(st.integers(0, 1 << 40) for _ in range(4)),
    st.floats(0.1, 1.0),
)
def test_every_byte_is_on_one_line(free, weights, own, others, utilization):
    total = free + weights + own + others
    use = MemoryUse(total, free, weights + own)
    ledger = open_ledger(use, utilization, weights, PLANNED)
    planned = sum(line.num_bytes for line in PLANNED)
    assert ledger.taken_bytes - planned == total - free
    assert ledger.kv_bytes == int(utilization * total) - ledger.taken_bytes


def test_logits_are_the_rows_that_are_sampled_once():
    assert logits_line(256, 128_256).num_bytes == 256 * 128_256 * 4


def test_what_was_estimated_is_replaced_by_what_was_measured():
    before = ledger_of()
    after = before.with_measured(GRAPHS, 200 * MIB)
    assert after.kv_bytes == before.kv_bytes + graphs_line(256).num_bytes - 200 * MIB
    assert {line.name: line.known for line in after.lines}[GRAPHS] == "measured"


def test_it_is_told_line_by_line():
    ledger = ledger_of()
    told = "\n".join(ledger.described(ledger.kv_bytes))
    for name in (*(line.name for line in ledger.lines), KV):
        assert name in told
    said = ledger.as_json(ledger.kv_bytes)
    sizes = {line["name"]: line["bytes"] for line in said["lines"]}
    assert sizes[WEIGHTS] == 15 * GIB
    assert said["kv_bytes"] + sum(sizes.values()) == said["usable_bytes"]


def test_weights_that_do_not_fit_are_refused_before_they_are_copied():
    check_weights(MemoryUse(24 * GIB, 16 * GIB, 0), 16 * GIB)
    with pytest.raises(ConfigError) as refused:
        check_weights(MemoryUse(24 * GIB, 15 * GIB, 0), 16 * GIB)
    said = str(refused.value)
    assert "not suffice for weights: they take 16.00 GiB, and 15.00 GiB are free" in said
    assert "octavo quantize" in said and "ending other programs" in said


def test_no_room_for_keys_and_values_names_lines_and_flags():
    ledger = ledger_of(weights=21 * GIB)
    with pytest.raises(ConfigError) as refused:
        ledger.check_first_block(2 * MIB)
    said = str(refused.value)
    assert "not suffice for keys and values: 0.96 GiB are missing" in said
    assert "21.00 GiB to weights" in said and "--gpu-memory-utilization" in said
    for flag in ("--max-num-batched-tokens", "--max-num-seqs", "--enforce-eager"):
        assert flag in said


def test_a_pool_asked_for_by_size_may_use_all_but_what_others_need():
    ledger = ledger_of()
    room = ledger.total_bytes - ledger.taken_bytes
    ledger.check_pool(room)  # beyond the utilization
    with pytest.raises(ConfigError, match=r"a pool of 9.* try a smaller --kv-cache-memory"):
        ledger.check_pool(room + GIB * 2)


class FakeBackend:
    """Whose weights are there; what it is to allocate is never reached."""

    name, isa, pool = "fake", None, None
    weights_bytes = 2 * GIB

    def planned_memory(self):
        return PLANNED

    def create_forward(self, limits, depths=()):
        raise AssertionError("memory is checked before anything is allocated")


@pytest.fixture
def rank(tiny_model, monkeypatch):
    """On a fake GPU of 4 GiB, of which others have one eighth."""
    use = MemoryUse(4 * GIB, 4 * GIB - 2 * GIB - GIB // 2, 2 * GIB)
    monkeypatch.setattr(torch_backend, "device_memory", lambda device: use)
    spec = RankSpec(tiny_model, device="cuda", dtype="bfloat16")
    return Rank(spec, load_config(tiny_model), FakeBackend())


def test_an_engine_is_sized_by_the_ledger(rank, tiny_model):
    capacity = rank.capacity
    assert capacity.ledger is not None
    planned = sum(line.num_bytes for line in PLANNED)
    left = int(0.9 * 4 * GIB) - 2 * GIB - GIB // 2 - planned
    assert capacity.kv_memory_bytes == capacity.ledger.kv_bytes == left
    config = resolve(EngineArgs(model=str(tiny_model)), capacity)
    assert any("keys and values" in choice for choice in config.choices)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(rank):
    num_blocks = 2 * GIB // (16 * rank.capacity.kv_bytes_per_token)
    limits = RankLimits(num_blocks, 4, 64, 32)
    with pytest.raises(ConfigError, match="not suffice for keys and values: a pool of 2.00 GiB"):
        rank.start(limits)
