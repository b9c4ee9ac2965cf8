"""Where the memory of a GPU goes: of a fake one that has as many bytes as a test says."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loading import load_config

from octavo.base.errors import ConfigError
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.kernels.cuda.sampling import LOGPROB_WORDS, RECORD_WORDS
from octavo.models.kv_groups import KVGroups
from octavo.runtime import device_memory
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.memory_ledger import (
    GRAPHS,
    KV,
    WEIGHTS,
    MemoryUse,
    activations_line,
    check_weights,
    graphs_line,
    open_ledger,
    tokens_line,
)
from octavo.runtime.rank import Rank
from octavo.settings.engine import EngineArgs, resolve

MIB, GIB = 1 << 20, 1 << 30
PLANNED = (activations_line(300 * MIB), tokens_line(128 * MIB), graphs_line(9))


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
    assert "not suffice for KV cache: 0.96 GiB are missing" in said
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
    """Whose weights are there, and for whose forward pass there is no memory."""

    name, isa, pool = "fake", None, None
    has_window_tables = True
    has_sinks = False
    most_kv_layers = None
    weights_bytes = 2 * GIB

    def planned_memory(self):
        return PLANNED

    def create_forward(self, limits, depths=()):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")


@pytest.fixture
def rank(tiny_model, monkeypatch):
    """On a fake GPU of 4 GiB, of which others have one eighth."""
    use = MemoryUse(4 * GIB, 4 * GIB - 2 * GIB - GIB // 2, 2 * GIB)
    monkeypatch.setattr(device_memory, "device_memory", lambda device: use)
    spec = RankSpec(tiny_model, device="cuda", dtype="bfloat16")
    return Rank(spec, load_config(tiny_model), FakeBackend())


def test_an_engine_is_sized_by_the_ledger(rank, tiny_model):
    capacity = rank.capacity
    assert capacity.ledger is not None
    planned = sum(line.num_bytes for line in PLANNED)
    left = int(0.9 * 4 * GIB) - 2 * GIB - GIB // 2 - planned
    assert capacity.kv_memory_bytes == capacity.ledger.kv_bytes == left
    config = resolve(EngineArgs(model=str(tiny_model)), capacity)
    assert any("KV cache" in choice for choice in config.choices)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(rank):
    num_blocks = 2 * GIB // (16 * rank.capacity.kv_bytes_per_token)
    limits = RankLimits(num_blocks, 4, 64, 32)
    with pytest.raises(ConfigError, match="not suffice for KV cache: a pool of 2.00 GiB"):
        rank.start(limits)


def test_a_block_of_some_layers_takes_less_of_the_pool(rank):
    """As where groups of layers have block tables of their own: here, each layer is a group."""
    num_layers = rank.model_config.num_layers
    alone = KVGroups((None,) * num_layers, tuple((layer, 0) for layer in range(num_layers)), 1)
    num_blocks = GIB // (16 * rank.capacity.kv_bytes_per_token)
    with pytest.raises(ConfigError, match="CUDA out of memory"):  # of the fake; the pool fits
        rank.start(RankLimits(num_blocks, 4, 64, 32, alone))
    with pytest.raises(ConfigError, match="a pool of 1.00 GiB"):
        rank.start(RankLimits(num_layers * num_blocks, 4, 64, 32, alone))


def test_what_the_ledger_did_not_foresee_is_told_by_it(rank):
    with pytest.raises(ConfigError, match="not suffice for KV cache: CUDA out of memory"):
        rank.start(RankLimits(4, 4, 64, 32))


class Greedy:
    """A runner whose steps want more memory than there is: at once, or when they end."""

    ready_at, forward = None, SimpleNamespace(depth=1)

    def __init__(self, at_once):
        self.at_once = at_once

    def submit(self, batch):
        return self.result() if self.at_once else self

    def result(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_step_without_memory_ends_its_request_by_the_ledger(rank, monkeypatch, at_once):
    monkeypatch.setattr(FakeBackend, "create_forward", lambda *_: SimpleNamespace())
    rank.start(RankLimits(4, 4, 64, 32))
    rank.runner = Greedy(at_once)
    engine = Engine(
        Scheduler(SchedulerConfig(32, 4, 64), BlockManager(4, 16, RadixPrefixCache(16))),
        rank,
    )
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=2), 0.0)
    engine.add(request)
    engine.step()
    assert request.error is not None
    assert "not suffice for a step: CUDA out of memory; of 4.00 GiB" in request.error
    assert "to KV cache: try a smaller --gpu-memory-utilization" in request.error
    assert "--max-num-batched-tokens" in request.error


# -- what a fused engine plans, against what it makes ----------------------------------------------


def tensors() -> list[torch.Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def bytes_made(work) -> int:
    """Of the memory of tensors that are still there when ``work`` is done, and were not before."""
    before = {each.untyped_storage()._cdata for each in tensors()}
    kept = work()
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors()}
    assert kept is not None
    return sum(each.nbytes() for key, each in storages.items() if key not in before)


def test_what_is_planned_is_what_is_made(tiny_model):
    """On the CPU, by the twin of the GPU's kernels: the same tensors but for their scratch."""
    spec = RankSpec(
        tiny_model,
        kernels="fused",
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_model_len=128,
    )
    rank = Rank.load(spec)
    backend = rank.backend
    planned = sum(line.num_bytes for line in backend.planned_memory() if line.name != GRAPHS)
    limits = RankLimits(1, 6, 128, 48)
    made = bytes_made(lambda: backend.create_forward(limits))
    kv_cache = 16 * rank.capacity.kv_bytes_per_token
    # The host has copies of inputs and results, for two steps in flight.
    assert planned <= made - kv_cache <= planned + 2 * planned // 5


def test_an_early_exit_takes_memory_for_its_inputs_alone(tiny_model):
    """Which is not planned: it comes and goes with speculation."""
    spec = RankSpec(tiny_model, kernels="fused", max_model_len=128, async_scheduling=False)
    rank, limits = Rank.load(spec), RankLimits(4, 64, 128, 2048)
    rank.start(limits)
    made = bytes_made(lambda: rank.forward.exit_after(1))
    on_the_device = 4 * rank.forward._inputs.num_words
    of_the_host = on_the_device + 4 * (2 + LOGPROB_WORDS + 1) * 2048 + 4 * RECORD_WORDS * 64
    assert made <= 1.1 * on_the_device + 2 * of_the_host
    assert rank.forward.exit_after(1).depth == 1  # as its model


def test_more_tokens_or_rows_take_more_of_their_own_line(tiny_model):
    def lines(**sizes):
        spec = RankSpec(tiny_model, kernels="fused", max_model_len=128, **sizes)
        return {line.name: line.num_bytes for line in Rank.load(spec).backend.planned_memory()}

    small = lines(max_num_seqs=8, max_num_batched_tokens=512)
    wide = lines(max_num_seqs=8, max_num_batched_tokens=1024)
    many = lines(max_num_seqs=512, max_num_batched_tokens=512)
    values, tokens = activations_line(0).name, tokens_line(0).name
    assert wide[values] > 1.5 * small[values]
    assert many[tokens] > 1.5 * small[tokens]
    assert many[values] < 1.2 * small[values]


NO_MORE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", NO_MORE, ids=str)
def test_a_gpu_that_has_no_more_answers_by_its_ledger(error):
    """Whoever asked it: PyTorch, a library that it calls, or Triton."""

    def allocate():
        raise error

    said = re.escape(str(error).partition("\n")[0].partition(". ")[0])
    with (
        pytest.raises(ConfigError, match=rf"not suffice for weights: {said}; of 24"),
        device_memory.explain_out_of_memory(WEIGHTS, ledger_of),
    ):
        allocate()


def test_what_else_goes_wrong_stays_what_it_is():
    def launch():
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with (
        pytest.raises(RuntimeError, match="illegal memory access"),
        device_memory.explain_out_of_memory(WEIGHTS, ledger_of),
    ):
        launch()
