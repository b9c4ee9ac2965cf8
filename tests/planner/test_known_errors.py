"""What is often said of inference, and is wrong: the right values, computed by what plans use.

docs/planning.md has the same in words. Numbers of lines there and tests here go together.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_service import line_cost

from octavo.cli.terminal import format_bytes
from octavo.cost.communication import all_reduce, link_of
from octavo.cost.efficiency import IDEAL
from octavo.cost.engine_profile import Limits, number_that_fits, profile
from octavo.cost.find_device import find_device
from octavo.cost.kv import kv_bytes_per_token
from octavo.cost.mixers import Attention
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.cost.rank import rank_model
from octavo.cost.rank_model import MatrixOp, RankModel
from octavo.cost.step_cost import StepModel
from octavo.cost.weights import weights
from octavo.cost.work import Span, seen_by_singles, seen_by_spans
from octavo.planner import Traffic, plan
from octavo.planner.closed_batch import ClosedBatch
from octavo.planner.latency import BatchSlots
from octavo.planner.money import owned, per_million, rented
from octavo.speculation.analysis import Forecast, expected_tokens, linear_step

GB, GIB = 1e9, 2**30


def kv(model: str, dtype: str | None = None) -> float:
    """Bytes of a token."""
    spec = open_spec(model)
    return kv_bytes_per_token(spec, precision_of(spec, kv_cache_dtype=dtype))


def weight_bytes(model: str, quantization: str | None = None) -> float:
    spec = open_spec(model)
    return sum(map(precision_of(spec, quantization).num_bytes, weights(spec)))


def device(name: str):
    return find_device(name)[0]


def ideal_step(model: str, hardware: str, quantization: str | None = None, **parallel: int):
    """Seconds of a step that reaches every ceiling."""
    spec = open_spec(model)
    rank = rank_model(spec, precision_of(spec, quantization), Parallel(**parallel))
    return StepModel(rank, device(hardware), IDEAL)


# -- memory ---------------------------------------------------------------------------------------


def test_heads_have_the_hidden_size_over_query_heads():
    """Over key-value heads, the cache of 128,000 tokens would be 312 GiB."""
    spec = open_spec("llama-3-70b")
    assert {mixer.head_dim for layer in spec.layers for mixer in layer.mixers} == {8192 // 64}
    assert kv("llama-3-70b") * 128_000 / GB == pytest.approx(41.94, abs=0.005)
    assert kv("llama-3-70b") * 128_000 / GIB == pytest.approx(39.06, abs=0.005)


def test_gigabytes_are_not_gibibytes():
    """What is sold as 80 GB, and counted in powers of ten, is 7 % less in GiB."""
    assert format_bytes(80 * GB) == "74.5 GiB"


def test_keys_and_values_are_of_key_value_heads():
    """Not of query heads: 2.62 MB would be stored for a token, not 0.33."""
    assert kv("llama-3-70b") == 327_680
    assert kv("llama-3-70b") * 64 / 8 == pytest.approx(2.62e6, rel=0.01)


@pytest.mark.parametrize(
    "model, tokens, gigabytes",
    [
        ("llama-3-8b", 4096, 0.537),
        ("llama-3-8b", 131_072, 17.18),
        ("llama-3-70b", 4096, 1.342),
        ("llama-3-70b", 131_072, 42.95),
    ],
)
def test_tables_of_keys_and_values(model, tokens, gigabytes):
    """Reference cases R02 and R03."""
    assert kv(model) * tokens / GB == pytest.approx(gigabytes, rel=0.001)


def test_gpt_3_keeps_five_megabytes_of_a_token():
    """618 GB, or 576 GiB, of 131,072 of them; 590 is neither."""
    spec = open_spec("llama-2-7b")
    (mixer,) = spec.layers[0].mixers
    assert isinstance(mixer, Attention)
    layer = replace(spec.layers[0], mixers=(replace(mixer, heads=96, kv_heads=96, head_dim=128),))
    each = kv_bytes_per_token(replace(spec, layers=(layer,) * 96), precision_of(spec))
    assert each * 4096 / GB == pytest.approx(19.33, abs=0.005)
    assert each * 131_072 / GB == pytest.approx(618.5, abs=0.05)
    assert each * 131_072 / GIB == pytest.approx(576, abs=0.5)


def test_llama_2_70b_with_all_heads():
    """64 of them, not 32: 10.74 GB for 4,096 tokens, eight times what it keeps."""
    assert kv("llama-2-70b") * 8 * 4096 / GB == pytest.approx(10.74, abs=0.005)


def test_a_long_context_of_70b_does_not_fit_one_card():
    """32.6 GiB of 4-bit weights (more with scales and embeddings), 39.06 of keys and values, and a
    sampler: 80 GB are too few at 0.9."""
    found = plan(
        "llama-3.1-70b",
        "h100-sxm",
        Traffic(127_872, 128, concurrency=1),
        quantization="int4",
        engine="vllm",
    )
    assert not found.is_feasible
    assert kv("llama-3.1-70b") * 128_000 / GIB == pytest.approx(39.06, abs=0.005)
    assert 32.6 < weight_bytes("llama-3.1-70b", "int4") / GIB < 38


def test_a_rule_of_thumb_is_94_times_too_small():
    """Billions of parameters x 0.00005 MB a token: 0.0035, where 70B keeps 0.328."""
    assert kv("llama-3-70b") / (70 * 0.00005e6) == pytest.approx(94, abs=0.5)


def test_latent_attention_is_57_times_smaller_than_all_heads():
    """16.1 GB of 128 heads, and 0.283 of what DeepSeek-V2 keeps of 4,096 tokens."""
    assert kv("deepseek-v2") * 4096 / GB == pytest.approx(0.283, abs=0.0005)
    all_heads = 60 * 2 * 128 * 128 * 2
    assert all_heads * 4096 / GB == pytest.approx(16.1, abs=0.05)
    assert all_heads / kv("deepseek-v2") == pytest.approx(56.9, abs=0.05)


def test_one_key_value_head_is_64_times_smaller_than_64():
    spec = open_spec("llama-3-70b")
    layer = spec.layers[0]
    (mixer,) = layer.mixers
    assert isinstance(mixer, Attention)
    one, all_heads = (
        kv_bytes_per_token(
            replace(spec, layers=(replace(layer, mixers=(replace(mixer, kv_heads=count),)),)),
            precision_of(spec),
        )
        for count in (1, 64)
    )
    assert all_heads / one == 64
    assert 80 * all_heads * 128_000 / GB == pytest.approx(335.5, abs=0.1)
    assert 80 * one * 128_000 / GB == pytest.approx(5.24, abs=0.005)


def test_latent_attention_keeps_the_rotated_part_too():
    """512 + 64 values, not 512 (reference case R05)."""
    assert kv("deepseek-v3") == 61 * (512 + 64) * 2 == 70_272
    assert kv("deepseek-v2") == 69_120


def test_a_window_has_its_width_and_not_one_more():
    assert seen_by_singles([100], window=8).scores == 8
    assert seen_by_spans([(100, 1)], window=8).scores == 8


@pytest.mark.parametrize("model, gigabytes", [("llama-2-7b", 13.48), ("llama-3.1-70b", 141.1)])
def test_embeddings_and_heads_are_weights(model, gigabytes):
    """12.88 GB of 7B would be the layers alone."""
    assert weight_bytes(model) / GB == pytest.approx(gigabytes, rel=0.001)


def test_an_mlp_with_a_gate_has_three_matrices():
    """3 h f, which is 8.06 h^2 of Llama-2-7B."""
    layer = [weight for weight in weights(open_spec("llama-2-7b")) if weight.layer == 0]
    params = sum(weight.num_params for weight in layer if weight.part == "mlp")
    assert params / 4096**2 == pytest.approx(8.06, abs=0.005)


@pytest.mark.parametrize(
    "quantization, gigabytes, within",
    [("Q4_K_M", 42.5, 0.01), ("awq", 39.8, 0.01), ("Q2_K", 26.4, 0.05)],
)
def test_files_have_more_bits_than_their_blocks(quantization, gigabytes, within):
    """70B in four bits is not 35 GB: scales, zero points, embeddings and mixes add to it."""
    assert weight_bytes("llama-3-70b", quantization) / GB == pytest.approx(gigabytes, rel=within)


def test_four_bits_are_two_to_a_byte():
    half, whole = (weight_bytes("llama-2-7b", name) for name in ("int4", "int8"))
    assert half / whole == pytest.approx(0.55, abs=0.03)  # scales and embeddings apart


def test_activations_are_of_a_step_and_of_its_sampler():
    """Not of batch x context: 1,024 rows of logits, sorted, take 4.7 GiB (R12)."""
    engine, spec = profile("vllm"), open_spec("llama-3.1-8b")
    limits = engine.settle(Limits(max_num_seqs=1024), spec, device("h100-sxm"))
    found = engine.activations(spec, Parallel(), limits)
    assert found.value / GIB == pytest.approx(4.76, rel=0.03)


def test_what_memory_holds_at_once():
    """Reference case R42: (80 - 14) / 5 GB."""
    assert number_that_fits(80 * GB - 14 * GB, 5 * GB) == 13
    assert number_that_fits(0.9 * 80 * GB - 14 * GB, 5 * GB) == 11


# -- speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params, tokens", [(70e9, 14.3), (7e9, 143), (405e9, 2.5)])
def test_a_stream_reads_all_weights_for_each_token(params, tokens):
    """Reference case R19, at 2 TB/s and two bytes."""
    matrix = MatrixOp("all", 1, 1, 1, int(params), 2 * params)
    model = RankModel((matrix,), (), hidden_size=1, vocab_size=1, num_layers=0)
    two_terabytes = replace(device("a100-80-sxm"), memory_bandwidth=2.0e12)
    step = StepModel(model, two_terabytes, IDEAL).cost([Span(0, 1)])
    assert 1 / step.total.value == pytest.approx(tokens, rel=0.02)


def test_an_operation_is_two_for_each_parameter_not_byte():
    """24,214 tokens a second of 6.44e9 parameters on 312 TFLOPS, not half of it."""
    peak = device("a100-80-sxm").peaks["fp16"]
    assert peak / (2 * 12.885e9 / 2) == pytest.approx(24_214, rel=0.001)


def test_nothing_is_faster_than_its_weights_are_read():
    """180 tokens a second of Llama-2-7B in 16 bits on an A100 cannot be: 151 are the roof, of
    which the embedding, which is not read, makes 2 %."""
    roof = device("a100-80-sxm").memory_bandwidth / weight_bytes("llama-2-7b")
    assert roof == pytest.approx(151, abs=0.5)
    assert 1 / ideal_step("llama-2-7b", "a100-80-sxm").cost([Span(0, 1)]).total.value < 1.03 * roof


def test_a_hundred_tokens_a_second_of_a_long_text_read_much():
    """268 GB/s for 8,192 tokens before it: all of them are read for each, not 2.6 MB."""
    assert kv("llama-3-70b") * 8192 / GB == pytest.approx(2.68, abs=0.01)
    assert kv("llama-3-70b") * 8192 * 100 / GB == pytest.approx(268, abs=1)


@pytest.mark.parametrize(
    "name, tflops", [("h100-sxm", 989.4), ("a100-80-sxm", 312), ("l40s", 362.05), ("a10g", 70)]
)
def test_peaks_are_dense_and_of_tensor_cores(name, tflops):
    """1,979 is H100's with sparsity; 91 and 31 are FP32 of L40S and A10G without tensor cores."""
    assert device(name).peaks["fp16"] == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name, terabytes", [("a100-40-sxm", 1.555), ("a100-80-sxm", 2.039)])
def test_bandwidths(name, terabytes):
    assert device(name).memory_bandwidth == pytest.approx(terabytes * 1e12)


def test_a_batch_of_32_is_still_bound_by_memory():
    """Until there are about as many rows as the ridge: 153 on an A100."""
    step = ideal_step("llama-3-70b", "a100-80-sxm")
    assert step.cost([Span(64, 1)] * 32).bound == "memory"
    assert step.cost([Span(64, 1)] * 400).bound == "compute"
    ridge = device("a100-80-sxm").peaks["fp16"] / device("a100-80-sxm").memory_bandwidth
    assert ridge == pytest.approx(153, abs=1)


def test_a_prompt_of_70b_takes_longer_than_a_tenth_of_a_second():
    """449 ms for 1,000 tokens on an ideal A100; 100 ms are of several."""
    step = ideal_step("llama-2-70b", "a100-80-sxm").cost([Span(0, 1000)])
    assert step.total.value == pytest.approx(0.449, rel=0.03)


def test_attention_keeps_no_scores():
    """Those of 131,072 tokens would be 32 GiB for each head of each layer; what a step holds is
    in proportion to its tokens."""
    engine, spec = profile("vllm"), open_spec("llama-3.1-8b")
    whole, half = (
        engine.activations(
            spec,
            Parallel(),
            engine.settle(
                Limits(max_num_batched_tokens=tokens, max_num_seqs=1), spec, device("h100-sxm")
            ),
        ).value
        for tokens in (131_072, 65_536)
    )
    assert whole / half == pytest.approx(2) and whole < 32 * GIB


def test_tokens_take_longer_the_more_there_is():
    """Time for a token grows with context and with batch."""
    step = ideal_step("llama-3.1-8b", "h100-sxm")
    short, long = (step.cost([Span(context, 1)] * 64).total.value for context in (128, 8192))
    few, many = (step.cost([Span(1024, 1)] * count).total.value for count in (1, 256))
    assert long > 2 * short and many > 2 * few


def test_prompts_share_the_budget_of_a_step():
    """They are not free for those who are being answered."""
    found = [
        plan("llama-3.1-8b", "h100-sxm", Traffic(length, 100, rate=5), engine="vllm")
        for length in (10, 4000)
    ]
    tpots = [each.service.latency().tpot.value for each in found]
    assert tpots[1] > 1.2 * tpots[0]


def test_the_first_token_is_not_counted_twice():
    """E2E = TTFT + (n - 1) TPOT."""
    latency = plan("llama-3.1-8b", "h100-sxm", Traffic(500, 200)).service.latency()
    foreseen = latency.ttft.value + 199 * latency.tpot.value
    assert latency.e2e.value == pytest.approx(foreseen)


def test_captured_graphs_make_steps_faster():
    """``enforce_eager`` is not for latency."""
    spec = open_spec("llama-3.1-8b")
    rank = rank_model(spec, precision_of(spec))
    eager, graphs = (
        StepModel.of(rank, device("h100-sxm"), "vllm", eager=each).cost([Span(100, 1)]).total.value
        for each in (True, False)
    )
    assert eager > graphs


# -- parallelism ----------------------------------------------------------------------------------


def test_tensor_parallelism_is_faster_for_one_token_but_not_in_proportion():
    spec = open_spec("llama-3.1-70b")
    one, eight = (
        StepModel.of(rank_model(spec, precision_of(spec), Parallel(tp=tp)), device("h100-sxm"),
                     "vllm").cost([Span(1000, 1)]).total.value
        for tp in (1, 8)
    )  # fmt: skip
    assert 2 < one / eight < 8


def test_a_layer_says_two_things_to_the_others():
    """After attention, and after the MLP: 160 all-reduces of 80 layers."""
    spec = open_spec("llama-3.1-70b")
    rank = rank_model(spec, precision_of(spec), Parallel(tp=8))
    step = StepModel.of(rank, device("h100-sxm"), "vllm").cost([Span(1000, 1)])
    assert max(each.count for each in step.transfers) == 160


def test_small_messages_take_their_latency():
    """160 of them are 1 to 3 ms a token, not 0.05 us each."""
    link = link_of(device("h100-sxm"))
    assert 1e-3 < 160 * all_reduce(8192 * 2, 8, link) < 3e-3


def test_links_are_of_one_direction():
    """900 GB/s is the sum of both."""
    assert device("h100-sxm").link_bandwidth == 450e9
    assert device("a100-80-sxm").link_bandwidth == 300e9
    assert device("l40s").link_bandwidth == 32e9


# -- speculation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "alpha, tokens", [(0.5, 1.38), (0.6, 1.65), (0.7, 1.98), (0.8, 2.40), (0.9, 2.93), (0.95, 3.23)]
)
def test_what_four_draft_tokens_bring(alpha, tokens):
    """At a tenth of a step each; the sum of powers has the token that follows them."""
    forecast = Forecast((alpha,) * 4, 0.1, 1, linear_step(0.0))
    assert forecast.speedup(4) == pytest.approx(tokens, abs=0.005)


def test_draft_tokens_are_not_independent_of_those_before():
    """Reference case R30: 2.18 times as fast, where k alpha + 1 tokens would be 3.3."""
    tokens = expected_tokens(0.7, 5)
    assert tokens == pytest.approx(2.941, abs=5e-4) and tokens < 5 * 0.7 + 1
    forecast = Forecast((0.7,) * 5, 0.07, 1, linear_step(0.0))
    assert forecast.speedup(5) == pytest.approx(2.179, abs=5e-4)


def test_how_many_tokens_to_draft():
    """Reference case R29: eight, not five to seven."""
    assert Forecast((0.8,) * 64, 0.05, 1, linear_step(0.0)).best_length == 8


def test_speculative_decoding_is_for_lone_requests_and_not_for_many():
    """Latency-sensitive single requests are what it is best for."""
    alone, many = (
        plan("llama-3.1-8b", "a100-80-sxm", Traffic(128, 256, concurrency=count), engine="vllm")
        for count in (1, 512)
    )
    assert any("speculative" in each.what for each in alone.advice)
    assert not any("speculative" in each.what for each in many.advice)


# -- money and queues -----------------------------------------------------------------------------


def test_a_token_costs_by_throughput_and_not_by_latency():
    """Of a batch of 64, a 64th of what a lone stream costs, but for what the batch adds."""
    alone, many = (
        plan("llama-2-7b", "a100-80-sxm", Traffic(200, 200, concurrency=count), engine="vllm")
        for count in (1, 64)
    )
    dollars = [each.bill.per_million_output_tokens.value for each in (alone, many)]
    assert 20 < dollars[0] / dollars[1] < 64


def test_a_machine_that_is_owned_is_not_free():
    """60 W and 3,500 dollars over three years, at 8 tokens a second: 4.9 dollars a million."""
    price = owned(3500, 3, 60, 0.15).per_hour_of_work(1.0)
    tokens = rented(8.0).fixed  # a figure without spread
    assert per_million(price, tokens).value == pytest.approx(0.31 + 4.62, abs=0.01)


def test_the_design_challenge():
    """Reference case R41. 64 streams at 20 ms make 16 requests of 200 tokens a second, not 25;
    each takes 4 s; and 25 a second would make 100 under way."""
    service = ClosedBatch(
        line_cost(fixed=0.020, per_token=0.0, per_key=0.0),
        Traffic(1, 200, concurrency=64),
        BatchSlots(64, 64),
    )
    assert service.requests_per_second.value == pytest.approx(16)
    assert service.latency().e2e.value == pytest.approx(4)
    assert 25 * service.latency().e2e.value == pytest.approx(100)


def test_the_floors_of_the_design_challenge():
    """70B in fp8 on eight H100: 2.6 ms to read the weights, 4.5 ms to compute a prompt of 500."""
    h100 = device("h100-sxm")
    assert 70.55e9 / 8 / h100.memory_bandwidth == pytest.approx(2.63e-3, rel=0.005)
    assert 2 * 70.55e9 * 500 / 8 / h100.peaks["fp8"] == pytest.approx(4.46e-3, rel=0.005)


def test_blocks_waste_less_than_one_for_each_sequence():
    memory = plan("llama-3.1-8b", "h100-sxm", engine="vllm").deployment.memory
    tokens = memory.max_concurrency(1000) * 1000
    assert tokens / memory.kv_tokens > 1 - 16 / 1000 - 1000 / memory.kv_tokens
