"""The flags of a build are a folder's defaults, and its limits."""

from __future__ import annotations

import pytest

from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.serving.load import load_engine
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder.folder import EngineFolder
from octavo.sources.engine_folder.writer import build_engine_folder


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A folder with settings of its own."""
    out = tmp_path_factory.mktemp("engines") / "set"
    settings = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_dtype": "int8",
        "activations": "int16",
        "num_blocks": 20,
        "enable_prefix_caching": False,
        "threads": 1,
    }
    build_engine_folder(EngineArgs.from_kwargs(str(tiny_model), **settings), out)
    return out


def start(folder, **settings):
    return load_engine(EngineArgs.from_kwargs(str(folder), **settings))


def test_they_are_its_defaults(folder):
    config = start(folder).config
    assert config.scheduler.max_model_len == 128 and config.scheduler.max_num_seqs == 8
    assert config.cache.block_size == 32 and config.cache.num_blocks == 20
    assert config.cache.dtype == "int8" and not config.cache.enable_prefix_caching


def test_who_starts_it_may_say_otherwise(folder):
    """Also the value that is octavo's own default."""
    config = start(
        folder,
        max_model_len=64,
        max_num_seqs=8,
        block_size=16,
        kv_cache_dtype="bf16",
        enable_prefix_caching=True,
    ).config
    assert config.scheduler.max_model_len == 64 and config.scheduler.max_num_seqs == 8
    assert config.cache.block_size == 16 and config.cache.enable_prefix_caching
    assert config.cache.dtype == "bfloat16"


def test_a_servers_own_defaults_come_after_a_folders(tiny_model, tmp_path):
    def target(folder, **settings):
        args = EngineArgs.from_kwargs(str(folder), **settings)
        return load_engine(args, is_served=True).config.scheduler.target_step_seconds

    args = EngineArgs.from_kwargs(str(tiny_model), itl_target_ms=40.0)
    build_engine_folder(args, tmp_path / "out")
    assert target(tmp_path / "out") == 0.04 and target(tiny_model) == 0.08
    assert target(tmp_path / "out", itl_target_ms=20.0) == 0.02


def test_one_way_to_size_the_pool_replaces_the_other(folder):
    pool = start(folder, kv_cache_memory="1MiB").config.cache
    assert pool.num_blocks != 20


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"max_model_len": 129}, "--max-model-len 129"),
        ({"max_num_seqs": 9}, "--max-num-seqs 9"),
        ({"activations": "int8"}, "--activations int8"),
        ({"kernels": "reference"}, None),
        ({"device": "cuda"}, None),
        ({"dtype": "bfloat16"}, None),
        ({"quantization": "gguf"}, None),
    ],
)
def test_contradictions_say_what_it_was_built_for(folder, tiny_model, settings, command):
    with pytest.raises(ConfigError) as caught:
        start(folder, **settings)
    (name,) = settings
    assert name in str(caught.value) and str(folder) in str(caught.value)
    if command is not None:
        assert f"octavo build {tiny_model} OUT {command}" in str(caught.value)
    else:
        assert f"give the model that it was made from, '{tiny_model}" in str(caught.value)


def test_what_agrees_is_no_contradiction(folder):
    start(folder, activations="int16", device="cpu", kernels="native", dtype="float32")
    start(folder, activations="auto", device="auto", kernels="auto", dtype="auto")


def test_settings_that_were_settled_stay_as_they_are(folder):
    """They go from a server to its engine, where the folder is asked again."""
    once = EngineFolder(folder).settings(EngineArgs(model=str(folder), max_num_seqs=2))
    again = EngineFolder(folder).settings(EngineArgs(**vars(once)))
    assert once == again and again.max_num_seqs == 2 and again.block_size == 32


def test_limits_that_nobody_set_are_the_models(tiny_engine):
    assert start(tiny_engine).config.scheduler.max_model_len == 256
    with pytest.raises(ConfigError, match="256 positions"):
        start(tiny_engine, max_model_len=257)


def test_the_offline_api_takes_it(folder):
    with LLM(str(folder)) as llm:
        (output,) = llm.generate(["Hello"])
        assert output.outputs[0].token_ids
