"""Comparison rounds, in which octavo and its peers take turns.

In every round each engine runs each workload, one engine at a time; the others wait, stopped. On a
shared machine speeds drift by the minute, so only ratios within one run mean something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.bench.child_processes import ending_on_sigterm
from octavo.bench.noise import BandwidthProbe, watch_cpu
from octavo.bench.peers import contenders, report
from octavo.bench.peers.child import ChildError
from octavo.bench.peers.contenders import Contender, PeerSettings
from octavo.bench.peers.workers.workloads import FIGURES, PeerWorkload
from octavo.bench.record import Recorder

Log = Callable[[str], None]


@dataclass(frozen=True)
class ComparisonPlan:
    """The plan of a comparison. ``names``: the engines with their weights, in the order of their
    turns."""

    names: Sequence[str]
    workloads: Sequence[PeerWorkload]
    rounds: int

    def as_json(self) -> dict[str, Any]:
        workloads = [workload.as_json() for workload in self.workloads]
        return {"engines": list(self.names), "workloads": workloads, "rounds": self.rounds}


@dataclass
class ComparisonResult:
    """The result of a comparison. ``engines``: how each describes itself, by name. ``ours``:
    octavo's among them."""

    rows: list[report.ComparisonRow]
    engines: dict[str, dict[str, Any]]
    left_out: dict[str, str]
    idle_cpu_s: dict[str, float]
    run: dict[str, Any]

    @property
    def ours(self) -> list[str]:
        return [name for name in self.engines if name.startswith("octavo:")]

    @property
    def weights(self) -> dict[str, str]:
        return {name: about["weights"] for name, about in self.engines.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "summary": [row.as_json() for row in self.rows],
            "engines": self.engines,
            "left_out": self.left_out,
            "idle_cpu_s": self.idle_cpu_s,
            "run": self.run,
        }


class TurnTaker:
    """Gives engines their turns, and collects samples and warnings."""

    def __init__(self, probe: BandwidthProbe | None, log: Log):
        self.samples: list[report.TurnSample] = []
        self.warnings: list[str] = []
        self._log = log
        self._probe = probe
        self._failed: set[tuple[str, str]] = set()
        self._bandwidth: float | None = None

    def run(
        self, rounds: int, workloads: Sequence[PeerWorkload], engines: Sequence[Contender]
    ) -> None:
        """Run A B C A B C …: all engines take turns at one workload, then at the next."""
        for number in range(rounds):
            for workload in workloads:
                for engine in engines:
                    if (workload.name, engine.name) not in self._failed:
                        self._measure(number, rounds, workload, engine)

    def _measure(self, number: int, rounds: int, workload: PeerWorkload, engine: Contender) -> None:
        where = f"round {number + 1}/{rounds}, {workload.name}, {engine.name}"
        before = self._bandwidth = self._bandwidth or self._probe_bandwidth()
        with watch_cpu(engine.group) as cpu:
            try:
                repeats = engine.measure(workload, number)
            except (ChildError, ValueError) as error:
                self._failed.add((workload.name, engine.name))
                self.warn(f"{where}: {error}")
                return
        if not repeats:
            return
        self._bandwidth = self._probe_bandwidth()
        sample = report.TurnSample(
            *(number, workload.name, engine.name, repeats, cpu.elapsed_s),
            *(before, self._bandwidth, cpu.others),
        )
        self.samples.append(sample)
        figure = FIGURES[workload.kind][0]
        self._log(f"{where}: {sample.figure(figure.name):.4g} {figure.title}")
        for doubt in report.doubts(sample):
            self.warn(f"{where}: {doubt}")

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        self._log(f"warning: {message}")

    def _probe_bandwidth(self) -> float | None:
        return None if self._probe is None else self._probe.measure()


def compare(plan: ComparisonPlan, settings: PeerSettings, log: Log) -> ComparisonResult:
    """Start the engines that are available, give them turns, and end them in any case.

    After Ctrl-C the turns that were taken are the result.

    Raises:
        BenchmarkError: nothing could be measured, or octavo alone; says why.
    """
    missing = contenders.missing_engines(
        plan.names, lambda name: contenders.why_missing(name, settings)
    )
    for name, how in missing.items():
        log(f"{name} is left out: to have it, {how}")
    asked = {"model": str(settings.gguf), "octavo": settings.octavo, **plan.as_json()}
    recorder = Recorder(asked, settings.threads)
    # Engines are started and ended within: only the use of ended children is known.
    with recorder, ending_on_sigterm(), ExitStack() as stack:
        engines, about, left_out = start_all(plan.names, missing, settings, log, stack)
        comparison = TurnTaker(BandwidthProbe(settings.threads), log)
        try:
            _check_company(plan.names, engines, left_out)
            comparison.run(plan.rounds, plan.workloads, engines)
        except KeyboardInterrupt:
            comparison.warn("interrupted: the last round is not complete")
    idle_cpu_s = {engine.name: round(engine.idle_cpu_s, 3) for engine in engines}
    for name, seconds in idle_cpu_s.items():
        if seconds > 0.1:
            comparison.warn(f"{name} used {seconds:.1f} s of processor time while it was stopped")
    if not comparison.samples:
        reasons = [*comparison.warnings, *(f"{name}: {why}" for name, why in left_out.items())]
        raise BenchmarkError(f"nothing was measured: {'; '.join(reasons)}")
    recorder.warnings += comparison.warnings
    recorder.samples["turns"] = [asdict(sample) for sample in comparison.samples]
    ours = [name for name in about if name.startswith("octavo:")]
    rows = report.summarize(comparison.samples, ours)
    return ComparisonResult(rows, about, left_out, idle_cpu_s, recorder.as_json())


def start_all(
    names: Iterable[str],
    missing: Mapping[str, str],
    settings: PeerSettings,
    log: Log,
    stack: ExitStack,
) -> tuple[list[Contender], dict[str, Any], dict[str, str]]:
    """Start the available engines, which ``stack`` closes. Return them, how each describes itself,
    and why others are left out."""
    engines: list[Contender] = []
    about: dict[str, Any] = {}
    left_out = {name: f"to have it, {how}" for name, how in missing.items()}
    for name in names:
        if name in missing:
            continue
        engine = contenders.make(name, settings)
        log(f"starting {name} …")
        with ExitStack() as own:
            own.callback(engine.close)
            try:
                about[name] = {"weights": engine.weights, **engine.start()}
            except (ChildError, ValueError) as error:
                left_out[name] = str(error)
                log(f"{name} is left out: {error}")
            else:
                engines.append(engine)
                stack.push(own.pop_all())
    return engines, about, left_out


def _check_company(
    names: Sequence[str], engines: Sequence[Contender], left_out: Mapping[str, str]
) -> None:
    """Raise BenchmarkError where others were asked for, and only octavo has started."""
    others = [name for name in names if not name.startswith("octavo:")]
    if others and not any(engine.name in others for engine in engines):
        reasons = "; ".join(f"{name}: {left_out[name]}" for name in others)
        raise BenchmarkError(f"there is nothing to compare octavo with: {reasons}")
