"""The page rounds weights as octavo does: the same codes and values, in a real browser."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized import parts_of

from octavo.page import documents, site
from octavo.quantization.formats.registry import open_format
from octavo.quantization.levels import E2M1
from octavo.quantize.named_schemes import named_scheme

pytestmark = pytest.mark.slow

ROWS, COLUMNS = 8, 256
PICTURES = site.STATIC / "pictures"
QUANTIZED = ("Q8_0", "fp8", "Q4_K", "Q4_0", "int4-g32-asym", "int4-g64", "int4-g128")
READ = ("MXFP4", "NVFP4")  # octavo reads these, and makes none


def sample() -> np.ndarray:
    stored = json.loads((PICTURES / "sample.json").read_text())
    halves = torch.frombuffer(bytearray(b64decode(stored["bfloat16"])), dtype=torch.bfloat16)
    return halves.float().numpy().reshape(ROWS, stored["columns"])


def ieee_root(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sqrt(x.numpy()))


def odd_rows() -> np.ndarray:
    """Of zeros, of one value, of very small ones, on the levels and between them."""
    draw = np.random.default_rng(3)
    rows = [
        np.zeros(COLUMNS),
        np.full(COLUMNS, -3.0),
        np.arange(COLUMNS) / 7,
        -100 * np.arange(COLUMNS),
        1e-7 * draw.normal(size=COLUMNS),
        np.eye(COLUMNS)[5],
        draw.integers(-8, 8, COLUMNS),
        draw.integers(-12, 13, COLUMNS) / 2,
    ]
    return np.stack(rows).astype(np.float32)


WEIGHTS = {
    "sample": sample(),
    "long tails": np.random.default_rng(4).standard_t(2, (ROWS, COLUMNS)).astype(np.float32),
    "odd": odd_rows(),
}


@pytest.fixture(params=sorted(WEIGHTS))
def both(request, tab, monkeypatch) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows, and what the page makes of them, by type."""
    # PyTorch's root may be off by its last bit, which a search ends elsewhere by.
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(ieee_root(x)))
    rows = WEIGHTS[request.param]
    tab.open("pictures")
    found = tab.js(f"""(async () => {{
        const {{ TYPES }} = await import("/static/pictures/rounding.js");
        const rows = Float32Array.from({json.dumps(rows.ravel().tolist())});
        return Object.fromEntries(Object.entries(TYPES).map(([name, type]) => {{
            const made = type.round(rows, {COLUMNS});
            const values = Array.from(made.values);
            return [name, {{ ...made, values, bits: type.bits({COLUMNS}), levels: type.levels }}];
        }}));
    }})()""")
    assert sorted(found) == sorted((*QUANTIZED, *READ))
    return rows, found


def test_the_page_rounds_as_octavo_does(both):
    rows, found = both
    for name in QUANTIZED:
        expected = named_scheme(name).round(torch.from_numpy(rows), search=False)
        made = found[name]
        np.testing.assert_array_equal(made["codes"], expected.codes.ravel(), name)
        np.testing.assert_array_equal(made["values"], expected.values.ravel(), name)
        np.testing.assert_allclose(made["scales"], expected.scales.ravel(), 1e-6, err_msg=name)
        assert made["width"] == expected.width
        assert made["bits"] == named_scheme(name).bits_per_weight(COLUMNS)
    check_float4(rows, found["MXFP4"], "mxfp4")
    check_float4(rows, found["NVFP4"], "nvfp4")


def check_float4(rows: np.ndarray, made: dict[str, Any], kind: str) -> None:
    """Stored, and read by octavo, codes and scales are the same values; each is the nearest."""
    codes = np.array(made["codes"], np.uint8).reshape(rows.shape)
    scales = np.array(made["scales"], np.float32).reshape(ROWS, -1)
    tensors = {"weight_packed": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)}
    if kind == "mxfp4":
        tensors["weight_scale"] = torch.from_numpy(np.log2(scales) + 127).byte()
    else:
        divisor = np.float32(E2M1.max() * 448) / np.abs(rows).max()
        local = torch.from_numpy(scales * divisor).to(torch.float8_e4m3fn)
        tensors |= {"weight_scale": local, "weight_global_scale": torch.tensor([divisor])}
    weight = stored(kind, tensors, made["width"])
    np.testing.assert_array_equal(weight.dequantize().ravel(), made["values"])
    assert sorted({*E2M1.tolist()}) == made["levels"]
    each = np.repeat(scales, made["width"], axis=1)
    units = np.divide(rows, each, out=np.zeros_like(rows), where=each > 0)
    by_code = np.array([*range(0, 16, 2), *range(1, 16, 2)])  # of halves the even one
    nearest = by_code[np.abs(units[..., None] - E2M1[by_code]).argmin(axis=-1)]
    np.testing.assert_array_equal(E2M1[codes], E2M1[nearest])


def stored(kind: str, tensors: dict[str, torch.Tensor], width: int) -> Any:
    """As a checkpoint of compressed-tensors has it."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": width}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-pack-quantized",
        "config_groups": {"group_0": group},
    }
    format = open_format(config, Path("config.json"))
    return format.assemble("m.weight", parts_of(format, tensors))


def test_what_was_measured_is_what_the_document_says(tab):
    tab.open("pictures")
    rows = tab.js("""(async () => {
        const { MEASURED } = await import("/static/pictures/measured_loss.js");
        return MEASURED;
    })()""")
    text = documents.paths()["quantization"].read_text().partition("## Quality")[2]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.partition("\n\n(")[0].splitlines()
        if line.startswith("| ")
    ]
    said = {(float(line[1]), float(line[3])) for line in lines if line[0]}
    assert said == {(row["bits"], row["kl"]) for row in rows}
