from __future__ import annotations

from octavo.cost.engine_profile import Limits, profile
from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of
from octavo.planner import Deployment, Slo, Traffic, judge, parse_slo, search
from octavo.planner.money import listed
from octavo.planner.sizing import fewest_replicas, highest_rate


def deployment(model: str, hardware: str, quantization: str | None = None, **parallel: int):
    spec = open_spec(model)
    device, _ = find_device(hardware)
    return Deployment(
        spec,
        precision_of(spec, quantization),
        device,
        Parallel(**parallel),
        profile("vllm"),
        Limits(),
    )


def test_the_fewest_replicas_do_and_one_less_does_not():
    base, slo = deployment("llama-3.1-8b", "h100-sxm"), parse_slo("tpot=20,ttft=300")
    traffic = Traffic(800, 200, rate=40)
    enough = fewest_replicas(base, traffic, slo)
    assert enough is not None and enough.is_feasible and enough.deployment.replicas > 1
    assert not judge(base.times(enough.deployment.replicas - 1), traffic, slo).is_feasible
    assert fewest_replicas(base, traffic, slo, most_devices=1) is None


def test_the_highest_rate_keeps_the_limits_and_a_little_more_does_not():
    base, slo = deployment("llama-3.1-8b", "h100-sxm"), parse_slo("tpot=20")
    rate = highest_rate(base, Traffic(800, 200), slo)
    assert judge(base, Traffic(800, 200, rate), slo).is_feasible
    assert not judge(base, Traffic(800, 200, rate * 1.02), slo).is_feasible
    assert rate < highest_rate(base, Traffic(800, 200), Slo())
    assert highest_rate(base, Traffic(800, 200), parse_slo("tpot=1")) == 0.0


def test_offers_are_by_price_and_do_what_is_asked():
    traffic, slo = Traffic(1000, 200, rate=8), parse_slo("tpot=50,ttft=1s")
    bases = [
        deployment("qwen3-32b", hardware, quantization)
        for hardware in ("h100-sxm", "l40s", "rtx4090")
        for quantization in (None, "int4")
    ]
    found = search(bases, traffic, slo, price_of=listed, most_devices=16)
    assert found.offers and all(offer.verdict.is_feasible for offer in found.offers)
    dollars = [offer.dollars_per_hour.value for offer in found.offers]
    assert dollars == sorted(dollars)
    assert all(offer.deployment.num_devices <= 16 for offer in found.offers)
    for refused in found.refused:
        assert not refused.is_feasible


def test_what_no_number_of_replicas_does_is_refused_by_its_lone_request():
    found = search(
        [deployment("llama-3.1-70b", "a100-80-sxm")], Traffic(500, 200, rate=1),
        parse_slo("tpot=2"), price_of=listed,
    )  # fmt: skip
    assert not found.offers
    assert found.refused[0].binding.name == "tpot"  # and not the weights, which fit in some layouts
    assert found.refused[-1].binding.name == "weights"


def test_a_model_is_laid_out_only_as_its_heads_allow():
    found = search(
        [deployment("smollm2-135m", "h100-sxm")], Traffic(), Slo(), price_of=listed, per_replica=8
    )  # nine heads
    assert {offer.deployment.parallel.tp for offer in found.offers} == {1}


def test_what_is_known_of_one_replica_is_known_of_all():
    one = deployment("llama-3.1-8b", "h100-sxm")
    many = one.times(7)
    assert many.num_devices == 7 and many.steps is one.steps and many.memory is one.memory


def test_no_more_run_at_once_than_have_a_seat_and_memory():
    base = deployment("llama-3.1-8b", "rtx4090")
    assert base.limited(max_num_seqs=4).slots(2000).max_num_seqs == 4
    many = base.limited(max_num_seqs=200)
    assert many.slots(2000).max_num_seqs == many.max_concurrency(2000) < 200
