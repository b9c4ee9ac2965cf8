"""The command ``scripts/bench-gpu``, which takes some minutes and no network."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from octavo.base.errors import BenchmarkError, OctavoError
from octavo.bench.gpu.cases import CASES, GpuCase, dry_run_cases
from octavo.bench.gpu.run import GpuReport, GpuRun
from octavo.measure.results import write_json
from octavo.settings.engine import EngineArgs

EPILOG = """\
examples:
  scripts/bench-gpu --json gpu.json            everything that fits into eight minutes
  scripts/bench-gpu --seconds 120 --only 0.6b  one case
  scripts/bench-gpu --dry-run                  a tiny model on the CPU, to see that it works
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    cases = dry_run_cases(_dry_run_kernels()) if args.dry_run else CASES
    try:
        return _run(args, _chosen(cases, args.only))
    except OctavoError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, cases: Sequence[GpuCase]) -> int:
    from rich.console import Console

    from octavo.bench.gpu.report import print_report

    def keep(document: GpuReport) -> None:
        if args.json is not None:
            write_json(Path(args.json), document.as_json())

    with tempfile.TemporaryDirectory(prefix="octavo-gpu-", dir=args.folder) as folder:
        device = "cpu" if args.dry_run else "cuda"
        document = GpuRun(Path(folder), device, args.seconds, _say, keep).run(cases)
    print_report(document, Console(highlight=False, soft_wrap=True))
    keep(document)
    return 0 if any(each.figures or each.agreement for each in document.outcomes) else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _chosen(cases: Sequence[GpuCase], names: Sequence[str]) -> list[GpuCase]:
    """Return all cases, or those of these names."""
    if unknown := set(names) - {case.name for case in cases}:
        there = ", ".join(case.name for case in cases)
        raise BenchmarkError(f"no case is called {', '.join(sorted(unknown))}: there are {there}")
    return [case for case in cases if not names or case.name in names]


def _dry_run_kernels() -> str:
    """Return the counterpart of the GPU kernels that a CPU can run."""
    (kernels,) = (each for each in fields(EngineArgs) if each.name == "kernels")
    choices = kernels.metadata["choices"]
    return "fused" if "fused" in choices else "reference"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench-gpu",
        description=(__doc__ or "").partition(":")[2].strip(),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=480, help="that it may take (480)")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="this case")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--folder", help="where models are made: up to 35 GB (the system's)")
    parser.add_argument("--json", metavar="FILE", help="write all that was found")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
