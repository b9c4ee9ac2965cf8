from __future__ import annotations

from octavo.cost.find_device import find_device
from octavo.cost.layouts import layouts
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel


def test_tensors_are_shared_within_a_machine_and_layers_across():
    spec = open_spec("llama-3.1-405b")
    found = list(layouts(spec, find_device("h100-sxm")[0], 16))
    assert {each.tp for each in found} == {1, 2, 4, 8}
    assert Parallel(tp=8, pp=2) in found and Parallel(tp=4, pp=2) in found
    assert all(each.num_devices <= 16 for each in found)
    assert len(set(found)) == len(found)
    assert all(each.dp == each.ep == 1 for each in found)  # copies would be replicas


def test_there_are_no_more_stages_than_layers():
    spec = open_spec("qwen2.5-0.5b")  # 24 layers
    assert max(each.pp for each in layouts(spec, find_device("rtx4090")[0], 32)) == 16


def test_experts_are_shared_by_tensors_by_copies_or_by_both():
    found = list(layouts(open_spec("mixtral-8x7b"), find_device("h100-sxm")[0], 4))
    shared = {(each.tp, each.pp, each.dp) for each in found if each.ep > 1}
    assert shared == {
        *((4, 1, 1), (2, 1, 2), (1, 1, 4)),
        *((2, 2, 1), (1, 2, 2), (2, 1, 1), (1, 1, 2)),
    }
    assert all(each.ep == each.tp * each.dp for each in found if each.ep > 1)


def test_processors_with_latent_attention_can_have_requests_of_their_own():
    deepseek, turin = open_spec("deepseek-v2-lite"), find_device("epyc-turin")[0]
    found = [each for each in layouts(deepseek, turin, 4) if each.dp_attention]
    assert {(each.tp, each.pp, each.ep) for each in found} == {
        *((2, 1, 1), (2, 1, 2)),
        *((4, 1, 1), (4, 1, 4)),
    }
    for spec, device in ((deepseek, "h200"), (open_spec("mixtral-8x7b"), "epyc-turin")):
        assert not any(each.dp_attention for each in layouts(spec, find_device(device)[0], 4))
