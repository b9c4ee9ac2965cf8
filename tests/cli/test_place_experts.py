"""``octavo place-experts``: from loads to a placement."""

from __future__ import annotations

import json

from fused_models import CONFIGS

from octavo.cli import main
from octavo.serving.expert_files import placement_of, write_loads

MODEL = CONFIGS["mixtral"]
NUM_EXPERTS, NUM_LAYERS = MODEL.experts.routing.num_experts, sum(MODEL.experts.layers)


def test_loads_become_a_placement(tmp_path, capsys):
    loads, out = tmp_path / "loads.json", tmp_path / "placement.json"
    write_loads(loads, MODEL, [[100] + [10] * (NUM_EXPERTS - 1)] * NUM_LAYERS)
    arguments = ["place-experts", str(loads), str(out), "--ranks", "2", "--slots"]
    assert main([*arguments, str(NUM_EXPERTS), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_ranks"] == 2
    assert told["num_copies"] == NUM_LAYERS * NUM_EXPERTS
    assert told["imbalance"] == 1.0 < told["imbalance_in_order"]
    assert placement_of(str(out), MODEL)(2).layers == (((0, 1),) * NUM_EXPERTS,) * NUM_LAYERS
    assert main([*arguments, str(NUM_EXPERTS)]) == 0
    assert "1.000 times the mean" in capsys.readouterr().out


def test_what_is_wrong_is_said(tmp_path, capsys):
    loads, out = tmp_path / "loads.json", tmp_path / "placement.json"
    write_loads(loads, MODEL, [[1] * NUM_EXPERTS] * NUM_LAYERS)
    assert main(["place-experts", str(loads), str(out)]) == 2
    assert "--ranks N" in capsys.readouterr().err
    assert main(["place-experts", str(loads), str(out), "--ranks", "1000"]) == 1
    assert "1000 ranks cannot share" in capsys.readouterr().err
    assert not out.exists()
