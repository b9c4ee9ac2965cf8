"""Measures cases one after the other as time allows, each in a process of its own: an engine that
fails, or hangs, costs its own figures only."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.bench.gpu.cases import GpuCase
from octavo.bench.gpu.random_model import SHAPES, LlamaShape, write_random_model
from octavo.bench.peers.child import Worker, environment, output_of
from octavo.bench.peers.contenders import WORKERS, octavo_environment
from octavo.bench.peers.workers.workloads import PeerWorkload
from octavo.system.gpu_power import Draw, EnergyMeter, NotMetered, open_energy

_CHECKS = (sys.executable, "-m", "octavo.bench.gpu.checks")
# Of a folder, beside the weights that a step reads: embeddings, the tokenizer.
_DISK_SHARE = 1.3

Say = Callable[[str], None]
SaveReport = Callable[["GpuReport"], None]
Figures = dict[str, float | None]


@dataclass(slots=True)
class CaseOutcome:
    """The outcome of a case. ``figures`` by workload; ``left_out`` says why some were not begun,
    ``failed`` what ended the case early."""

    case: GpuCase
    about: dict[str, Any] = field(default_factory=dict)
    start_s: float | None = None
    figures: dict[str, Figures] = field(default_factory=dict)
    agreement: dict[str, Any] | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    failed: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.case.name,
            "model": self.case.model,
            "engine": self.case.engine,
            "settings": dict(self.case.settings),
            "about": self.about,
            "start_s": self.start_s,
            "figures": self.figures,
            "agreement": self.agreement,
            "left_out": self.left_out,
            "failed": self.failed,
        }


@dataclass(slots=True)
class GpuReport:
    """The report on a whole run. ``device``: as ``checks.py`` describes it."""

    device: dict[str, Any]
    outcomes: list[CaseOutcome] = field(default_factory=list)
    is_dry_run: bool = False
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    elapsed_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "date": self.started.isoformat(timespec="seconds"),
            "elapsed_s": round(self.elapsed_s, 1),
            "is_rehearsal": self.is_dry_run,
            "device": self.device,
            "cases": [outcome.as_json() for outcome in self.outcomes],
            "workloads": {
                workload.name: asdict(workload)
                for outcome in self.outcomes
                for workload in outcome.case.workloads
            },
        }


class GpuRun:
    """One run over a device.

    Args:
        folder: where models are made, and logs.
        seconds: budget of time; cases that do not fit are left out, and told.
        keep: called with the report so far after each case, so that a later failure loses
            nothing. Its BenchmarkErrors are told.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        seconds: float,
        say: Say,
        keep: SaveReport = lambda document: None,
    ):
        self._folder, self._device, self._say, self._keep = folder, device, say, keep
        self._begin = time.monotonic()
        self._seconds = seconds
        self._meter: EnergyMeter | None = None

    def run(self, cases: Sequence[GpuCase]) -> GpuReport:
        """Measure the cases.

        Raises:
            BenchmarkError: the device itself cannot be described.
        """
        facts = _ask([*_CHECKS, "device", self._device], self._left)
        document = GpuReport(facts, is_dry_run=self._device == "cpu")
        self._say(f"{facts['name']}: {facts['bytes_per_s'] / 1e9:,.0f} GB/s")
        try:
            self._meter = open_energy(facts["uuid"]) if facts["uuid"] else None
        except NotMetered as why_not:
            self._say(f"no energy: {why_not}")
        for case in cases:
            outcome = CaseOutcome(case)
            document.outcomes.append(outcome)
            self._fill(outcome, facts)
            document.elapsed_s = time.monotonic() - self._begin
            self._tell(outcome, document)
        return document

    def _tell(self, outcome: CaseOutcome, document: GpuReport) -> None:
        """Tell the outcome of a case, and save the report so far."""
        for what, reason in outcome.left_out.items():
            self._say(f"{outcome.case.name}: {what} is left out: {reason}")
        if outcome.failed is not None:
            self._say(f"{outcome.case.name} failed: {outcome.failed}")
        try:
            self._keep(document)
        except BenchmarkError as error:  # there may be room again when models are gone
            self._say(str(error))

    @property
    def _left(self) -> float:
        """Seconds that are left."""
        return self._begin + self._seconds - time.monotonic()

    def _fill(self, outcome: CaseOutcome, facts: dict[str, Any]) -> None:
        case = outcome.case
        reason = self._why_not(case)
        if reason is not None:
            outcome.left_out["all"] = reason
            return
        try:
            model = self._model(case)
            if case.checked:
                command = [*_CHECKS, "agreement", str(model), json.dumps(dict(case.settings))]
                outcome.agreement = _ask(command, self._left)
                self._say(f"{case.name}: {outcome.agreement}")
            else:
                self._measure(outcome, model, facts)
        except Exception as error:  # a full disk, an engine that ends, a driver that is gone
            outcome.failed = str(error) or type(error).__name__

    def _why_not(self, case: GpuCase) -> str | None:
        if self._left < case.seconds:
            return f"it takes about {case.seconds:.0f} s, and {max(0.0, self._left):.0f} s are left"
        if case.engine != "octavo" and find_spec(case.engine) is None:
            return f"{case.engine} is not installed"
        needed = _DISK_SHARE * SHAPES[case.shape].step_bytes(case.format)
        free = shutil.disk_usage(self._folder).free
        if not (self._folder / case.model).exists() and free < needed:
            return f"{self._folder} has {free / 1e9:.0f} GB free, and needs {needed / 1e9:.0f}"
        return None

    def _model(self, case: GpuCase) -> Path:
        folder = self._folder / case.model
        if not folder.exists():
            self._say(f"writing {case.model}")
            write_random_model(folder, SHAPES[case.shape], case.format)
        return folder

    def _measure(self, outcome: CaseOutcome, model: Path, facts: dict[str, Any]) -> None:
        case = outcome.case
        settings = {"model": str(model), "threads": 1, "engine": dict(case.settings)}
        script = WORKERS / f"{case.engine}_worker.py"
        env = octavo_environment() if case.engine == "octavo" else environment(HF_HUB_OFFLINE="1")
        log = self._folder / f"{case.name.replace(' ', '-')}.log"
        worker = Worker([sys.executable, str(script), json.dumps(settings)], env, log, self._left)
        try:
            outcome.about, outcome.start_s = worker.about, worker.start_s
            for workload in case.workloads:
                if self._left <= 0:
                    outcome.left_out[workload.name] = "the time is up"
                    continue
                figures = self._figures(worker, workload)
                outcome.figures[workload.name] = figures | shares(case, workload, figures, facts)
                self._say(f"{case.name}: {workload.title}: {_shown(figures)}")
        finally:
            worker.close()

    def _figures(self, worker: Worker, workload: PeerWorkload) -> Figures:
        """Return medians over the repetitions; ``watts`` is the mean with the warm-up."""
        begin, joules = time.monotonic(), self._joules()
        samples = worker.measure(workload, 0, max(1.0, self._left))
        figures: Figures = {name: median(sample[name] for sample in samples) for name in samples[0]}
        if joules is not None:
            taken = (self._joules() or joules) - joules
            figures["watts"] = Draw(taken, time.monotonic() - begin).watts
        return figures

    def _joules(self) -> float | None:
        return None if self._meter is None else self._meter.joules


def shares(
    case: GpuCase, workload: PeerWorkload, figures: Figures, facts: dict[str, Any]
) -> Figures:
    """Return the share of the measured bandwidth that a single stream reaches, by the bytes of
    weights alone, and the share of the peak of 16-bit products that a prompt reaches, by the
    products of the layers alone."""
    shape: LlamaShape = SHAPES[case.shape]
    if workload.kind == "decode":
        rate = figures["decode_tps"] or 0.0
        return {"bandwidth_share": rate * shape.step_bytes(case.format) / facts["bytes_per_s"]}
    peak = facts["ops_per_s"]["bfloat16"]
    if workload.kind == "prefill" and peak:
        return {"peak_share": 2.0 * shape.layer_params * (figures["prefill_tps"] or 0.0) / peak}
    return {}


def _ask(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the answer of a check."""
    found: dict[str, Any] = json.loads(output_of(command, octavo_environment(), max(1.0, seconds)))
    return found


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in figures.items() if value is not None)
