from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from kv_layers import kv_layers

from octavo.base.errors import ConfigError
from octavo.models.kv_groups import KVGroups, group_layers
from octavo.settings.engine import Capacity, EngineArgs, parse_bytes, resolve
from octavo.settings.vllm_compat import unsupported

CPU = Capacity("cpu", "float32", 1024, 100, kv_memory_bytes=10**9, kv_dtype="float32")


def test_defaults_are_resolved():
    config = resolve(EngineArgs(), CPU)
    assert config.cache.block_size == 16 and config.cache.dtype == "float32"
    assert config.scheduler.max_model_len == 1024
    assert config.scheduler.max_num_seqs == 64
    assert config.scheduler.max_num_batched_tokens == 512
    # No more than 64 requests of the full length could use.
    assert config.cache.num_blocks == 64 * 64
    assert any("KV pool" in choice for choice in config.choices)


def test_the_context_shrinks_to_the_pool_and_says_so():
    config = resolve(EngineArgs(), Capacity("cpu", "float32", 1024, 100, 16 * 100 * 10, "float32"))
    assert config.cache.num_blocks == 10 and config.scheduler.max_model_len == 160
    assert any("max_model_len: 160" in choice for choice in config.choices)


def test_an_explicit_context_that_does_not_fit_is_an_error_with_numbers():
    with pytest.raises(ConfigError, match="lower max_model_len to 160"):
        resolve(EngineArgs(max_model_len=512, num_blocks=10), CPU)
    with pytest.raises(ConfigError, match="1024 positions"):
        resolve(EngineArgs(max_model_len=2048), CPU)


def test_the_pool_can_be_given_in_blocks_or_bytes():
    assert resolve(EngineArgs(num_blocks=70), CPU).cache.num_blocks == 70
    assert resolve(EngineArgs(kv_cache_memory="1MB"), CPU).cache.num_blocks == 625
    with pytest.raises(ConfigError, match="at least one block"):
        resolve(EngineArgs(kv_cache_memory=100), CPU)
    with pytest.raises(ConfigError, match="not both"):
        EngineArgs(kv_cache_memory=1, num_blocks=1)


def test_without_chunking_the_budget_holds_the_longest_prompt():
    config = resolve(
        EngineArgs(enable_chunked_prefill=False),
        Capacity("cpu", "float32", 4096, 1, 10**9, "float32"),
    )
    assert config.scheduler.max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 2**32), ("1.5 GB", 1_500_000_000), ("500mb", 5 * 10**8), ("2k", 2000), (7, 7)],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "4 apples", "GiB", "-1", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"enable_expert_parallel": True}, "tensor_parallel_size, which is 1"),
        ({"expert_placement": "p.json", "tensor_parallel_size": 2}, "which is off"),
        ({"save_expert_loads": "l.json", "data_parallel_size": 2}, "2 replicas would write"),
        ({"save_expert_loads": "l.json", "pipeline_parallel_size": 2}, "last stage's layers alone"),
    ],
)
def test_settings_of_experts_that_mean_nothing(settings, said):
    with pytest.raises(ConfigError, match=said):
        EngineArgs(**settings)


@pytest.mark.parametrize("size", [1, 2, 16, "auto"])
def test_ranks_are_a_number_or_auto(size):
    assert EngineArgs(tensor_parallel_size=size).tensor_parallel_size == size


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "int3"},
        {"device": "tpu"},
        {"device": "cuda:"},
        {"device": "cuda:-1"},
        {"device": "cpu:0"},
        {"max_num_seqs": 0},
        {"block_size": 0},
        {"block_size": True},
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": "two"},
        {"tensor_parallel_size": True},
        {"threads": 0},
        {"max_model_len": 1},
        {"gpu_memory_utilization": 0.0},
        {"trust": "all"},
    ],
)
def test_values_out_of_range_are_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineArgs(**setting)


def test_the_ecosystems_spellings():
    args = EngineArgs.from_kwargs("m", num_gpu_blocks_override=5, trust_remote_code=False)
    assert (args.model, args.num_blocks) == ("m", 5)
    assert EngineArgs.from_kwargs("m", kv_cache_memory_bytes=5).kv_cache_memory == 5
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        EngineArgs.from_kwargs("m", max_modl_len=5)
    with pytest.raises(ConfigError, match="no code"):
        EngineArgs.from_kwargs("m", trust_remote_code=True)


def test_what_was_asked_for_is_known_from_what_was_not():
    """The default too, if somebody said it."""
    said = EngineArgs.from_kwargs("m", block_size=16, num_gpu_blocks_override=3)
    assert said.given_settings() == {"block_size": 16, "num_blocks": 3}
    assert said == EngineArgs(model="m", num_blocks=3)
    assert EngineArgs(model="m", block_size=32, seed=0).given_settings() == {"block_size": 32}
    passed_on = EngineArgs(**dataclasses.asdict(said), given=["block_size"])
    assert passed_on.given_settings() == said.given_settings()
    changed = dataclasses.replace(said, num_blocks=None, seed=5)
    assert changed.given_settings() == {"block_size": 16, "num_blocks": None, "seed": 5}


def capacity_with(groups: KVGroups, memory: int = 10**9) -> Capacity:
    return dataclasses.replace(CPU, kv_memory_bytes=memory, kv_groups=groups)


SOME = group_layers(kv_layers(None, *[64] * 4))  # five groups of a layer each


def test_layers_with_windows_get_tables_of_their_own():
    config = resolve(EngineArgs(max_num_batched_tokens=32), capacity_with(SOME))
    assert config.cache.groups == SOME and tuple(config.cache.windows) == (None, 64, 64, 64, 64)
    # 64 requests: 1024 tokens of a layer, and what four windows of 64 can hold at once.
    assert config.cache.num_blocks == 64 * (64 + 4 * 8)
    assert "in 1 of 5 layers" in " ".join(config.choices)


@pytest.mark.parametrize(
    "args",
    [
        {"enable_window_tables": False},
        {"max_model_len": 64},  # no window is outgrown
        {"spec_method": "early_exit"},  # it reads by the target's one table
    ],
)
def test_one_table_does_where_nothing_would_be_freed_or_who_drafts_knows_of_one(args):
    assert resolve(EngineArgs(**args), capacity_with(SOME)).cache.groups is None


def test_what_offload_takes_of_memory():
    def places(**args) -> int:
        offload = resolve(EngineArgs(**args), CPU).cache.offload
        assert offload is not None and offload.block_bytes == 16 * CPU.kv_bytes_per_token
        return offload.num_places

    assert places(kv_offload="kv:1GiB") == 8192 // 16
    # Of four windows of 64, the last blocks.
    offload = resolve(EngineArgs(kv_offload="kv:1GiB"), capacity_with(SOME)).cache.offload
    assert 8192 // 16 + 4 * 4 <= offload.num_places <= 8192 // 16 + 4 * 6
    assert places(kv_offload="kv:1GiB", swap_space=0.5) == 2**29 // (16 * CPU.kv_bytes_per_token)


def test_drafts_from_text_leave_windows_their_tables():
    args = EngineArgs(spec_method="ngram")
    assert resolve(args, capacity_with(SOME)).cache.groups == SOME


def test_windows_alone_serve_a_context_longer_than_the_pool():
    groups = group_layers(kv_layers(64, 64))
    small = capacity_with(groups, memory=16 * 100 * 20)
    config = resolve(EngineArgs(max_num_batched_tokens=64), small)
    assert config.cache.num_blocks == 20 and config.scheduler.max_model_len == 1024


def test_an_automatic_context_takes_the_memory_that_one_request_needs():
    capacity = Capacity("cpu", "float32", 4096, 10, 16 * 10 * 16, "float32", kv_memory_most=10**9)
    usual = resolve(EngineArgs(max_num_seqs=8), capacity)
    assert usual.scheduler.max_model_len == 16 * 16
    longest = resolve(EngineArgs(max_num_seqs=8, max_model_len="auto"), capacity)
    assert longest.scheduler.max_model_len == 4096
    assert longest.cache.num_blocks == 4096 // 16  # and no more than that
    assert any("max_model_len" in line for line in longest.choices)


def test_an_automatic_context_is_what_fits():
    capacity = Capacity("cpu", "float32", 4096, 10, 160, "float32", kv_memory_most=16 * 10 * 50)
    config = resolve(EngineArgs(max_model_len="auto"), capacity)
    assert config.scheduler.max_model_len == 800
    assert any("800 of the model's 4096" in line for line in config.choices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_sinks": 4}, "of a window"),
        ({"n_keep": 4}, "of a context_shift"),
        ({"window": 8, "context_shift": True}, "do not go together"),
        ({"window": 8, "enable_chunked_prefill": False}, "do not go together"),
        ({"window": 8, "spec_method": "ngram"}, "do not go together"),
        ({"window": 0}, "at least 1"),
        ({"max_model_len": "long"}, "an integer of at least 2"),
    ],
)
def test_sights_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**settings)


def test_sights_are_checked_against_the_context_and_the_model():
    config = resolve(EngineArgs(window=1000), CPU)
    assert config.scheduler.sink_windows.window == 1000
    assert config.scheduler.sink_windows.attention_sinks == 4
    with pytest.raises(ConfigError, match="more than the 1024 tokens of the context"):
        resolve(EngineArgs(window=1021), CPU)
    without = dataclasses.replace(CPU, no_sinks="no rotations")
    with pytest.raises(ConfigError, match="no rotations"):
        resolve(EngineArgs(window=8), without)
    assert resolve(EngineArgs(), without).scheduler.sink_windows.window == 0


def test_a_pool_has_room_for_what_a_step_adds_to_a_window():
    config = resolve(EngineArgs(window=1020, max_num_seqs=1), CPU)
    assert config.cache.num_blocks * 16 >= 1024 + 512


def test_settings_of_vllm_that_ask_for_nothing_are_taken_and_others_named():
    plain = EngineArgs.from_kwargs("m")
    for name, group in unsupported().items():
        for value in group.nothing:
            assert EngineArgs.from_kwargs("m", **{name: value}) == plain
        with pytest.raises(ConfigError, match=f"^{name}='something else' is not supported: "):
            EngineArgs.from_kwargs("m", **{name: "something else"})


def test_the_defaults_of_every_setting_of_vllm_are_taken():
    """As of vLLM 0.32: those that differ from octavo's are octavo's to refuse or to have."""
    path = Path(__file__).parents[3] / "shared" / "reference" / "features.md"
    if not path.exists():
        pytest.skip("the list of vLLM's settings is not here")
    listed = path.read_text().split("## Appendix B")[1].split("\n\n")[2]
    for name, shown in re.findall(r"`(\w+)`=([^;]+?)(?:;|\.$)", listed):
        if name in ("model", "gpu_memory_utilization"):
            continue
        try:
            value = ast.literal_eval(shown)
        except (SyntaxError, ValueError):  # an object of vLLM's own, of which there is none here
            value = {"set()": set(), "dict()": {}, "list()": []}.get(shown)
        EngineArgs.from_kwargs("m", **{name: value})


def test_none_is_the_default_of_a_setting_and_numpys_numbers_are_numbers():
    unsaid = dict.fromkeys(("block_size", "enable_prefix_caching", "async_scheduling", "dtype"))
    assert EngineArgs.from_kwargs("m", **unsaid) == EngineArgs("m")
    args = EngineArgs.from_kwargs(
        "m",
        max_num_seqs=np.int64(4),
        gpu_memory_utilization=np.float32(0.5),
        enable_prefix_caching=np.bool_(False),
    )
    assert args == EngineArgs(
        "m", max_num_seqs=4, gpu_memory_utilization=0.5, enable_prefix_caching=False
    )
    assert type(args.max_num_seqs) is int and args.enable_prefix_caching is False
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineArgs.from_kwargs("m", max_num_seqs=np.float64(2.5))


# -- prompts apart from answers -------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"prefill_replicas": 1, "data_parallel_size": "2..3"}, "do not come and go"),
        ({"prefill_replicas": -1}, "at least 0"),
        ({"kv_buffer_size": "1GiB"}, "without prefill_replicas"),
        (
            {"prefill_replicas": 1, "data_parallel_size": 2, "enable_prefix_caching": False},
            "leave enable_prefix_caching on",
        ),
        (
            {"prefill_replicas": 1, "data_parallel_size": 2, "kv_offload": "kv:1GiB"},
            "do not go together",
        ),
        (
            {"prefill_replicas": 1, "data_parallel_size": 2, "kv_buffer_size": "much"},
            "no size in bytes",
        ),
    ],
)
def test_prompts_that_cannot_be_apart_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs("m", **settings)


@pytest.mark.parametrize("size, words", [(1, "set data_parallel_size to 3"), (2, "leaves none")])
def test_a_server_needs_replicas_for_answers(size, words):
    """An engine that it has placed on another machine may be the only one there."""
    args = EngineArgs("m", prefill_replicas=2, data_parallel_size=size)
    with pytest.raises(ConfigError, match=words):
        args.check_server()
    with pytest.raises(ConfigError, match="only a server has replicas for prompts"):
        args.refuse_replicas()
    EngineArgs("m", prefill_replicas=2, data_parallel_size=3, distributed="ray").check_server()


def test_a_block_has_the_parts_of_all_ranks():
    args = EngineArgs(
        "m",
        data_parallel_size=2,
        prefill_replicas=1,
        kv_buffer_size="1MiB",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
    )
    capacity = Capacity("cpu", "float32", 512, 64, 1 << 30, "float32", num_parts=2)
    assert resolve(args, capacity).cache.offload.num_places == (1 << 20) // (16 * 64 * 2)


def test_arriving_kv_has_places_in_host_memory():
    args = EngineArgs("m", data_parallel_size=2, prefill_replicas=1, kv_buffer_size="1MiB")
    capacity = Capacity("cpu", "float32", 512, 64, 1 << 30, "float32")
    offload = resolve(args, capacity).cache.offload
    assert offload.is_transferred and offload.num_places == (1 << 20) // (16 * 64)
    more = dataclasses.replace(args, swap_space=0.5)
    assert resolve(more, capacity).cache.offload.num_places == (1 << 29) // (16 * 64)
    with pytest.raises(ConfigError, match="kv_buffer_size must hold a block"):
        resolve(dataclasses.replace(args, kv_buffer_size=100), capacity)
    with pytest.raises(ConfigError, match="recurrent layers"):
        resolve(args, dataclasses.replace(capacity, state_bytes=100))
