"""octavo and its peers on this machine, interleaved, in one table and one JSON file.

In every round each engine runs each workload, one engine at a time; the others wait, stopped. On a
shared machine speeds drift by the minute, so only ratios within one run mean something.

    benchmarks/peers/compare.py
    benchmarks/peers/compare.py --engines octavo:file,llama.cpp:q4_0 --workloads decode --rounds 9

benchmarks/peers/README.md says how the peers are set up, and what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # octavo, of this checkout

import contenders
import report
from child import ChildError
from contenders import Contender, Settings
from quietness import BandwidthProbe, watch_cpu
from rich.console import Console
from workloads import FIGURES, WORKLOADS, Workload

from octavo import hub, machine

console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def log(message: str, style: str = "") -> None:
    console.print(message, style=style)


class Comparison:
    """Rounds of measurements, and everything that has to be known about them."""

    def __init__(self, probe: BandwidthProbe | None):
        self.samples: list[report.Sample] = []
        self.warnings: list[str] = []
        self._probe = probe
        self._failed: set[tuple[str, str]] = set()
        self._bandwidth: float | None = None

    def run(self, rounds: int, workloads: Sequence[Workload], engines: Sequence[Contender]) -> None:
        """A B C A B C …: all engines take turns at one workload, then at the next."""
        for number in range(rounds):
            for workload in workloads:
                for engine in engines:
                    if (workload.name, engine.name) not in self._failed:
                        self._measure(number, rounds, workload, engine)

    def _measure(self, number: int, rounds: int, workload: Workload, engine: Contender) -> None:
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
        sample = report.Sample(
            *(number, workload.name, engine.name, repeats, cpu.elapsed_s),
            *(before, self._bandwidth, cpu.others),
        )
        self.samples.append(sample)
        figure = FIGURES[workload.kind][0]
        log(f"{where}: {sample.figure(figure.name):.4g} {figure.title}", "dim")
        for doubt in report.doubts(sample):
            self.warn(f"{where}: {doubt}")

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        log(f"warning: {message}", "yellow")

    def _probe_bandwidth(self) -> float | None:
        return None if self._probe is None else self._probe.measure()


def start_all(names: Iterable[str], settings: Settings) -> tuple[list[Contender], dict[str, Any]]:
    """The engines that can be had, started, and what each says about itself."""
    engines: list[Contender] = []
    about: dict[str, Any] = {}
    for name in names:
        missing = contenders.why_missing(name, settings)
        if missing is not None:
            log(f"{name} is left out: {missing}")
            continue
        engine = contenders.make(name, settings)
        log(f"starting {name} …")
        try:
            about[name] = {"weights": engine.weights, **engine.start()}
        except ChildError as error:
            log(f"{name} is left out: {error}")
            engine.close()
            continue
        except BaseException:
            stop_all([*engines, engine])
            raise
        engines.append(engine)
    return engines, about


def stop_all(engines: Iterable[Contender]) -> None:
    for engine in engines:
        engine.close()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.replace(",", " ").split() if word]

    def setting(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
        try:
            return name.replace("-", "_"), json.loads(value)
        except ValueError:
            return name.replace("-", "_"), value

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="alias or .gguf file")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--engines",
        type=words,
        default=list(contenders.DEFAULT_NAMES),
        help=f"engines, or engine:weights: {', '.join(contenders.NAMES)}",
    )
    parser.add_argument(
        "--workloads", type=words, default=list(WORKLOADS), help=", ".join(WORKLOADS)
    )
    parser.add_argument("--threads", type=int, default=machine.cpu().usable_cores, metavar="N")
    parser.add_argument(
        "--octavo",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine setting of octavo, such as kv_cache_dtype=bf16",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument("--dir", type=Path, help="where the peers are set up")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    unknown = [name for name in args.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}: there are {', '.join(WORKLOADS)}")
    try:
        args.engines = contenders.choose(args.engines)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no child is left behind
    gguf = hub.resolve(args.model)
    if gguf.suffix != ".gguf":
        log(f"{gguf}: the comparison starts from a .gguf file")
        return 2
    folder = (args.dir or contenders.default_folder()).expanduser().resolve()
    settings = Settings(folder, gguf.resolve(), args.threads, dict(args.octavo))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    clock = time.monotonic()
    engines, about = start_all(args.engines, settings)
    comparison = Comparison(BandwidthProbe(args.threads))
    try:
        comparison.run(args.rounds, [WORKLOADS[name] for name in args.workloads], engines)
    except KeyboardInterrupt:
        comparison.warn("interrupted: the last round is not complete")
    finally:
        idle_cpu_s = {engine.name: round(engine.idle_cpu_s, 3) for engine in engines}
        stop_all(engines)
    for name, seconds in idle_cpu_s.items():
        if seconds > 0.1:
            comparison.warn(f"{name} used {seconds:.1f} s of processor time while it was stopped")

    ours = [name for name in args.engines if name.startswith("octavo:") and name in about]
    rows = report.summarize(comparison.samples, ours)
    weights = {engine.name: engine.weights for engine in engines}
    Console(width=None if sys.stdout.isatty() else 160).print(report.table(rows, weights, ours))
    if args.json is not None:
        document = {
            "started": started,
            "elapsed_s": round(time.monotonic() - clock, 1),
            "machine": {**asdict(machine.cpu()), "memory": asdict(machine.memory())},
            "system": " ".join(os.uname()),
            "settings": {
                "model": str(gguf),
                "rounds": args.rounds,
                "threads": args.threads,
                "octavo": settings.octavo,
                "workloads": [WORKLOADS[name].as_json() for name in args.workloads],
            },
            "engines": about,
            "summary": [row.as_json() for row in rows],
            "samples": [asdict(sample) for sample in comparison.samples],
            "idle_cpu_s": idle_cpu_s,
            "warnings": comparison.warnings,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
        log(f"wrote {args.json}")
    return 0 if comparison.samples else 1


if __name__ == "__main__":
    sys.exit(main())
