"""The tiny model through the engine: against transformers, and the same however it is run."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from faults import FaultyForward, every

from octavo.base.errors import BenchmarkError, ConfigError, EngineError, PromptTooLongError
from octavo.kernels.cpu import library
from octavo.quality.logit_file import LogitFile
from octavo.quality.perplexity import engine_args, measure, score_windows
from octavo.quality.windows import cut, tokenize

CTX = 48

needs_native = pytest.mark.skipif(not library.runnable(), reason="no native library was built")
KERNELS = ["reference", pytest.param("native", marks=needs_native)]

# How the same windows may be run.
VARIANTS = {
    "one slot": {"max_num_seqs": 1},
    "eight slots": {"max_num_seqs": 8},
    "budget 7": {"max_num_batched_tokens": 7, "max_num_seqs": 8},
    "budget 1": {"max_num_batched_tokens": 1},
    "tiny pool": {"num_blocks": 3, "max_num_seqs": 8},
    "static": {"batching": "static", "max_num_seqs": 4},
    "unchunked": {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
}


def windows_of(text_engine, text, **settings):
    token_ids, bos_token_id = tokenize(text, text_engine.tokenizer)
    return cut(token_ids, settings.pop("ctx", CTX), bos_token_id=bos_token_id, **settings)


@torch.no_grad()
def nll_by_transformers(folder, windows):
    """Window by window, in float32, in the order of the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for window in torch.from_numpy(windows.token_ids).long():
        logprobs = model(window[None]).logits[0].double().log_softmax(-1)
        judges = torch.arange(windows.first_judge, windows.ctx - 1)
        found.append(-logprobs[judges, window[judges + 1]])
    return torch.cat(found).numpy()


@pytest.mark.parametrize("score", ["half", "all"])
@pytest.mark.parametrize("ctx", [CTX, 33])
def test_against_transformers(load, tiny_model, text, score, ctx) -> None:
    text_engine = load(ctx)
    windows = windows_of(text_engine, text, ctx=ctx, score=score)
    scores = score_windows(text_engine.engine, windows)
    expected = nll_by_transformers(tiny_model, windows)
    assert len(expected) == windows.num_scored
    np.testing.assert_allclose(scores.nll, expected, atol=1e-4)
    assert scores.perplexity.value == pytest.approx(np.exp(expected.mean()), rel=1e-5)
    assert scores.num_computed == len(windows) * (ctx - 1)


def test_a_model_that_wants_bos(load, bos_model, text) -> None:
    text_engine = load(CTX, bos_model)
    windows = windows_of(text_engine, text)
    assert (windows.token_ids[:, 0] == 257).all() and len(windows) > 10
    scores = score_windows(text_engine.engine, windows)
    np.testing.assert_allclose(scores.nll, nll_by_transformers(bos_model, windows), atol=1e-4)
    without = windows_of(load(CTX), text)
    assert not np.array_equal(without.token_ids[:, 1], windows.token_ids[:, 1])  # BOS shifts them


def test_the_longest_windows_that_the_model_takes(load, tiny_model, text) -> None:
    text_engine = load(256)
    windows = windows_of(text_engine, text, ctx=256, score="all")
    scores = score_windows(text_engine.engine, windows)
    np.testing.assert_allclose(scores.nll, nll_by_transformers(tiny_model, windows), atol=1e-4)
    with pytest.raises(ConfigError, match="257 exceeds the 256 positions"):
        load(257)


@needs_native
def test_native_kernels_give_the_same_bits_however_windows_are_run(load, text) -> None:
    settings = {"kernels": "native", "enable_chunked_prefill": True}
    plain = load(CTX, **settings)
    windows = windows_of(plain, text[:800], score="all")
    assert len(windows) > 8  # more than there are slots
    expected = score_windows(plain.engine, windows)
    for name, variant in VARIANTS.items():
        scores = score_windows(load(CTX, **settings | variant).engine, windows)
        assert np.array_equal(scores.nll, expected.nll), name


def test_reference_ops_give_the_same_however_windows_are_run(load, text) -> None:
    windows = windows_of(load(CTX), text)
    expected = score_windows(load(CTX).engine, windows)
    scores = score_windows(load(CTX, **VARIANTS["budget 7"]).engine, windows)
    np.testing.assert_allclose(scores.nll, expected.nll, atol=1e-5)


def preempt_often(engine):
    """A progress callback: every fourth step, whoever runs loses its blocks."""
    steps = itertools.count(1)

    def progress(*at):
        if next(steps) % 4 == 0 and engine.scheduler.running:
            engine.scheduler.retract(engine.scheduler.running[-1])

    return progress


@pytest.mark.parametrize("kernels", KERNELS)
def test_preempted_windows_are_computed_again_and_scored_once(
    load, text, kernels, runner_of
) -> None:
    """And the head is computed for scored positions alone, each once."""
    settings = {"kernels": kernels, "max_num_batched_tokens": 18, "max_num_seqs": 3}
    text_engine = load(CTX, **settings)
    forward = runner_of(text_engine.engine).forward
    rows, sampled = [], []
    if kernels == "native":
        step = forward.program.step

        def count_native(arguments, longest):
            rows.append(arguments.num_out if arguments.head_only else 0)
            return step(arguments, longest)

        forward.program.step = count_native
    else:
        compute, submit = forward.model.compute_logits, forward.submit

        def count(hidden, ctx):
            rows.append(len(hidden))
            return compute(hidden, ctx)

        def count_sampled(batch, *rest):
            sampled.append(sum(item.samples for item in batch.items))
            return submit(batch, *rest)

        forward.model.compute_logits, forward.submit = count, count_sampled
    windows = windows_of(text_engine, text)
    scores = score_windows(text_engine.engine, windows, progress=preempt_often(text_engine.engine))
    assert scores.num_preemptions > 5
    assert sum(rows) - sum(sampled) == windows.num_scored
    undisturbed = score_windows(load(CTX, **settings).engine, windows)
    assert undisturbed.num_preemptions == 0
    np.testing.assert_allclose(scores.nll, undisturbed.nll, atol=1e-5)
    if kernels == "native":
        assert np.array_equal(scores.nll, undisturbed.nll)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_base_of_the_same_run(load, text, tmp_path, kernels) -> None:
    text_engine = load(CTX, kernels=kernels)
    windows = windows_of(text_engine, text)
    first = measure(text_engine, windows, model="tiny", save_base=tmp_path / "base")
    assert first.divergence is None
    again = measure(text_engine, windows, model="tiny", base=LogitFile(tmp_path / "base"))
    assert again.divergence is not None
    assert again.divergence.kl_max < 4.8e-8
    assert again.divergence.same_top.value == 1.0
    assert np.array_equal(again.scores.nll, first.scores.nll)
    assert again.divergence.delta_ppl.value == pytest.approx(0, abs=1e-4)


@needs_native
def test_a_base_of_other_kernels(load, text, tmp_path) -> None:
    """Native kernels keep keys and values in bfloat16: not the same, and not far from it."""
    reference = load(CTX)
    windows = windows_of(reference, text)
    measure(reference, windows, model="tiny", save_base=tmp_path / "base")
    base = LogitFile(tmp_path / "base")
    kl = {}
    for kv_cache_dtype in ("f32", "bf16", "int8", "fp8", "k8v4", "int4"):
        native = load(CTX, kernels="native", kv_cache_dtype=kv_cache_dtype)
        divergence = measure(native, windows, model="tiny", base=base).divergence
        assert divergence is not None
        kl[kv_cache_dtype] = divergence.kl.value
    assert list(kl) == sorted(kl, key=kl.__getitem__), kl
    assert 0 < kl["f32"] < 4.8e-8 < kl["bf16"] and kl["int8"] < 0.05 and kl["int4"] < 0.5


@pytest.mark.parametrize("kv_cache_dtype, nearer", [("int8", 1.5), ("fp8", 100), ("int4", 5)])
@needs_native
def test_the_reference_ops_keep_keys_and_values_alike(
    load, text, tmp_path, kv_cache_dtype, nearer
) -> None:
    """The native kernels with the same KV are nearer to them than exact KV is: by far, where they
    do not round queries to a byte."""
    native = load(CTX, kernels="native", kv_cache_dtype=kv_cache_dtype)
    windows = windows_of(native, text)
    measure(native, windows, model="tiny", save_base=tmp_path / "base")
    base = LogitFile(tmp_path / "base")
    kl = []
    for kv in (kv_cache_dtype, "f32"):
        divergence = measure(
            load(CTX, kernels="reference", kv_cache_dtype=kv), windows, model="tiny", base=base
        ).divergence
        assert divergence is not None
        kl.append(divergence.kl.value)
    print(kl)
    assert 0 <= kl[0] < kl[1] / nearer


def test_progress(load, text) -> None:
    text_engine = load(CTX)
    windows = windows_of(text_engine, text)
    seen = []
    scores = score_windows(text_engine.engine, windows, progress=lambda *at: seen.append(at))
    done = [at[0] for at in seen]
    assert done == sorted(done) and len(set(done)) > 2
    assert seen[-1] == (
        windows.num_scored,
        windows.num_scored,
        pytest.approx(scores.perplexity.value),
    )


class FullDisk:
    def take(self, scored):
        if scored.number == 30:
            raise BenchmarkError("the disk is full")


def test_a_sink_that_fails_ends_the_run_and_leaves_the_engine_usable(load, text, runner_of) -> None:
    text_engine = load(CTX)
    engine = text_engine.engine
    windows = windows_of(text_engine, text)
    with pytest.raises(BenchmarkError, match="the disk is full"):
        score_windows(engine, windows, [FullDisk()])
    assert not engine.has_unfinished_requests
    assert runner_of(engine).logits_observer is None
    assert np.isfinite(score_windows(engine, windows).nll).all()


def test_a_model_whose_numbers_are_none(load, text, runner_of) -> None:
    text_engine = load(CTX)
    runner = runner_of(text_engine.engine)
    runner.forward = FaultyForward(runner.forward, damages=every(3))
    with pytest.raises(EngineError, match=r"window \d+: .*NaN"):
        score_windows(text_engine.engine, windows_of(text_engine, text))


def test_a_base_that_does_not_fit_is_refused_before_anything_runs(load, text, tmp_path) -> None:
    text_engine = load(CTX)
    windows = windows_of(text_engine, text)
    measure(text_engine, windows, model="tiny", save_base=tmp_path / "base")
    before = text_engine.engine.executor.probe().kernel_seconds
    with pytest.raises(BenchmarkError, match="made from other tokens, from number 0 on"):
        measure(
            text_engine,
            windows_of(text_engine, "!" + text[:-1]),
            model="tiny",
            base=LogitFile(tmp_path / "base"),
        )
    assert text_engine.engine.executor.probe().kernel_seconds == before


def test_engine_settings() -> None:
    args = engine_args("m", 512)
    assert (args.max_model_len, args.enable_prefix_caching, args.max_num_seqs) == (512, False, 2)
    assert engine_args("m", 64).max_num_seqs == 9
    assert engine_args("m", 64, max_num_batched_tokens=64).max_num_seqs == 2
    assert engine_args("m", 3).max_num_seqs == 172
    assert engine_args("m", 64, max_num_seqs=3).max_num_seqs == 3
    with pytest.raises(ConfigError, match="enable_prefix_caching is False"):
        engine_args("m", 64, enable_prefix_caching=True)
    with pytest.raises(ConfigError, match="max_model_len is 64"):
        engine_args("m", 64, max_model_len=65)


def test_windows_that_the_pool_cannot_hold(load, text) -> None:
    text_engine = load(CTX)
    with pytest.raises(PromptTooLongError):
        score_windows(text_engine.engine, windows_of(text_engine, text, ctx=64))
    assert not text_engine.engine.has_unfinished_requests
