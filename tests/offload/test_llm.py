"""KV offload under the public API, on each of the backends."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError
from octavo.core.host_kv_cache import AlwaysRestore
from octavo.kernels.cpu import library
from octavo.offload import restore_rule
from tests.conftest import write_tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
PROMPT = "a prompt of some forty bytes or perhaps more"
BACKENDS = ["native", "reference", "fused"]


@pytest.fixture(autouse=True)
def _always_reads(monkeypatch):
    """A model this small is sooner computed; and nothing is to be measured for it."""
    monkeypatch.setattr(restore_rule, "predicted_rule", lambda *_: AlwaysRestore())


@pytest.fixture(scope="module")
def tiny_windows(tmp_path_factory) -> Path:
    """All layers of it see the last 20 positions."""
    folder = tmp_path_factory.mktemp("windows") / "mistral"
    kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return write_tiny_model(folder, **kind, sliding_window=20)


def skip_without(kernels: str) -> None:
    if kernels == "native" and not library.runnable():
        pytest.skip("no native library was built")


class Served:
    """What became of a prompt: its tokens with their log-probabilities, and what was computed."""

    def __init__(self, llm: LLM, prompt: str = PROMPT):
        engine = llm._text_engine.engine
        before = engine.stats().prefix_tokens_from_disk or 0
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        self.num_cached = output.num_cached_tokens
        self.tokens = output.outputs[0].token_ids
        self.logprobs = output.outputs[0].logprobs
        self.from_disk = (engine.stats().prefix_tokens_from_disk or 0) - before


def create(model: Path, kernels: str = "auto", **settings) -> LLM:
    settings = {"max_model_len": 96, "num_blocks": 6, **settings}
    return LLM(str(model), kernels=kernels, device="cpu", **settings)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_the_next_engine_finds_what_the_last_one_had(tiny_model, tmp_path, kernels):
    skip_without(kernels)
    place = f"{tmp_path / 'kv'}:1MiB"
    with create(tiny_model, kernels, kv_offload=place) as llm:
        cold = Served(llm)
    with create(tiny_model, kernels, kv_offload=place) as llm:
        warm = Served(llm)
        assert llm._text_engine.engine.stats().kv_store_errors == 0
    assert (cold.num_cached, warm.num_cached, warm.from_disk) == (0, 32, 32)
    assert warm.tokens == cold.tokens and warm.logprobs == cold.logprobs  # every bit
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


@pytest.mark.parametrize("kernels", BACKENDS)
def test_what_is_evicted_comes_back_from_host_memory(tiny_model, kernels):
    skip_without(kernels)
    with create(tiny_model, kernels, swap_space=0.001) as llm:
        cold = Served(llm)
        Served(llm, "x" * 80)  # takes all blocks
        warm = Served(llm)
        stats = llm._text_engine.engine.stats()
    assert (cold.num_cached, warm.num_cached) == (0, 32) and stats.kv_blocks_restored >= 1
    assert stats.prefix_tokens_from_disk == 0 < stats.prefix_tokens_from_memory
    assert warm.tokens == cold.tokens and warm.logprobs == cold.logprobs


@pytest.mark.parametrize("kernels", BACKENDS)
def test_windows_find_what_they_see(tiny_windows, tmp_path, kernels):
    """Of 32 tokens, layers that see 20 positions need 19; and there is no table of all."""
    skip_without(kernels)
    place = f"{tmp_path / 'kv'}:1MiB"
    with create(tiny_windows, kernels, kv_offload=place) as llm:
        cold = Served(llm)
        assert llm.config.cache.windows == (20,)
    with create(tiny_windows, kernels, kv_offload=place) as llm:
        warm = Served(llm)
        assert llm._text_engine.engine.stats().kv_blocks_restored == 2
    assert (cold.num_cached, warm.num_cached, warm.from_disk) == (0, 32, 32)
    assert warm.tokens == cold.tokens and warm.logprobs == cold.logprobs


def test_other_types_of_kv_share_nothing(tiny_model, tmp_path):
    place = f"{tmp_path / 'kv'}:1MiB"
    for dtype in ("f32", "bf16", "int8"):
        with create(tiny_model, "reference", kv_offload=place, kv_cache_dtype=dtype) as llm:
            assert Served(llm).num_cached == 0
    with create(tiny_model, "reference", kv_offload=place, kv_cache_dtype="bf16") as llm:
        assert Served(llm).num_cached == 32


def test_a_second_engine_says_so_and_goes_on_without(tiny_model, tmp_path, caplog):
    place = f"{tmp_path / 'kv'}:1MiB"
    with create(tiny_model, kv_offload=place) as first:
        Served(first)
        with (
            caplog.at_level(logging.WARNING, "octavo"),
            create(tiny_model, kv_offload=place) as second,
        ):
            assert Served(second).num_cached == 0
            assert second._text_engine.engine.stats().kv_blocks_stored is None
    assert "another engine has it; this engine goes on without it" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_offload": "kv"}, "is not DIR:SIZE"),
        ({"kv_offload": ":1GiB"}, "is not DIR:SIZE"),
        ({"kv_offload": "kv:much"}, "no size in bytes"),
        ({"kv_offload": "kv:1"}, "room for one block"),
        ({"swap_space": -1}, "swap_space must be at least 0"),
        ({"swap_space": float("nan")}, "swap_space must be at least 0"),
        ({"swap_space": 1e-9}, "at least one block"),
        ({"swap_space": 1, "enable_prefix_caching": False}, "for the prefix cache"),
    ],
)
def test_wrong_settings(tiny_model, tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        create(tiny_model, **settings)
    assert not (tmp_path / "kv").exists()


def test_what_is_chosen_is_told(tiny_model, tmp_path):
    with create(tiny_model, kv_offload=f"{tmp_path / 'kv'}:2GiB", swap_space=0.5) as llm:
        (line,) = [each for each in llm.config.choices if "evicted" in each]
    assert line == (
        f"evicted KV: up to 2.00 GiB in {tmp_path / 'kv'}, through 0.50 GiB of host memory"
    )
