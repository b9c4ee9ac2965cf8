"""AWQ files: octavo reads back what was written, and words are in AutoAWQ's order."""

from __future__ import annotations

import pytest
from made_weights import assert_same, random_integers, read, write
from quantized import stream

from octavo.base.errors import ConfigError
from octavo.quantize.grid import Scheme
from octavo.quantize.writers.awq import AWQWriter


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 64, "channel"])
def test_round_trip(symmetric, group_size, tmp_path):
    scheme = Scheme(4, group_size, symmetric)
    weight = random_integers(40, 128, scheme)
    write(tmp_path, AWQWriter(), weight, scheme)
    assert_same(weight, read(tmp_path))


def test_the_order_of_a_word():
    scheme = Scheme(4, 16, symmetric=False)
    weight = random_integers(16, 32, scheme)
    parts = AWQWriter().parts(weight, scheme)
    codes = weight.codes.rows(0, 16)
    of_input = [codes[8 + column, 3] for column in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert [int(parts["qweight"].data.view("<u4")[3, 1])] == stream(of_input, 4)
    assert {name: (part.dtype, part.data.shape) for name, part in parts.items()} == {
        "qweight": ("I32", (32, 2)),
        "qzeros": ("I32", (2, 2)),
        "scales": ("F16", (2, 16)),
    }


def test_what_stays_as_it_is_is_named():
    config = AWQWriter().config(Scheme(4, 64), ["lm_head"])
    assert config["modules_to_not_convert"] == ["lm_head"] and config["group_size"] == 64


def test_what_has_no_room():
    with pytest.raises(ConfigError, match="3 bits, it has 4"):
        AWQWriter().check((32, 32), Scheme(3, 16))
    with pytest.raises(ConfigError, match="its 20 outputs are no multiple of 8"):
        AWQWriter().check((20, 32), Scheme(4, 16))
