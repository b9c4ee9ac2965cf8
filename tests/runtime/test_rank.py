"""A rank: loaded, asked what fits, started, run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from loading import load_config, load_model

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cpu import abi, library
from octavo.kernels.fused_ops import CannotFuse
from octavo.runtime import backends, device_memory, torch_backend
from octavo.runtime.backends import why_not_fused
from octavo.runtime.capacity import RankLimits, RankSpec, capacity_of
from octavo.runtime.cuda_backend import FusedBackend
from octavo.runtime.cuda_components import PlainComponents
from octavo.runtime.op_program import StepPlan
from octavo.runtime.rank import Rank
from tests.conftest import write_tiny_model

LIMITS = RankLimits(num_blocks=4, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=32)
KERNELS = [
    "reference",
    "fused",
    pytest.param("native", marks=pytest.mark.skipif(not library.runnable(), reason="not built")),
]


@pytest.mark.parametrize("kernels", KERNELS)
def test_it_loads_says_what_fits_and_runs_a_batch(tiny_model, kernels):
    progress = []
    spec = RankSpec(tiny_model, kernels=kernels, threads=1)
    rank = Rank.load(spec, progress=lambda *at: progress.append(at))
    assert rank.kernels == kernels and (rank.isa is None) == (kernels != "native")
    assert progress and progress[-1][0] == progress[-1][1]
    assert rank.weights_bytes > 0 and rank.capacity.kv_memory_bytes > 0
    rank.start(LIMITS)
    assert rank.kv_capacity() == 4

    request = Request("r", [1, 2, 3], SamplingParams(temperature=0), 0.0)
    request.block_ids = [3]
    output = rank.run(Batch(0, (ScheduledRequest(request, 0, 3, 1),)))
    assert list(output.token_ids) == ["r"] and not output.errors
    probe = rank.probe()
    assert probe.isa == rank.isa
    assert probe.kv_bytes_per_token == rank.capacity.kv_bytes_per_token
    rank.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "f32", "bf16", "int8", "fp8", "int4", "k8v4"])
def test_capacity_needs_no_weights(tiny_model, kernels, kv_cache_dtype):
    spec = RankSpec(tiny_model, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
    rank = Rank.load(spec)
    loaded = rank.capacity
    computed = capacity_of(
        spec,
        load_config(tiny_model),
        is_native=kernels == "native",
        kv_memory_bytes=loaded.kv_memory_bytes,
        kv_memory_most=loaded.kv_memory_most,
        has_window_tables=rank.backend.has_window_tables,
        has_sinks=rank.backend.has_sinks,
    )
    assert computed == loaded


def test_capacity_needs_no_torch():
    modules = "octavo.runtime.capacity, octavo.settings.engine"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_cannot_be_had_is_said(tiny_model, monkeypatch):
    with pytest.raises(ConfigError, match="activations int16 needs the native CPU kernels"):
        Rank.load(RankSpec(tiny_model, kernels="reference", activations="int16"))
    with pytest.raises(ConfigError, match="batch_invariant: on a CPU products in bfloat16"):
        Rank.load(RankSpec(tiny_model, dtype="bfloat16", kernels="reference", batch_invariant=True))
    with pytest.raises(ConfigError, match="kernels native: block_size 24 is not a multiple of 16"):
        Rank.load(RankSpec(tiny_model, kernels="native", block_size=24))
    assert "8 bits by rows" in (why_not_fused(RankSpec(tiny_model, activations="mixed")) or "")
    assert why_not_fused(RankSpec(tiny_model, activations="int16")) is None
    in_8_bits = RankSpec(tiny_model, "cuda", "bfloat16", activations="int8")
    assert "not with batch_invariant" in (
        why_not_fused(replace(in_8_bits, batch_invariant=True)) or ""
    )
    monkeypatch.setattr(backends, "find_spec", lambda name: True)
    monkeypatch.setattr(backends, "has_python_headers", lambda: True)
    assert why_not_fused(in_8_bits) is None
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert "octavo[gpu]" in (why_not_fused(RankSpec(tiny_model, "cuda")) or "")
    with pytest.raises(ConfigError, match="kernels fused: activations int8 needs the native CPU"):
        Rank.load(RankSpec(tiny_model, kernels="fused", activations="int8"))


@pytest.mark.parametrize(("multiplied_as", "is_told"), [("bfloat16", True), ("int8", False)])
def test_activations_that_no_weight_takes_in_8_bits_are_told(
    tiny_model, multiplied_as, is_told, monkeypatch, caplog
):
    components = PlainComponents(torch.float32)
    monkeypatch.setattr(components, "multiplied_as", lambda weight: getattr(torch, multiplied_as))
    config = load_config(tiny_model)
    spec = RankSpec(tiny_model, activations="int8")
    FusedBackend(spec, load_model(tiny_model)[0], config, components=components)
    assert ("activations int8 change nothing" in caplog.text) == is_told


class BrokenGpuComponents(PlainComponents):
    """Says what Triton would, where a kernel is launched."""

    compiles = True

    def __init__(self, error: Exception):
        super().__init__(torch.float32)
        self._error = error

    def create_ops(self, *args):
        ops = super().create_ops(*args)

        def fail(*_) -> None:
            raise self._error

        ops.norm = fail
        return ops


FAILURES = [
    (RuntimeError("PTXAS error: Internal Triton PTX codegen error\nptxas fatal: sm_999"), "PTXAS"),
    (subprocess.CalledProcessError(1, ["gcc"]), "CalledProcessError: .*gcc"),
    (AssertionError("libcuda.so cannot found!"), "AssertionError: libcuda.so cannot found"),
]


@pytest.mark.parametrize(("error", "told"), FAILURES)
def test_kernels_that_do_not_run_are_found_before_anything_is_sized(tiny_model, error, told):
    """So that another backend can be chosen: see the next test."""
    pytest.importorskip("triton")
    model, config = load_model(tiny_model)[0], load_config(tiny_model)
    with pytest.raises(CannotFuse, match=f"a kernel does not run on this GPU: .*{told}") as raised:
        FusedBackend(RankSpec(tiny_model), model, config, components=BrokenGpuComponents(error))
    assert "\n" not in str(raised.value)


def test_where_they_do_not_run_reference_ops_do(tiny_model, monkeypatch, caplog):
    def refuse(*_):
        raise CannotFuse("a kernel does not run on this GPU: PTXASError: sm_999")

    monkeypatch.setattr(backends, "_fused_backend", refuse)
    monkeypatch.setattr(device_memory, "use_device", lambda device: None)
    monkeypatch.setattr(torch_backend, "TorchBackend", lambda *_: "reference")
    spec = RankSpec(tiny_model, device="cuda:1", dtype="bfloat16")
    assert backends.choose_backend(spec, None, None) == "reference"
    assert "reference ops instead of fused kernels, several times slower: a kernel" in caplog.text
    with pytest.raises(ConfigError, match="kernels fused: a kernel does not run on this GPU"):
        backends.choose_backend(replace(spec, kernels="fused"), None, None)


@pytest.mark.skipif(not library.runnable(), reason="not built")
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_an_embedding_are_read_where_the_file_has_them(tmp_path, monkeypatch, tied):
    """Unless the head needs it packed; and it makes no difference to the answers."""
    path = write_tiny_model(tmp_path / "model", tie_word_embeddings=tied)

    def start_and_run():
        rank = Rank.load(RankSpec(path, kernels="native", threads=1))
        rank.start(LIMITS)
        program = rank.runner.forward.program
        op, table, _ = next(program.weights())
        assert op == abi.OCT_OP_EMBED
        params = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=3)
        request = Request("r", [1, 2, 200, 7], params, 0.0)
        request.block_ids = [3]
        return rank.run(Batch(0, (ScheduledRequest(request, 0, 4, 1),))), table.format

    output, format = start_and_run()
    assert (format >= abi.OCT_STORED) == (not tied)
    monkeypatch.setattr(StepPlan, "gathered", lambda self: set())
    packed_output, format = start_and_run()
    assert format < abi.OCT_STORED
    assert output == packed_output


def test_fused_kernels_say_why_they_do_not_run_here(tmp_path, monkeypatch):
    gpu = RankSpec(tmp_path, device="cuda", dtype="bfloat16")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert "pip install 'octavo[gpu]'" in (backends.why_not_fused(gpu) or "")
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    monkeypatch.setattr(backends, "has_python_headers", lambda: False)
    assert re.search(
        r"no Python.h: apt-get install python3\.\d+-dev", backends.why_not_fused(gpu) or ""
    )
    monkeypatch.setattr(backends, "has_python_headers", lambda: True)
    assert backends.why_not_fused(gpu) is None
    four_bits = replace(gpu, kv_cache_dtype="k8v4")
    assert "read no KV of k8v4" in (backends.why_not_fused(four_bits) or "")
    assert backends.why_not_fused(replace(four_bits, device="cpu")) is None  # their twin does
