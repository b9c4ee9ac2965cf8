from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.scheduler import SchedulerConfig
from octavo.settings.engine import CacheConfig, EngineConfig
from octavo.system.machine import Cpu
from octavo.tuning.space import (
    DEFAULTS,
    CandidateSettings,
    candidates,
    engine_changes,
    fewer_threads,
    scheduling_settings,
    speculation_setting,
)

CONFIG = EngineConfig(
    "m",
    "cpu",
    "float32",
    0,
    "continuous",
    CacheConfig(16, 100, "bfloat16", True),
    SchedulerConfig(512, 64, 4096, target_step_seconds=0.08),
)
CPU = Cpu("c", "x86_64", (), 16, 8, affinity=16, quota=None)
INT8 = CandidateSettings((("kv_cache_dtype", "int8"),))


def test_a_candidate_is_what_differs_whatever_the_order():
    made = DEFAULTS.having("threads", 1).having("max_num_seqs", 8)
    assert made == DEFAULTS.having("max_num_seqs", 8).having("threads", 1)
    assert made.without("threads").settings == {"max_num_seqs": 8}
    assert made.engine == CandidateSettings((("threads", 1),))
    assert made.having("threads", 2).settings["threads"] == 2


def test_candidates_are_said_as_people_would():
    made = CandidateSettings((("enable_chunked_prefill", False), ("itl_target_ms", 40.0)))
    assert str(made) == "enable_chunked_prefill off, itl_target_ms 40"
    assert str(DEFAULTS) == "the defaults"


def test_knobs_are_around_the_defaults_of_the_device():
    knobs = {knob.name: knob for knob in scheduling_settings(CONFIG, held=())}
    assert knobs["max_num_seqs"].others == (8, 16, 32, 128, 256)
    assert 80.0 not in knobs["itl_target_ms"].others
    lone = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_seqs=1))
    assert scheduling_settings(lone, held=())[0].others == (2, 4)


def test_what_is_held_is_no_knob():
    names = [knob.name for knob in scheduling_settings(CONFIG, held={"max_num_seqs", "seed"})]
    assert names == ["max_num_batched_tokens", "itl_target_ms", "enable_chunked_prefill"]
    assert engine_changes({"kv_cache_dtype"}, on_gpu=False, threads=[1], also=["q"]) == [
        CandidateSettings((("threads", 1),)),
        CandidateSettings((("model", "q"),)),
    ]


def test_the_cache_is_of_eight_bits_as_the_device_has_them():
    assert engine_changes((), on_gpu=False) == [INT8]
    assert engine_changes((), on_gpu=True)[0].settings == {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    "affinity, physical, expected", [(16, 8, [8]), (6, 4, [3, 4]), (2, 2, [1]), (1, 1, [])]
)
def test_fewer_threads_are_those_of_cores_and_half(affinity, physical, expected):
    assert fewer_threads(replace(CPU, affinity=affinity, physical_cores=physical)) == expected


def test_the_defaults_come_first_and_then_each_change_alone():
    knobs = [*scheduling_settings(CONFIG, held=()), speculation_setting()]
    made = candidates(knobs, [INT8], 60)
    assert made[0] == DEFAULTS and made[1] == INT8
    assert len(made) == len(set(made)) == 60
    alone = [each for each in made if len(each.changes) == 1]
    assert len(alone) == 1 + sum(len(knob.others) for knob in knobs)
    assert made == candidates(knobs, [INT8], 60)
    assert made != candidates(knobs, [INT8], 60, seed=1)
    for each in made:
        assert each.engine in (DEFAULTS, INT8)


def test_there_may_be_fewer_than_are_wanted():
    assert len(candidates([speculation_setting()], [INT8], 60)) == 4
    assert len(candidates(scheduling_settings(CONFIG, held=()), [], 3)) == 16
