"""The short standard set behind ``scripts/bench``, which renews the tables of docs/performance.md.

Each measurement is an ``octavo bench`` of its own, in a process of its own, so that none finds
memory, threads or caches of another.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.base.errors import BenchmarkError, OctavoError
from octavo.bench import performance_tables
from octavo.hub import DEFAULT_MODEL
from octavo.measure.results import write_json

STANDARD: dict[str, tuple[str, ...]] = {
    "startup": ("startup", "--num-iters-cold=2", "--num-iters-warm=3"),
    "latency": ("latency", "--input-len=512", "--output-len=128", "--batch-size=1"),
    "latency-8": ("latency", "--input-len=128", "--output-len=128", "--batch-size=8"),
    "throughput": ("throughput", "--num-prompts=64", "--input-len=128", "--output-len=128"),
    "prefix": ("prefix", "--prefix-len=1024", "--questions=8", "--repeat=3"),
    "serve": (
        *("serve", "--max-concurrency=32", "--num-prompts=96", "--num-warmups=32"),
        *("--random-input-len=128", "--random-output-len=128", "--ignore-eos"),
    ),
}
COMPARE = ("compare", "--rounds=3")

EPILOG = """\
examples:
  scripts/bench                       measure, and rewrite docs/performance.md between its markers
  scripts/bench --dry-run             measure, and print the table
  scripts/bench --peers               beside llama.cpp and vLLM, too (a quarter of an hour)
  scripts/bench --from benchmarks/results/2026-01-31-amd-epyc.json
"""


def measure(arguments: Sequence[str], model: str) -> dict[str, Any]:
    """Run ``octavo bench`` and return its JSON; its progress and log go where ours go.

    Raises:
        BenchmarkError: it failed.
    """
    command = ["bench", *arguments, model, "--json"]
    print(f"octavo {' '.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "octavo", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"octavo {' '.join(command)} failed, see above")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_standard(model: str, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Run the whole set. ``extra``: engine flags, for all of them."""
    found = {name: measure([*flags, *extra], model) for name, flags in STANDARD.items()}
    runs = {name: document["run"] for name, document in found.items()}
    first = runs["latency"]
    warnings = [f"{name}: {text}" for name, run in runs.items() for text in run["warnings"]]
    return {
        "date": first["date"],
        "model": model,
        "machine": first["machine"],
        "threads": first["threads"],
        "engine": first["engine"],
        "versions": first["versions"],
        "warnings": warnings,
        "measurements": {name: without_raw_data(document) for name, document in found.items()},
    }


def without_raw_data(value: Any) -> Any:
    """Return a document without samples and without long lists of numbers: small enough to
    be kept."""
    if isinstance(value, Mapping):
        return {
            name: without_raw_data(item)
            for name, item in value.items()
            if name != "samples" and not _is_long(item)
        }
    return [without_raw_data(item) for item in value] if isinstance(value, list) else value


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 32 and isinstance(value[0], int | float)


def file_name(document: Mapping[str, Any]) -> str:
    """Name a result: ``2026-01-31-amd-epyc-9654.json``."""
    cpu = re.sub(r"[^a-z0-9]+", "-", document["machine"]["cpu"]["model"].lower()).strip("-")
    return f"{document['date'][:10]}-{cpu or 'unknown'}.json"


def sections_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the sections of docs/performance.md that a stored document fills, by name.

    Raises:
        BenchmarkError: it is a document of another kind.
    """
    if "measurements" in document:
        return {"how-fast": performance_tables.how_fast(document)}
    if "summary" in document and "engines" in document:
        return {"peers": performance_tables.peers(document)}
    if "summary" in document and "calibration" in document:
        return {"predicted": performance_tables.predicted(document)}
    raise BenchmarkError("this is of none of scripts/bench, octavo bench compare, octavo validate")


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the standard set, and rewrite the table in docs/performance.md. "
        "Other flags are the engine's, such as --threads 4.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument(
        *("--document", "--readme"),  # the second one is the name of the release before
        dest="document",
        type=Path,
        default=Path("docs/performance.md"),
        metavar="FILE",
        help="whose tables are rewritten; default: %(default)s",
    )
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="JSON"
    )
    parser.add_argument("--dry-run", action="store_true", help="print, and write nothing")
    parser.add_argument("--peers", action="store_true", help="octavo bench compare, too")
    parser.add_argument("--dir", type=Path, help="where the peers are set up")
    parser.add_argument(
        "--from",
        dest="stored",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure nothing: results that were stored by this, by octavo bench compare, or by "
        "octavo validate --json",
    )
    return parser.parse_known_args(argv)


def run(args: argparse.Namespace, engine_flags: Sequence[str]) -> None:
    if not args.dry_run and not args.stored:
        check_markers(args)  # before minutes of measuring
    sections: dict[str, str] = {}
    for path in args.stored:
        for name, content in sections_of(_read(path)).items():
            sections[name] = f"{sections[name]}\n\n{content}" if name in sections else content
    if not args.stored:
        document = run_standard(args.model, engine_flags)
        sections |= sections_of(document)
        if not args.dry_run:
            write_json(args.results / file_name(document), document)
        if args.peers:
            where = [] if args.dir is None else [f"--dir={args.dir}"]
            compared = measure([*COMPARE, *where, *engine_flags], args.model)
            sections |= sections_of(compared)
            if not args.dry_run:
                write_json(args.results / f"peers-{file_name(compared['run'])}", compared)
    for content in sections.values():
        print(content, end="\n\n")
    if not args.dry_run:
        performance_tables.rewrite_file(args.document, sections)
        print(f"rewrote {args.document}: {', '.join(sections)}", file=sys.stderr)


def check_markers(args: argparse.Namespace) -> None:
    """Raise BenchmarkError if the tables cannot be rewritten."""
    text = performance_tables.read_document(args.document)
    for name in ("how-fast", "peers") if args.peers else ("how-fast",):
        performance_tables.rewrite(text, name, "")


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(performance_tables.read_document(path))
    except ValueError as error:
        raise BenchmarkError(f"{path} cannot be read: {error}") from error
    return document


def main(argv: Sequence[str] | None = None) -> int:
    args, engine_flags = parse_arguments(argv)
    try:
        run(args, engine_flags)
    except OctavoError as error:
        print(f"scripts/bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
