from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.base.errors import BenchmarkError, EngineError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.quality.scoring import Scorer
from octavo.quality.windows import cut

VOCAB = 50


class Notebook:
    """A sink that keeps what it is given; it may be told to fail."""

    def __init__(self):
        self.rows = []
        self.error = None

    def take(self, scored):
        if self.error is not None:
            raise self.error
        self.rows.append(scored)


@pytest.fixture
def windows():
    return cut(np.random.default_rng(1).integers(0, VOCAB, 16), 8)


def request(window: int) -> Request:
    return Request(str(window), [1] * 7, SamplingParams(max_tokens=1), 0.0)


def logits_of(window: int, positions: range) -> np.ndarray:
    generator = torch.Generator().manual_seed(window)
    rows = torch.randn(8, VOCAB, generator=generator)[positions.start : positions.stop]
    return rows.numpy()


def test_every_scored_token_once(windows) -> None:
    notebook = Notebook()
    scorer = Scorer(windows, [notebook])
    # In pieces, interleaved; window 0 is preempted and comes back to where it was.
    for window, wanted in ((0, range(4, 6)), (1, range(4, 7)), (0, range(6, 7))):
        assert scorer.wants(request(window)) == range(wanted.start, 7)
        scorer.observe(request(window), wanted.start, logits_of(window, wanted))
    assert scorer.wants(request(0)) == scorer.wants(request(1)) == range(7, 7)
    assert [row.number for row in notebook.rows] == [0, 1, 3, 4, 5, 2]
    logits = [torch.from_numpy(logits_of(window, range(8))) for window in range(2)]
    logprobs = [rows.double().log_softmax(-1) for rows in logits]
    expected = [
        -logprobs[window][position, token].item()
        for window in range(2)
        for position, token in enumerate(windows.token_ids[window, 1:].tolist())
        if position >= 4
    ]
    np.testing.assert_allclose(scorer.nll, expected, rtol=1e-6)
    assert scorer.num_seen == 6
    assert scorer.perplexity == pytest.approx(np.exp(np.mean(expected)))
    first = notebook.rows[0]
    assert first.nll == scorer.nll[0] and first.distances[first.top] == 0
    assert first.distances.dtype == np.float32 and first.distances.min() == 0


def test_a_row_does_not_depend_on_its_neighbours(windows) -> None:
    together, one_by_one = Scorer(windows), Scorer(windows)
    together.observe(request(0), 4, logits_of(0, range(4, 7)))
    for position in range(4, 7):
        one_by_one.observe(request(0), position, logits_of(0, range(position, position + 1)))
    assert np.array_equal(together.nll, one_by_one.nll, equal_nan=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers(windows, value) -> None:
    scorer = Scorer(windows)
    logits = logits_of(1, range(4, 7))
    logits[1, 3] = value
    scorer.observe(request(1), 4, logits)
    assert isinstance(scorer.failure, EngineError)
    assert "window 1, position 5" in str(scorer.failure)


def test_after_a_failure_nothing_is_looked_at(windows) -> None:
    notebook = Notebook()
    notebook.error = BenchmarkError("the disk is full")
    scorer = Scorer(windows, [notebook])
    scorer.observe(request(0), 4, logits_of(0, range(4, 7)))
    assert scorer.failure is notebook.error
    assert scorer.wants(request(0)) == scorer.wants(request(1)) == range(0)
    scorer.observe(request(1), 4, logits_of(1, range(4, 7)))
    assert scorer.num_seen == 0 and np.isnan(scorer.nll).all()
