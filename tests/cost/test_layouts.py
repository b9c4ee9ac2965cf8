from __future__ import annotations

from octavo.cost.find_device import find_device
from octavo.cost.layouts import layouts
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel


def test_tensors_are_shared_within_a_machine_and_layers_across():
    spec = open_spec("llama-3.1-405b")
    found = list(layouts(spec, find_device("h100-sxm")[0], 16))
    assert {each.tp for each in found} == {1, 2, 4, 8}
    assert {(each.tp, each.pp) for each in found if each.pp > 1} == {(8, 2)}
    assert all(each.num_devices <= 16 for each in found)


def test_slow_links_allow_pipelines():
    found = list(layouts(open_spec("llama-3.1-70b"), find_device("rtx4090")[0], 8))
    assert Parallel(tp=2, pp=4) in found and Parallel(pp=8) in found


def test_experts_are_shared_by_tensors_or_by_copies():
    found = list(layouts(open_spec("mixtral-8x7b"), find_device("h100-sxm")[0], 4))
    assert Parallel(tp=4, ep=4) in found and Parallel(dp=4, ep=4) in found
