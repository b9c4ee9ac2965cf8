from __future__ import annotations

from octavo.quantization.ggml_types import GGMLType
from octavo.quantize.size_warnings import TypeFit, warn_of_rows

FITTING = TypeFit("blk.0.ffn_up.weight", (1024, 256), GGMLType.Q4_K, GGMLType.Q4_K)


def test_nothing_is_said_where_all_rows_fit() -> None:
    assert warn_of_rows("Q4_K_M", [FITTING, FITTING]) is None


def test_which_rows_do_not_fit_what_they_become_and_what_to_take() -> None:
    others = [
        TypeFit("blk.0.attn_q.weight", (576, 576), GGMLType.Q4_K, GGMLType.Q5_0),
        TypeFit("blk.0.attn_k.weight", (192, 576), GGMLType.Q4_K, GGMLType.Q5_0),
        TypeFit("blk.0.attn_v.weight", (192, 576), GGMLType.Q6_K, GGMLType.Q8_0),
    ]
    said = warn_of_rows("Q4_K_M", [FITTING, *others])
    assert said is not None
    for words in (
        "Q4_K_M does not fit 3 of 4 matrices, such as blk.0.attn_q.weight",
        "2 with rows of 576 are Q5_0, not Q4_K",
        "1 with rows of 576 are Q8_0, not Q6_K",
        "bits a weight, not 4.",
        "--type IQ4_NL or Q4_1",
    ):
        assert words in said
    odd = TypeFit("blk.0.attn_q.weight", (48, 48), GGMLType.Q4_K, GGMLType.F16)
    said = warn_of_rows("Q4_K_M", [odd])
    assert said is not None and "--method gptq" in said and "16.00 bits a weight, not 4.50" in said
