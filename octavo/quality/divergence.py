"""The KL divergence of a run from another one of the same text, and differences of paired values.

With base p and model q, of each scored token: KL(p || q) = sum of p ln(p / q) over the vocabulary,
in nats; whether both rate the same token most probable; and the difference of the probabilities
that they give to the token of the text. Standard errors of differences are those of paired values:
difficulty that a token has for both cancels out. The figures, and their names in the table, are
those of llama.cpp's ``llama-perplexity --kl-divergence``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.measure.statistics import percentile
from octavo.quality.estimate import Estimate, standard_error
from octavo.quality.logit_file import LogitFile
from octavo.quality.scoring import ScoredRow, log_sum_of


def kl_divergence(
    base: np.ndarray, base_log_sum: float, distances: np.ndarray, log_sum: float
) -> float:
    """Return KL(base || other) in nats of one position, from distances as in ``ScoredRow``.

    ``base`` has to be float64, and so is the result; at least 0.
    """
    weights = np.exp(-base)
    differences = distances - base
    differences *= weights  # not np.dot, whose threads would wait for each other in every row
    mean_difference = differences.sum() / weights.sum()
    return max(0.0, float(mean_difference) + log_sum - base_log_sum)


class DivergenceMeter:
    """Compares rows with those of a file, as they come."""

    def __init__(self, base: LogitFile):
        self._base = base
        self.kl = np.full(len(base.nll), np.nan)
        self.same_top = np.zeros(len(base.nll), dtype=bool)

    def take(self, scored: ScoredRow) -> None:
        top, distances = self._base.distances(scored.number)
        self.same_top[scored.number] = top == scored.top
        self.kl[scored.number] = kl_divergence(
            distances, log_sum_of(distances), scored.distances, scored.log_sum
        )

    def result(self, nll: np.ndarray) -> Divergence:
        """Return the divergence when all rows have come; ``nll`` float64 [num_scored] is this
        run's."""
        return Divergence.of(self.kl, self.same_top, nll, self._base.nll.astype(np.float64))


@dataclass(frozen=True)
class Divergence:
    """The divergence of a run. KL in nats. ``same_top`` is a share; ``delta_p`` a difference of
    probabilities (0 to 1)."""

    kl: Estimate
    kl_median: float
    kl_p90: float
    kl_p99: float
    kl_max: float
    same_top: Estimate
    base_perplexity: Estimate
    delta_ppl: Estimate
    ln_ppl_ratio: Estimate
    correlation: float | None
    delta_p: Estimate
    delta_p_rms: float

    @classmethod
    def of(
        cls, kl: np.ndarray, same_top: np.ndarray, nll: np.ndarray, base_nll: np.ndarray
    ) -> Divergence:
        """Compute the figures from one value for each scored token."""
        ppl, base_ppl = math.exp(nll.mean()), math.exp(base_nll.mean())
        values = kl.tolist()
        delta_p = np.exp(-nll) - np.exp(-base_nll)
        return cls(
            kl=Estimate.mean_of(kl),
            kl_median=percentile(values, 50),
            kl_p90=percentile(values, 90),
            kl_p99=percentile(values, 99),
            kl_max=max(values),
            same_top=Estimate.mean_of(same_top.astype(np.float64)),
            base_perplexity=Estimate.mean_of(base_nll).exp(),
            # To first order, a perplexity changes by itself times the change of the mean nll.
            delta_ppl=Estimate(ppl - base_ppl, standard_error(ppl * nll - base_ppl * base_nll)),
            ln_ppl_ratio=Estimate.mean_of(nll - base_nll),
            correlation=_correlation(nll, base_nll),
            delta_p=Estimate.mean_of(delta_p),
            delta_p_rms=float(np.sqrt(np.square(delta_p).mean())),
        )

    @property
    def ppl_ratio(self) -> Estimate:
        return self.ln_ppl_ratio.exp()

    def as_json(self) -> dict[str, Any]:
        return {
            **self.kl.as_json("kl_mean", "kl_stderr"),
            "kl_median": self.kl_median,
            "kl_p90": self.kl_p90,
            "kl_p99": self.kl_p99,
            "kl_max": self.kl_max,
            **self.same_top.as_json("same_top"),
            **self.base_perplexity.as_json("base_perplexity"),
            **self.delta_ppl.as_json("delta_ppl"),
            **self.ppl_ratio.as_json("ppl_ratio"),
            **self.ln_ppl_ratio.as_json("ln_ppl_ratio"),
            "correlation": self.correlation,
            **self.delta_p.as_json("delta_p_mean", "delta_p_stderr"),
            "delta_p_rms": self.delta_p_rms,
        }


def _correlation(nll: np.ndarray, base_nll: np.ndarray) -> float | None:
    if len(nll) < 2 or nll.std() == 0 or base_nll.std() == 0:
        return None
    return float(np.corrcoef(nll, base_nll)[0, 1])
