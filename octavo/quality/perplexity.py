"""The perplexity of a model on a text, from the scores of windows that run through the engine.

A window is a request like any other: several at once, in chunks, preempted where the pool is small.
The only difference is that the logits of its prompt are observed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError, EngineError
from octavo.core.engine import Engine
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.quality.divergence import Divergence, DivergenceMeter
from octavo.quality.estimate import Estimate
from octavo.quality.logit_file import LogitFile, LogitFileWriter
from octavo.quality.scoring import RowSink, Scorer
from octavo.quality.windows import ScoringWindows
from octavo.serving.text_engine import TextEngine
from octavo.settings.engine import CPU_MAX_NUM_BATCHED_TOKENS, EngineArgs

DEFAULT_CTX = 512

# (tokens scored, tokens to score, perplexity of those scored)
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class WindowScores:
    """Scores of windows. ``nll``: float64 [num_scored], -ln p of each scored token in nats.
    ``num_computed``: tokens that went through the model, those of a preempted window counted once.
    """

    windows: ScoringWindows
    nll: np.ndarray
    num_computed: int
    num_preemptions: int
    elapsed_s: float

    @property
    def perplexity(self) -> Estimate:
        return Estimate.mean_of(self.nll).exp()

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens, scored or not, in the whole time, the writing of a file included."""
        return self.num_computed / self.elapsed_s


@dataclass(frozen=True)
class PerplexityResult:
    """The scores of a run. ``divergence``: from a base, where there is one."""

    scores: WindowScores
    divergence: Divergence | None = None

    def as_json(self) -> dict[str, Any]:
        scores, windows = self.scores, self.scores.windows
        compared: dict[str, Any] = {"kl_mean": None, "kl_p99": None, "same_top": None}
        if self.divergence is not None:
            compared = self.divergence.as_json()
        return {
            "tokens": len(scores.nll),
            **scores.perplexity.as_json("perplexity", "stderr"),
            **compared,
            "tokens_per_s": scores.tokens_per_s,
            **Estimate.mean_of(scores.nll).as_json("nll_mean"),
            "ctx": windows.ctx,
            "score": windows.score,
            "num_windows": len(windows),
            "num_computed_tokens": scores.num_computed,
            "num_preemptions": scores.num_preemptions,
            "elapsed_s": scores.elapsed_s,
        }


def engine_args(model: str, ctx: int, **settings: Any) -> EngineArgs:
    """Return the settings of an engine for windows of ``ctx`` tokens; the user's own take
    precedence.

    No window has a prefix of another, except for BOS. There are slots for as many windows as fill a
    step, and one that it cuts through: further ones would only take memory. With a sink window
    (``core/sink_window.py``), windows may be longer than the context.
    """
    fixed: dict[str, Any] = {"max_model_len": ctx, "enable_prefix_caching": False}
    if settings.get("window") or settings.get("context_shift"):
        del fixed["max_model_len"]
    for name, value in fixed.items():
        if settings.setdefault(name, value) != value:
            raise ConfigError(f"{name} is {value} for windows of {ctx} tokens, leave it out")
    if settings.get("max_num_seqs") is None:
        budget = settings.get("max_num_batched_tokens") or CPU_MAX_NUM_BATCHED_TOKENS
        settings["max_num_seqs"] = min(256, 1 + -(-budget // ctx))
    return EngineArgs.from_kwargs(model, **settings)


def measure(
    text_engine: TextEngine,
    windows: ScoringWindows,
    *,
    model: str,
    base: LogitFile | None = None,
    save_base: str | Path | None = None,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Compute the perplexity of windows; compare it with the run in ``base``, or keep the run in a
    file.

    Args:
        text_engine: as made from ``engine_args``; ``model`` is its name in a saved file.

    Raises:
        BenchmarkError: the base is of other windows or another vocabulary, or a file cannot be
            read or written.
        RequestError, EngineError: see ``score_windows``.
    """
    sinks: list[RowSink] = []
    comparison = writer = None
    with ExitStack() as stack:
        if base is not None:
            base.check_fits(windows, text_engine.vocab_size)
            sinks.append(comparison := DivergenceMeter(base))
        if save_base is not None:
            writer = LogitFileWriter(save_base, windows, text_engine.vocab_size, model)
            sinks.append(stack.enter_context(writer))
        scores = score_windows(text_engine.engine, windows, sinks, progress)
        if writer is not None:
            writer.finish()
    return PerplexityResult(scores, comparison.result(scores.nll) if comparison else None)


def score_windows(
    engine: Engine,
    windows: ScoringWindows,
    sinks: Sequence[RowSink] = (),
    progress: Progress | None = None,
) -> WindowScores:
    """Run windows through an engine that has no other work.

    The last token of a window is scored and scores none: it is not computed.

    Raises:
        RequestError: a window does not fit the engine's context or KV pool.
        EngineError: logits are not finite, or an error of a sink.
    """
    probe = engine.executor.probe()
    scorer = Scorer(windows, sinks)
    requests = deque(map(_request, range(len(windows)), windows.token_ids))
    at_once = 2 * engine.scheduler.config.max_num_seqs
    preemptions = engine.scheduler.num_preemptions
    probe.observe_logits(scorer)
    begin = time.perf_counter()
    try:
        while requests or engine.has_unfinished_requests:
            while requests and len(engine.scheduler.requests) < at_once:
                engine.add(requests.popleft())
            _step(engine, scorer)
            if progress is not None:
                progress(scorer.num_seen, windows.num_scored, scorer.perplexity)
    finally:
        probe.observe_logits(None)
        for request_id in list(engine.scheduler.requests):
            engine.abort(request_id)
    elapsed = time.perf_counter() - begin
    assert scorer.num_seen == windows.num_scored
    return WindowScores(
        windows,
        scorer.nll,
        len(windows) * (windows.ctx - 1),
        engine.scheduler.num_preemptions - preemptions,
        elapsed,
    )


def _request(index: int, token_ids: np.ndarray) -> Request:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    return Request(str(index), token_ids[:-1].tolist(), params, arrival_time=0.0)


def _step(engine: Engine, scorer: Scorer) -> None:
    step = engine.step()
    if scorer.failure is not None:
        raise scorer.failure
    for update in step.updates if step else ():
        if update.request.error is not None:
            raise EngineError(f"window {update.request.request_id}: {update.request.error}")
