"""``octavo tune``: the settings that serve a load best within limits, searched and measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError, OctavoError
from octavo.cli import terminal
from octavo.cli.bench import common
from octavo.cli.tune_flags import EXAMPLES, Question, configure, question_of
from octavo.cli.tune_report import Result, tell, write_config
from octavo.settings.engine import EngineArgs

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession
    from octavo.bench.record import Recorder
    from octavo.cost.measured_steps import MeasuredSteps
    from octavo.sim.prompts import PromptSpec
    from octavo.text.tokenizer import Tokenizer
    from octavo.tuning.live_confirmation import LiveRuns
    from octavo.tuning.objective import Objective
    from octavo.tuning.search import Progress, SearchResult
    from octavo.tuning.simulated_engines import SimulatedEngines
    from octavo.tuning.space import CandidateSettings
    from octavo.tuning.study import TuningStudy

    Steps = Mapping[CandidateSettings, MeasuredSteps | None]

__all__ = ["EXAMPLES", "configure", "run"]

INFEASIBLE = 2
# Settings beside those that are searched, with which step times are not known before a model loads.
_STEPS_DEPEND_ON = {"threads", "activations", "dtype", "device", "kernels"}


def run(args: argparse.Namespace) -> int:
    question = question_of(args)
    if question.is_here:
        for model in (question.model, *question.also):
            terminal.resolve(model)
    steps = _steps(question)
    study = _study(question, steps)
    with _progress() as progress:
        found = study.search(_candidates(question, study, steps), progress)
    live, recorder = _run_live(args, question, study, found)
    decision = study.decide(found, live)
    write_config(question, decision)
    tell(args, question, Result(found, live, decision), recorder)
    return 0 if decision.outcome.holds else INFEASIBLE


# -- what steps take ------------------------------------------------------------------------------


def _steps(question: Question) -> Steps:
    """Return step times by the settings that they depend on, the defaults first; None stands for
    those of the roofline."""
    from octavo.cost.find_device import find_device
    from octavo.system import machine
    from octavo.tuning.space import DEFAULTS, engine_changes, fewer_threads

    changes = engine_changes(
        question.held,
        on_gpu=find_device(question.hardware)[0].kind == "gpu",
        threads=fewer_threads(machine.cpu()) if question.is_measured else (),
        also=question.also,
    )
    if question.is_measured:
        return _measured_steps(question, [DEFAULTS, *changes])
    known = _steps_known_here(question, [DEFAULTS, *changes]) if question.is_here else {}
    return known if DEFAULTS in known else dict.fromkeys([DEFAULTS, *changes])


def _steps_known_here(question: Question, engines: Sequence[CandidateSettings]) -> Steps:
    """Return the step times of the engines that have been calibrated; none with settings that are
    not calibrated."""
    from octavo.cli.calibrate import steps_here

    known: dict[CandidateSettings, MeasuredSteps | None] = {}
    if question.held.keys() & _STEPS_DEPEND_ON:
        return known
    for engine in engines:
        settings = {**question.held, **engine.settings}
        model = settings.get("model", question.model)
        steps = steps_here(model, settings.get("kv_cache_dtype"))
        if steps is not None:
            known[engine] = steps
        elif known:
            terminal.say(f"not tried: {engine}: it was not calibrated here")
    return known


def _measured_steps(question: Question, engines: Sequence[CandidateSettings]) -> Steps:
    """Measure the step times of engines. Those that this machine cannot run are left out, but the
    first raises."""
    from octavo.cli.calibrate import known_or_measured

    steps = {}
    for number, engine in enumerate(engines):
        try:
            with common.open_session(_engine_args(question, engine)) as session:
                steps[engine] = known_or_measured(session, quick=number > 0).steps
        except OctavoError as error:
            if number == 0:
                raise
            terminal.say(f"not tried: {engine}: {error}")
    return steps


def _engine_args(question: Question, candidate: CandidateSettings) -> EngineArgs:
    settings = {**question.held, **candidate.settings}
    model = settings.pop("model", question.model)
    if question.acceptance is not None and settings.pop("spec_method", None) is not None:
        from octavo.tuning.simulated_engines import synthetic_drafts

        settings["speculative_config"] = synthetic_drafts(question.acceptance)
    return EngineArgs.from_kwargs(model, **settings)


# -- the search -----------------------------------------------------------------------------------


def _study(question: Question, steps: Steps) -> TuningStudy:
    from octavo.cost.open_spec import open_spec
    from octavo.tuning.simulated_engines import SimulatedEngines
    from octavo.tuning.study import TuningStudy

    engines = SimulatedEngines(
        {name: open_spec(name) for name in (question.model, *question.also)},
        question.model,
        question.hardware,
        question.simulated_settings,
        steps,
        question.acceptance,
    )
    prompts = _prompts(question, engines)
    return TuningStudy(engines, prompts, _objective(question, prompts), question.slo)


def _prompts(question: Question, engines: SimulatedEngines) -> Sequence[PromptSpec]:
    """Turns of conversations come when their trace says, whenever the ones before were answered:
    so they do live."""
    from octavo.tuning.space import DEFAULTS

    tokenizer = _tokenizer(question) if question.is_here else None
    prepared = engines.simulation(DEFAULTS, question.workload, question.load, tokenizer)
    if not prepared.prompts:
        raise ConfigError("there is no request in this load")
    return [replace(ask, follows=None) for ask in prepared.prompts]


def _tokenizer(question: Question) -> Tokenizer:
    from octavo import hub
    from octavo.sources.open import load_tokenizer

    return load_tokenizer(hub.resolve(question.model))


def _objective(question: Question, prompts: Sequence[PromptSpec]) -> Objective:
    from octavo.tuning.objective import GivenLoad, HighestRate
    from octavo.workload.arrivals import arrival_times
    from octavo.workload.plan import create_plan

    load, seed = question.load, question.workload.seed
    has_times = load.request_rate < float("inf") or prompts[0].arrival_s is not None
    if has_times:
        return GivenLoad(question.slo, create_plan(load, prompts, seed).times or ())
    unit_times = arrival_times(len(prompts), 1.0, burstiness=load.burstiness, seed=seed)
    return HighestRate(question.slo, unit_times)


def _candidates(question: Question, study: TuningStudy, steps: Steps) -> list[CandidateSettings]:
    from octavo.tuning.space import DEFAULTS, candidates, scheduling_settings, speculation_setting

    config = study.engines.fleet(DEFAULTS).replica.config
    knobs = scheduling_settings(config, question.held)
    if question.acceptance is not None and question.may_speculate:
        knobs.append(speculation_setting())
    engines = [engine for engine in steps if engine != DEFAULTS]
    return candidates(knobs, engines, question.num_candidates, question.workload.seed)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A line on a terminal that says how far it is; elsewhere a line for each part."""
    is_terminal = terminal.can_animate()
    said = None
    # It is drawn in a thread: seldom, for that thread takes time from what is measured.
    line = terminal.console(stderr=True).status("tuning", refresh_per_second=2)
    with line if is_terminal else nullcontext() as status:

        def progress(what: str, done: int, total: int) -> None:
            nonlocal said
            if status is not None:
                status.update(f"{what} ({done} of {total})")
            elif what != said:
                said = what
                terminal.say(what)

        yield progress


# -- live -----------------------------------------------------------------------------------------


def _run_live(
    args: argparse.Namespace, question: Question, study: TuningStudy, found: SearchResult
) -> tuple[LiveRuns | None, Recorder | None]:
    """The defaults and the best few, and what surrounded them; nothing if nothing is to be run, or
    if requests come too seldom."""
    from octavo.bench.offline.session import OfflineSession
    from octavo.bench.record import Recorder
    from octavo.workload.plan import create_requests

    if not question.live:
        return None, None
    requests = create_requests(question.workload, _tokenizer(question))
    recorder = Recorder(common.asked_for(args), question.held.get("threads"))

    def open_session(candidate: CandidateSettings) -> OfflineSession:
        session = OfflineSession(_engine_args(question, candidate).serving())
        recorder.engine = recorder.engine or session.info
        return session

    with recorder, _progress() as progress:
        runs = study.run_live(
            found.best.outcome,
            _chosen(question, found, is_text=requests[0].prompt_token_ids is None),
            open_session,
            requests,
            seconds=question.live_seconds,
            turns=question.turns,
            progress=progress,
        )
    if runs is None:
        terminal.say(f"too few requests in {question.live_seconds:g} s (--live-seconds) to run any")
        return None, None
    return runs, recorder


def _chosen(question: Question, found: SearchResult, *, is_text: bool) -> list[CandidateSettings]:
    """Choose the defaults and the best few; if drafts can be judged live only, the first and the
    best of them with speculative decoding, too."""
    from octavo.tuning.space import DEFAULTS, SPECULATION

    best = [each.candidate for each in found.finalists if each.candidate != DEFAULTS]
    chosen = [DEFAULTS, *best[: question.live]]
    if is_text and question.may_speculate and question.acceptance is None:
        drafting = [each.having(SPECULATION, "auto") for each in (DEFAULTS, found.best.candidate)]
        chosen += dict.fromkeys(drafting)
    return chosen
