from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.cost.catalogue import spec_of
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of, weights_bytes
from octavo.cost.rank import rank_model, stage_layers, stage_weights
from octavo.cost.rank_model import Experts, MatrixOp, RankModel
from octavo.cost.weights import num_parameters, weights
from octavo.cost.work import Span, decode_attention_work, passes


def rank(name: str, quantization: str | None = None, **degrees: int) -> RankModel:
    spec = spec_of(name)
    return rank_model(spec, precision_of(spec, quantization), Parallel(**degrees))


def op(model: RankModel, name: str) -> MatrixOp:
    (found,) = (each for each in model.matrices if each.name == name)
    return found


def test_the_matrices_of_a_dense_model():
    model = rank("llama-3.1-8b")
    assert {each.name: (each.count, each.inputs, each.outputs) for each in model.matrices} == {
        "attention.qkv": (32, 4096, 4096 + 2 * 1024),
        "attention.output": (32, 4096, 4096),
        "mlp.gate_up": (32, 4096, 2 * 14336),
        "mlp.down": (32, 14336, 4096),
        "head": (1, 4096, 128_256),
    }
    assert [each.name for each in model.matrices if each.sampled_only] == ["head"]
    assert op(model, "mlp.down").num_bytes == 2 * 14336 * 4096
    assert model.kv_bytes_per_token == 131_072
    (attention,) = model.attention
    assert attention.flops_per_score == 4 * 32 * 128
    assert attention.decode_flops_per_score is None


def test_matrices_are_all_but_embeddings_norms_and_biases():
    for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt2", "bamba-9b"):
        spec = spec_of(name)
        rest = sum(w.num_params for w in weights(spec) if not w.op)
        head = spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0
        counted = sum(each.count * each.num_params for each in rank(name).matrices)
        assert counted + rest - head == num_parameters(spec), name


def test_experts_are_said_to_be_such():
    model = rank("mixtral-8x7b", tp=8, ep=8)
    assert op(model, "experts.gate_up").experts == Experts(total=8, per_token=2, on_rank=1)
    assert op(model, "experts.gate_up").num_params == 4096 * 2 * 14336
    assert model.num_moe_layers == 32
    cut = op(rank("mixtral-8x7b", tp=8), "experts.gate_up")
    assert cut.experts == Experts(total=8, per_token=2, on_rank=8)
    assert (cut.inputs, cut.outputs) == (4096, 2 * 14336 // 8)
    assert op(rank("mixtral-8x7b"), "router").num_bytes == 2 * 8 * 4096


def test_layers_that_differ_are_ops_of_their_own():
    model = rank("deepseek-v3")
    assert op(model, "mlp.gate_up").count == 3
    assert op(model, "experts.down").count == op(model, "shared.down").count == 58
    windows = {each.name: each for each in rank("gpt-oss-20b").attention}
    assert windows["attention.window"].window == 128
    assert windows["attention"].count == windows["attention.window"].count == 12


def test_latent_attention_is_expanded_for_prompts_and_absorbed_for_single_tokens():
    (attention,) = rank("deepseek-v3").attention
    assert attention.flops_per_score == 2 * 128 * (128 + 64 + 128)
    assert attention.decode_flops_per_score == 2 * 128 * (2 * 512 + 64)


def test_arithmetic_is_that_of_the_type():
    assert op(rank("llama-3.1-8b"), "mlp.down").arithmetic == "fp16"
    assert op(rank("llama-3.1-8b", "fp8"), "mlp.down").arithmetic == "fp8"
    assert op(rank("llama-3.1-8b", "awq"), "mlp.down").arithmetic == "fp16"
    assert op(rank("llama-3.1-8b", "int8"), "mlp.down").arithmetic == "int8"
    assert op(rank("llama-3.1-8b", "fp8"), "head").arithmetic == "fp16"


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        *(("llama-3.1-8b", {"tp": 2}), ("llama-3.1-8b", {"tp": 8})),
        *(("qwen3-30b-a3b", {"tp": 4}), ("qwen3-30b-a3b", {"tp": 4, "ep": 4})),
        *(("deepseek-v3", {"tp": 2, "ep": 2}), ("deepseek-v3", {"tp": 8, "ep": 4})),
    ],
)
def test_ranks_together_have_all_and_repeat_little(name, degrees):
    parts = rank(name, **degrees)
    whole = rank(name).weights_bytes
    assert whole <= degrees["tp"] * parts.weights_bytes < 1.1 * whole


def test_more_devices_than_key_value_heads_repeat_them():
    keys = [op(rank("llama-3.1-8b", tp=tp), "attention.qkv").outputs for tp in (1, 8, 16)]
    assert keys == [4096 + 2048, 512 + 256, 256 + 256]


@given(layers=st.integers(1, 100), pp=st.integers(1, 12))
def test_stages_take_all_layers_once(layers, pp):
    spec = spec_of("llama-3.1-8b")
    spec = replace(spec, layers=spec.layers[:1] * layers)
    if pp > layers:
        with pytest.raises(ConfigError, match="pipeline"):
            rank_model(spec, precision_of(spec), Parallel(pp=pp))
        return
    spans = [stage_layers(spec, Parallel(pp=pp), stage) for stage in range(pp)]
    assert [index for span in spans for index in span] == list(range(layers))
    sizes = [len(span) for span in spans]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b"])
def test_stages_together_have_the_weights_of_the_model(name):
    spec = spec_of(name)
    parallel = Parallel(pp=4)
    held = [*stage_weights(spec, parallel, 0), *stage_weights(spec, parallel, 3)]
    assert [w.name for w in held if w.part in ("embedding", "head")] == [
        *("model.embed_tokens", "lm_head")  # a tied one is there twice, at both ends
    ]
    total = sum(
        precision_of(spec).num_bytes(weight)
        for stage in range(4)
        for weight in stage_weights(spec, parallel, stage)
    )
    again = 2 * spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0
    assert total == weights_bytes(spec, precision_of(spec)) + again


def test_the_rank_of_a_pipeline_is_the_one_with_most_to_do():
    model = rank("llama-3.1-8b", pp=2)
    assert model.num_layers == 16
    assert op(model, "head").count == 1


@pytest.mark.parametrize(
    ("name", "degrees", "what"),
    [
        ("llama-3.1-8b", {"tp": 3}, "32 heads"),
        ("llama-3.1-8b", {"pp": 33}, "32 layers"),
        ("llama-3.1-8b", {"tp": 2, "ep": 2}, "no experts"),
        ("mixtral-8x7b", {"tp": 16, "ep": 16}, "8 experts"),
    ],
)
def test_layouts_that_cannot_be_say_why(name, degrees, what):
    with pytest.raises(ConfigError, match=what):
        rank(name, **degrees)


# -- processors -----------------------------------------------------------------------------------


def test_on_processors_heads_may_be_uneven():
    """9 query heads are 4 and 5, of which the second rank's read two of three KV heads."""
    model = rank("smollm2-135m", tp=2, scheme="gather")
    assert {each.name: (each.inputs, each.outputs) for each in model.matrices} == {
        "attention.qkv": (576, 5 * 64 + 2 * 2 * 64),
        "attention.output": (576, 288),
        "mlp.gate_up": (576, 2 * 768),
        "mlp.down": (1536, 288),
        "head": (576, 49_152 // 2),
    }
    (attention,) = model.attention
    assert attention.flops_per_score == 4 * 5 * 64
    assert model.kv_bytes_per_token == rank("smollm2-135m").kv_bytes_per_token * 2 / 3


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "bamba-9b"])
def test_either_scheme_has_about_the_same_weights(name):
    gather, added = (rank(name, tp=8, scheme=scheme) for scheme in ("gather", "sum"))
    assert gather.weights_bytes == pytest.approx(added.weights_bytes, rel=0.05)


def test_latents_are_on_every_rank_and_states_are_not():
    """A rank has the inputs of the convolution of its heads and of all groups, and their states."""
    assert rank("deepseek-v3", tp=2, scheme="gather").kv_bytes_per_token == (
        rank("deepseek-v3").kv_bytes_per_token
    )
    one, two = (
        [op.state_bytes for op in rank("bamba-9b", tp=tp, scheme="gather").attention]
        for tp in (1, 2)
    )
    of_groups = 4 * 3 * 2 * 128  # float32, positions kept, B and C
    assert [2 * state - of_groups if state else 0 for state in two] == one


# -- attention by requests ------------------------------------------------------------------------


def on_two(**more):
    spec = spec_of("deepseek-v2-lite")
    return rank_model(spec, precision_of(spec), Parallel(tp=2, **more).on("cpu"))


def test_attention_of_own_requests_has_its_weights_whole_and_some_of_the_rows():
    by_heads, by_requests = on_two(), on_two(dp_attention=True)
    alone = rank_model(spec_of("deepseek-v2-lite"), precision_of(spec_of("deepseek-v2-lite")))
    own = {each.name: each for each in by_requests.matrices}
    whole = {each.name: each for each in alone.matrices}
    half = {each.name: each for each in by_heads.matrices}
    for name, each in own.items():
        if name.startswith("attention"):
            assert each.num_params == whole[name].num_params and each.num_sharing == 2
        else:
            assert each == half[name] and each.num_sharing == 1
    (latent,) = by_requests.attention
    assert latent.num_sharing == 2
    assert latent.flops_per_score == alone.attention[0].flops_per_score
    assert by_requests.kv_bytes_per_token == by_heads.kv_bytes_per_token
    assert by_heads.exchange.meetings - by_requests.exchange.meetings == 2 * 27


def test_attention_of_own_requests_takes_the_time_of_the_busiest_rank():
    model = on_two(dp_attention=True)
    (rows,) = passes([Span(99, 1), Span(499, 1), Span(299, 1), Span(0, 10, 0)])
    busiest = rows.on_busiest(2)
    assert (busiest.singles, busiest.prompts, busiest.num_tokens) == ([499, 99], [(0, 10)], 12)
    (latent,) = model.attention
    alone = replace(latent, num_sharing=1)
    assert decode_attention_work(latent, rows) == decode_attention_work(alone, busiest)
    (one,) = passes([Span(99, 1)])
    assert one.on_busiest(2) == one  # the other rank attends to nothing


@pytest.mark.parametrize(
    ("name", "layout", "kind", "said"),
    [
        ("llama-3.1-8b", {"tp": 2}, "cpu", "latent attention alone"),
        ("deepseek-v2-lite", {"tp": 2}, "gpu", "planned for processors.*dp = ep = 2, tp = 1"),
        ("deepseek-v2-lite", {"tp": 1}, "cpu", "choose tp > 1"),
        ("deepseek-v2-lite", {"tp": 2, "pp": 2}, "cpu", "pp = 1, not 2 and 2"),
    ],
)
def test_attention_by_requests_that_cannot_be(name, layout, kind, said):
    spec = spec_of(name)
    with pytest.raises(ConfigError, match=said):
        rank_model(spec, precision_of(spec), Parallel(**layout, dp_attention=True).on(kind))


def test_there_can_be_more_ranks_than_heads_of_attention():
    spec = spec_of("deepseek-v2-lite")  # 16 heads
    found = rank_model(spec, precision_of(spec), Parallel(tp=20, dp_attention=True).on("cpu"))
    assert found.parallel.num_pools == 20
