"""Runs ablations on engines with and without an optimisation, which are loaded at once and take
turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from octavo.bench.offline.ablation import Ablation, AblationResult
from octavo.bench.offline.ablation_workloads import (
    CONTEXT,
    AblationWork,
    WorkloadScale,
    describe,
    run_engine,
)
from octavo.bench.offline.session import OfflineSession
from octavo.settings.engine import EngineArgs
from octavo.workload.requests import WorkloadRequest

# Slots and tokens of KV that are enough for every workload here.
_SLOTS = 8
_KV_TOKENS = _SLOTS * CONTEXT


def ablation_settings(args: EngineArgs) -> EngineArgs:
    """Return the user's settings, with those that these workloads need where none was given.

    The number of threads is set in any case: an engine would else take the number that another
    engine of this process has set.
    """
    from octavo.kernels.cpu.library import usable_threads

    changes: dict[str, Any] = {"threads": args.threads or usable_threads()}
    if args.max_num_seqs is None:
        changes["max_num_seqs"] = _SLOTS
    if args.num_blocks is None and args.kv_cache_memory is None:
        changes["num_blocks"] = -(-_KV_TOKENS // args.block_size)
    return replace(args, **changes)


class AblationStudy:
    """Measures ablations one after another, beside an engine with all optimisations.

    Args:
        session: made with ``ablation_settings``; stays open, and the caller closes it.
        open_session: loads a further engine.
        repeat: turns of each ablation.
        is_quick: with less work.
    """

    def __init__(
        self,
        session: OfflineSession,
        *,
        open_session: Callable[[EngineArgs], OfflineSession] = OfflineSession,
        repeat: int = 3,
        is_quick: bool = False,
    ):
        self._session = session
        self._open_session = open_session
        self._repeat = repeat
        self._scale = WorkloadScale(
            session.vocab_size,
            min(session.loaded.config.scheduler.max_model_len, CONTEXT),
            is_quick,
            session.loaded.text_engine.eos_token_ids,
        )

    def why_not(self, ablation: Ablation) -> str | None:
        """Return why an ablation cannot be measured with these settings; None if it can."""
        reason = ablation.needs(self._session.info)
        if reason is not None:
            return reason
        is_by_settings = ablation.run_off is run_engine and ablation.prepare_off is None
        if is_by_settings and self._on(ablation) == self._off(ablation):
            return "these settings are without it"
        return None

    def measure(self, ablation: Ablation) -> AblationResult:
        """Measure an ablation. Raises the errors of loading an engine, and BenchmarkError if a
        request failed."""
        with ExitStack() as stack:
            on = self._session
            if self._on(ablation) != self._session.args:
                on = stack.enter_context(self._open_session(self._on(ablation)))
            off = stack.enter_context(self._open_session(self._off(ablation)))
            if ablation.prepare_off is not None:
                ablation.prepare_off(off)
            self._warm_up(on, off)
            return self._take_turns(ablation, on, off)

    def _on(self, ablation: Ablation) -> EngineArgs:
        return replace(self._session.args, **ablation.on)

    def _off(self, ablation: Ablation) -> EngineArgs:
        settings = {**ablation.on, **ablation.off}
        if not settings.get("enable_chunked_prefill", True):
            # A step must hold a whole prompt: no longer ones than there are.
            settings["max_model_len"] = self._scale.context
        return replace(self._session.args, **settings)

    def _warm_up(self, *sessions: OfflineSession) -> None:
        for session in sessions:
            _use_threads(session)
            session.run(self._scale.requests(2, 32, 4, seed=-1))

    def _take_turns(
        self, ablation: Ablation, on: OfflineSession, off: OfflineSession
    ) -> AblationResult:
        found: dict[bool, list[AblationWork]] = {True: [], False: []}
        requests: Sequence[WorkloadRequest] = ()
        for repetition in range(self._repeat):
            requests = ablation.workload.create(self._scale, 10 * repetition)
            # The order alternates.
            for is_on in (True, False) if repetition % 2 == 0 else (False, True):
                session, run = (on, run_engine) if is_on else (off, ablation.run_off)
                _use_threads(session)
                found[is_on].append(run(session, ablation.workload, list(requests)))
        return AblationResult(
            ablation,
            describe(requests),
            found[True],
            found[False],
            ablation.promises_answers(on.info),
        )


def _use_threads(session: OfflineSession) -> None:
    """Set PyTorch's threads, which are those of the process: the engine that was loaded last has
    set them."""
    if session.info["kernels"] != "native" and session.args.threads is not None:
        import torch

        torch.set_num_threads(session.args.threads)
