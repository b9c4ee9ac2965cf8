"""compressed-tensors: octavo reads back what was written, of every width."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_weights import assert_same, random_integers, read, write
from quantized import stream

from octavo.base.errors import ConfigError
from octavo.quantize.grid import Scheme, quantize_to_nearest
from octavo.quantize.writers.compressed_tensors import (
    CompressedTensorsWriter,
    FP8Writer,
    Int8Writer,
)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, "channel"])
def test_round_trip(bits, symmetric, group_size, tmp_path):
    scheme = Scheme(bits, group_size, symmetric)
    weight = random_integers(64, 96, scheme)
    write(tmp_path, CompressedTensorsWriter(), weight, scheme)
    assert_same(weight, read(tmp_path))
    assert not read(tmp_path).rounds_activations


@pytest.mark.parametrize("bits, num_inputs", [(3, 19), (5, 7), (6, 10), (7, 8)])
def test_rows_that_would_be_as_wide_with_gaps(bits, num_inputs, tmp_path):
    """The version tells that there are none."""
    scheme = Scheme(bits, "channel")
    weight = random_integers(8, num_inputs, scheme)
    write(tmp_path, CompressedTensorsWriter(), weight, scheme)
    assert_same(weight, read(tmp_path))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_are_streams_of_rows_and_zeros_of_columns(bits):
    scheme = Scheme(bits, 32, symmetric=False)
    weight = random_integers(32, 64, scheme)
    parts = CompressedTensorsWriter().parts(weight, scheme)
    codes = weight.codes.rows(0, 32)
    assert parts["weight_packed"].data.view("<u4")[5].tolist() == stream(codes[5], bits)
    zeros = np.ascontiguousarray(parts["weight_zero_point"].data[:, 1]).view("<u4")
    assert zeros.tolist() == stream(weight.zeros[:, 1], bits)
    assert parts["weight_shape"].data.tolist() == [32, 64]


def test_int8(tmp_path):
    scheme = Scheme(8, "channel")
    weight = random_integers(24, 40, scheme)
    write(tmp_path, Int8Writer(), weight, scheme)
    assert_same(weight, read(tmp_path))
    assert read(tmp_path).rounds_activations


def test_fp8(tmp_path):
    rows = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    rows[3] = 0
    weight = quantize_to_nearest(rows, Scheme(8, "channel", table="e4m3")).coded("fp8")
    write(tmp_path, FP8Writer(), weight, Scheme(8, "channel"))
    assert_same(weight, found := read(tmp_path))
    scales = torch.from_numpy(np.broadcast_to(found.scales, (24, 1)).copy())
    of_torch = (rows / scales).to(torch.float8_e4m3fn).float() * scales
    assert torch.equal(torch.from_numpy(found.dequantize()), of_torch)
    torch.testing.assert_close(of_torch.abs().amax(dim=1), rows.abs().amax(dim=1))


def test_what_has_no_room():
    asymmetric = Scheme(3, 16, symmetric=False)
    with pytest.raises(ConfigError, match="zeros of its 20 outputs fill no whole words"):
        CompressedTensorsWriter().check((20, 32), asymmetric)
    CompressedTensorsWriter().check((20, 32), Scheme(3, 16))
    for scheme in (Scheme(4, "channel"), Scheme(8, 16), Scheme(8, "channel", symmetric=False)):
        with pytest.raises(ConfigError, match="W8A8 cannot hold"):
            Int8Writer().check((32, 32), scheme)
    with pytest.raises(ConfigError, match="FP8 cannot hold"):
        FP8Writer().check((32, 32), Scheme(8, 16))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, "channel"])
def test_the_size_is_that_of_all_parts(bits, symmetric, group_size):
    scheme = Scheme(bits, group_size, symmetric)
    weight = random_integers(64, 48, scheme)
    parts = CompressedTensorsWriter().parts(weight, scheme).values()
    found = CompressedTensorsWriter().num_bits((64, 48), scheme)
    assert found == sum(part.data.nbytes for part in parts) * 8


def test_a_mix_has_a_group_for_each_scheme():
    four, eight = Scheme(4, 32), Scheme(8, 32)
    schemes = {"a.q_proj": eight, "a.o_proj": four, "b.q_proj": eight}
    config = CompressedTensorsWriter().mixed_config(schemes, ["lm_head"])
    groups = config["config_groups"].values()
    assert [(g["targets"], g["weights"]["num_bits"]) for g in groups] == [
        (["a.o_proj"], 4),
        (["a.q_proj", "b.q_proj"], 8),
    ]
    assert config["ignore"] == ["lm_head"] and config["format"] == "pack-quantized"
    uniform = CompressedTensorsWriter().config(four, ["lm_head"])["config_groups"]["group_0"]
    assert config["config_groups"]["group_0"] == {**uniform, "targets": ["a.o_proj"]}
