from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.quality.divergence import Divergence, DivergenceMeter
from octavo.quality.estimate import Estimate, standard_error
from octavo.quality.logit_file import LogitFile, LogitFileWriter
from octavo.quality.windows import cut

VOCAB = 1000


def compare(tmp_path, to_row, base: np.ndarray, other: np.ndarray, targets: list[int]):
    """The comparison of logits through a file, and its result."""
    windows = cut(np.zeros(2 * len(base) + 2, int), 2 * len(base) + 2)
    assert windows.num_scored == len(base)
    path = tmp_path / "base"
    with LogitFileWriter(path, windows, VOCAB, "base") as writer:
        for number, target in enumerate(targets):
            writer.take(to_row(number, base[number], target))
        writer.finish()
    comparison = DivergenceMeter(LogitFile(path))
    rows = [to_row(number, other[number], target) for number, target in enumerate(targets)]
    for row in reversed(rows):
        comparison.take(row)
    return comparison, comparison.result(np.array([row.nll for row in rows]))


@pytest.fixture
def pair() -> tuple[np.ndarray, np.ndarray, list[int]]:
    rng = np.random.default_rng(1)
    base = rng.normal(scale=4, size=(400, VOCAB)).astype(np.float32)
    other = base + rng.normal(scale=0.3, size=base.shape).astype(np.float32)
    return base, other, rng.integers(0, VOCAB, 400).tolist()


def test_against_torch(tmp_path, to_row, pair) -> None:
    base, other, targets = pair
    comparison, result = compare(tmp_path, to_row, base, other, targets)
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (base, other))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).numpy()
    bound = 6.3e-4 * (p.exp() * (p - q).abs()).sum(-1).numpy() + 1e-7  # see logit_file.py
    assert (np.abs(comparison.kl - kl) <= bound).all()
    assert np.array_equal(comparison.same_top, (base.argmax(-1) == other.argmax(-1)))
    assert 0.5 < result.same_top.value < 1
    assert result.kl.value == pytest.approx(kl.mean(), rel=1e-4)
    assert result.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-3)
    assert result.kl_median == pytest.approx(np.median(kl), rel=1e-3)
    assert result.kl_max == comparison.kl.max()


def test_paired_errors_are_those_of_llama_cpp(tmp_path, to_row, pair) -> None:
    """From sums of squares and products, as it computes them."""
    base, other, targets = pair
    _, result = compare(tmp_path, to_row, base, other, targets)
    rows, n = np.arange(len(base)), len(base)
    a = -torch.from_numpy(other).double().log_softmax(-1).numpy()[rows, targets]
    b = -torch.from_numpy(base).double().log_softmax(-1).numpy()[rows, targets]
    var_a = ((a * a).mean() - a.mean() ** 2) / (n - 1)
    var_b = ((b * b).mean() - b.mean() ** 2) / (n - 1)
    cov = ((a * b).mean() - a.mean() * b.mean()) / (n - 1)
    ppl_a, ppl_b = math.exp(a.mean()), math.exp(b.mean())
    ln_ratio = math.sqrt(var_a + var_b - 2 * cov)
    delta = math.sqrt(ppl_a**2 * var_a + ppl_b**2 * var_b - 2 * ppl_a * ppl_b * cov)
    dp = np.exp(-a) - np.exp(-b)

    def close(estimate: Estimate, value: float, stderr: float) -> None:
        assert estimate == pytest.approx((value, stderr), rel=1e-5)

    close(result.base_perplexity, ppl_b, ppl_b * math.sqrt(var_b))
    close(result.ln_ppl_ratio, a.mean() - b.mean(), ln_ratio)
    close(result.ppl_ratio, ppl_a / ppl_b, ppl_a / ppl_b * ln_ratio)
    close(result.delta_ppl, ppl_a - ppl_b, delta)
    close(result.delta_p, dp.mean(), math.sqrt(((dp**2).mean() - dp.mean() ** 2) / (n - 1)))
    same = result.same_top.value
    close(result.same_top, same, math.sqrt(same * (1 - same) / (n - 1)))
    assert result.correlation == pytest.approx(cov / math.sqrt(var_a * var_b), rel=1e-6)
    assert result.delta_p_rms == pytest.approx(math.sqrt((dp**2).mean()), rel=1e-5)
    assert result.delta_ppl.stderr < 0.2 * result.base_perplexity.stderr


def test_a_run_against_itself(tmp_path, to_row, pair) -> None:
    base, _, targets = pair
    comparison, result = compare(tmp_path, to_row, base, base, targets)
    assert comparison.kl.min() >= 0 and comparison.kl.max() < 4.8e-8
    assert result.same_top == (1.0, 0.0)
    assert abs(result.delta_ppl.value) < 1e-6 * result.base_perplexity.value
    assert result.ppl_ratio.value == pytest.approx(1, abs=1e-6)
    assert result.correlation == pytest.approx(1)


def test_the_true_top_is_kept_where_the_coding_makes_a_tie(tmp_path, to_row) -> None:
    base = np.zeros((1, VOCAB), np.float32)
    base[0, 0], base[0, 7], base[0, 9] = -30.0, 1.0, 1.0 + 1e-6
    comparison, _ = compare(tmp_path, to_row, base, base, [3])
    assert comparison.same_top.all()


def test_one_token_has_no_error(tmp_path, to_row, pair) -> None:
    base, other, targets = pair
    _, result = compare(tmp_path, to_row, base[:1], other[:1], targets[:1])
    document = result.as_json()
    assert document["kl_mean"] > 0
    assert {name for name, value in document.items() if value is None} == {
        *("kl_stderr", "same_top_stderr", "base_perplexity_stderr", "delta_ppl_stderr"),
        *("ppl_ratio_stderr", "ln_ppl_ratio_stderr", "correlation", "delta_p_stderr"),
    }


def test_estimates() -> None:
    values = np.array([1.0, 2.0, 4.0])
    estimate = Estimate.mean_of(values)
    assert estimate == pytest.approx((7 / 3, math.sqrt((21 / 3 - 49 / 9) / 2)))
    assert estimate.exp() == pytest.approx(
        (math.exp(7 / 3), math.exp(7 / 3) * (estimate.stderr or 0))
    )
    assert Estimate(1.0, None).exp().stderr is None
    assert standard_error(np.array([5.0])) is None
    # A large mean takes nothing from a small error.
    assert standard_error(1e9 + values) == pytest.approx(estimate.stderr, rel=1e-6)


def test_equal_values_have_no_correlation() -> None:
    ones, halves = np.ones(3), np.full(3, 0.5)
    result = Divergence.of(halves, ones.astype(bool), ones, halves)
    assert result.correlation is None and result.kl == (0.5, 0.0)
