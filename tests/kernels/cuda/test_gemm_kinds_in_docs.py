"""The table of matrix products in docs/gpu.md is that of the code."""

from __future__ import annotations

from pathlib import Path

from octavo.kernels.cuda import gemm_dispatch
from octavo.kernels.cuda.attention_plan import Gpu

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"


def test_the_table_of_products_is_the_codes():
    rows = [
        f"| {format} | {' | '.join(kind.name for kind in found)} |"
        for format, found in gemm_dispatch.table(gemm_dispatch.GemmConditions(Gpu(90, 132)))
    ]
    text = PAGE.read_text("utf-8")
    table = text.partition("<!-- gemm kinds -->\n")[2].partition("<!-- /gemm kinds -->")[0]
    assert table.splitlines()[2:] == rows
