"""Measures the advice of a plan on this machine, on an engine with the change and on one without
it, in turns.

Both engines are loaded at once and take turns, so that a drift of the machine cancels out in the
ratio of a turn. The requests are those of the plan, given at once: for a rate, as many as are under
way by the plan.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from octavo.base.errors import BenchmarkError, OctavoError
from octavo.bench.offline.session import OfflineSession, RunTiming, latencies
from octavo.bench.offline.spec import requests_of
from octavo.cost.prediction import Prediction
from octavo.planner.advice import Advice, AdviceTrial
from octavo.settings.engine import EngineArgs
from octavo.system import machine
from octavo.workload.datasets import random_requests
from octavo.workload.requests import WorkloadRequest

UNIT = "times the output tokens/s"
LEAST_TURNS, MOST_TURNS = 3, 9
# Kinds of prompts for drafting: answers quote the first, copy parts of the second, and hardly copy
# the third.
_TEXTS = ("summary", "rag", "chat")
_TEXT_TOKENS = 400  # of the longest of these prompts
_SPARE_TOKENS = 16  # that a request may have beside those that are asked for

Batches = Sequence[Sequence[WorkloadRequest]]


@dataclass(frozen=True, slots=True)
class AdviceLoad:
    """``count`` requests at once, with prompts and answers of given lengths in tokens."""

    count: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class TrialRun:
    """Output tokens per second of all requests, and mean milliseconds of their latencies."""

    output_tps: float
    ttft_ms: float
    e2e_ms: float

    @classmethod
    def of(cls, timings: Sequence[RunTiming]) -> TrialRun:
        found = latencies([request for timing in timings for request in timing.requests])
        if not found["e2e"]:
            raise BenchmarkError("no request was answered: there is nothing to compare")
        seconds = sum(timing.elapsed_s for timing in timings)
        return cls(
            sum(timing.num_output_tokens for timing in timings) / seconds,
            1e3 * statistics.fmean(found["ttft"]),
            1e3 * statistics.fmean(found["e2e"]),
        )

    @classmethod
    def median(cls, runs: Sequence[TrialRun]) -> TrialRun:
        """Return the median of each figure."""
        names = ("output_tps", "ttft_ms", "e2e_ms")
        return cls(*(statistics.median(getattr(run, name) for run in runs) for name in names))

    def as_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial. ``turns``: each without the change, and with it."""

    turns: tuple[tuple[TrialRun, TrialRun], ...]

    @property
    def gain(self) -> Prediction:
        """The ratio of output tokens per second: the median of the turns, and their range."""
        return _middle([after.output_tps / before.output_tps for before, after in self.turns])

    @property
    def helps(self) -> bool:
        """True if answers came faster in every turn, by throughput or by latency."""
        sooner = _middle([before.e2e_ms / after.e2e_ms for before, after in self.turns])
        return max(self.gain.low, sooner.low) > 1

    @property
    def before(self) -> TrialRun:
        return TrialRun.median([before for before, _ in self.turns])

    @property
    def after(self) -> TrialRun:
        return TrialRun.median([after for _, after in self.turns])

    def as_json(self) -> dict[str, Any]:
        return {
            "num_turns": len(self.turns),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
        }


@dataclass(frozen=True, slots=True)
class TriedAdvice:
    """An advice, and its ``outcome``, or ``why_not``."""

    advice: Advice
    outcome: TrialOutcome | None = None
    why_not: str | None = None

    def as_json(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            **self.advice.as_json(),
            "measured_gain": None if outcome is None else {**outcome.gain.as_json(), "unit": UNIT},
            "measured": None if outcome is None else outcome.as_json(),
            "not_measured": self.why_not,
        }

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: advice that helped, the most first; then advice that was not tried; then the
        rest."""
        if self.outcome is None:
            return 1, 0.0
        return (0 if self.outcome.helps else 2), -self.outcome.gain.value


def advice_without_formula(args: EngineArgs, load: AdviceLoad) -> list[Advice]:
    """Return advice that no formula predicts, so that it is only tried."""
    found = []
    cores = machine.cpu()
    threads = args.threads or cores.usable_cores
    fewer = min(cores.physical_cores or threads, threads - 1)
    if fewer >= 1:
        why = f"it has {threads}, which share caches and memory, maybe cores"
        found.append(_only_tried(f"set threads to {fewer}", why, {"threads": fewer}))
    if args.kv_cache_dtype in ("auto", "bf16"):
        what, why = "keep keys and values in int8", "they take half of what 16 bits do"
        found.append(_only_tried(what, why, {"kv_cache_dtype": "int8"}))
    if args.itl_target_ms and load.count > 1:
        why = f"prompts are cut so that others wait {args.itl_target_ms:g} ms for a token at most"
        found.append(_only_tried("set itl_target_ms to 0", why, {"itl_target_ms": 0.0}))
    return found


def _only_tried(what: str, why: str, settings: dict[str, Any]) -> Advice:
    return Advice(what, why, "by the trial alone", AdviceTrial(settings))


def settings_for(args: EngineArgs, load: AdviceLoad, longest: int) -> EngineArgs:
    """Return the user's settings, with a context for the requests of all trials where none was
    given, and no more than the ``longest`` of the model.

    The number of threads is set in any case: an engine would else take the number that another
    engine of this process has set.
    """
    from octavo.kernels.cpu.library import usable_threads

    scale = max(load.input_len, _TEXT_TOKENS) + load.output_len + _SPARE_TOKENS
    length = min(scale, longest) if args.max_model_len is None else args.max_model_len
    return replace(args, max_model_len=length, threads=args.threads or usable_threads())


class AdviceStudy:
    """Tries one change after the other, beside an engine as it is.

    Args:
        session: of that engine, made with ``settings_for``; the caller closes it.
        seconds: that a trial may take, about, beside loading; three turns are run in any case.
        open_session: loads a further engine.
    """

    def __init__(
        self,
        session: OfflineSession,
        load: AdviceLoad,
        seconds: float,
        open_session: Callable[[EngineArgs], OfflineSession] = OfflineSession,
    ):
        self._session = session
        self._load = load
        self._seconds = seconds
        self._open_session = open_session
        self._warm: set[OfflineSession] = set()
        self._count = 0

    def tried(self, advice: Advice) -> TriedAdvice:
        """Return the outcome of an advice."""
        if isinstance(advice.trial, str):
            return TriedAdvice(advice, why_not=advice.trial)
        try:
            return TriedAdvice(advice, self.measure(advice.trial))
        except OctavoError as error:
            return TriedAdvice(advice, why_not=f"it could not be tried: {error}")

    def measure(self, trial: AdviceTrial) -> TrialOutcome:
        """Run a trial in turns.

        Raises:
            OctavoError: the changed engine cannot be loaded, or cannot serve the requests.
        """
        with ExitStack() as stack:
            changed = self._session
            if trial.settings:
                args = replace(self._session.args, **trial.settings)
                changed = stack.enter_context(self._open_session(args))
            before = self._texts() if trial.on_text else [self._random()]
            after = [self._random(trial.shared_prefix)] if trial.shared_prefix else before
            sides = (
                _TrialSide(self._session, before),
                _TrialSide(changed, after, trial.shared_prefix),
            )
            return TrialOutcome(tuple(self._turns(*sides)))

    def _turns(self, before: _TrialSide, after: _TrialSide) -> list[tuple[TrialRun, TrialRun]]:
        """Run both sides in turns, in alternating order."""
        self._warm_up(before, after)
        begin, found = time.perf_counter(), list[tuple[TrialRun, TrialRun]]()
        while len(found) < MOST_TURNS:
            if len(found) % 2:
                second, first = after.run(self._salt()), before.run(self._salt())
            else:
                first, second = before.run(self._salt()), after.run(self._salt())
            found.append((first, second))
            gone = time.perf_counter() - begin
            if len(found) >= LEAST_TURNS and gone + gone / len(found) > self._seconds:
                break
        return found

    def _warm_up(self, *sides: _TrialSide) -> None:
        """Run engines that have not run yet; the result does not count."""
        for side in sides:
            if side.session not in self._warm:
                side.run(self._salt())
        self._warm = {self._session}

    def _random(self, prefix: int = 0) -> list[WorkloadRequest]:
        load, session = self._load, self._session
        return random_requests(
            load.count,
            session.vocab_size,
            load.input_len - prefix,
            load.output_len,
            prefix_len=prefix,
            avoid=session.tokenizer.stop_token_ids,
        )

    def _texts(self) -> Batches:
        """Return a batch of each kind of text, with answers of the length of the plan."""
        load = self._load
        return [
            [
                replace(request, output_len=load.output_len)
                for request in requests_of(self._session, kind, load.count)
            ]
            for kind in _TEXTS
        ]

    def _salt(self) -> str:
        self._count += 1
        return f"advice {self._count}"


@dataclass(frozen=True, slots=True)
class _TrialSide:
    """An engine, and its requests. ``num_known``: number of tokens that the prompts begin with, and
    that are in the prefix cache before the clock starts; elsewhere no prompt finds a cached prefix.
    """

    session: OfflineSession
    batches: Batches
    num_known: int = 0

    def run(self, salt: str) -> TrialRun:
        timings = []
        for number, batch in enumerate(self.batches):
            if self.num_known:
                self.session.run([_beginning(batch[0], self.num_known)], cache_salt=salt)
                timings.append(self.session.run(batch, cache_salt=salt))
            else:
                timings.append(self.session.run(batch, cache_salt=f"{salt} {number}"))
        return TrialRun.of(timings)


def _middle(quotients: Sequence[float]) -> Prediction:
    return Prediction(statistics.median(quotients), min(quotients), max(quotients), "measured")


def _beginning(request: WorkloadRequest, num_tokens: int) -> WorkloadRequest:
    assert request.prompt_token_ids is not None
    return replace(
        request, prompt_token_ids=request.prompt_token_ids[: num_tokens + 1], output_len=1
    )
