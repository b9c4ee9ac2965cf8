"""Measures startup, from the start of the process to the first token.

A warm start finds everything as an earlier start has left it: the model's files in the memory of
the system, its weights packed for the kernels. A cold one packs them anew, into an empty folder,
and reads the model's files from the disk, as far as the system drops them from memory.
"""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from octavo import hub
from octavo.base.errors import BenchmarkError
from octavo.bench.child_processes import need_process_groups
from octavo.bench.record import Recorder, columns, peak_rss_bytes
from octavo.measure.statistics import MedianRange

WARM = "files in memory, weights packed, by a start before that is not measured"
COLD = (
    "packed weights not there, and none noted; Python, its packages and their bytecode as in a "
    "warm start; "
)
_DROPPED = "the model's files dropped from the system's memory (posix_fadvise)"
_KEPT = "the model's files as they are in memory, since this system drops none on request"


@dataclass(frozen=True, slots=True)
class StartupPlan:
    num_cold: int = 2
    num_warm: int = 3


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Times of one start. Seconds from the start of the process until its engine was ready, and
    until its first token; and their parts: the interpreter and its imports, and the phases of
    ``load_engine``."""

    ready_s: float
    first_token_s: float
    import_s: float
    header_s: float
    tokenizer_s: float
    weights_s: float
    program_s: float
    answer_s: float  # from ready to the first token
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class StartupResult:
    model: str
    cold: tuple[StartTimes, ...]
    warm: tuple[StartTimes, ...]
    cold_means: str
    engine: dict[str, Any]
    run: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        cold, warm = ([start.ready_s for start in starts] for starts in (self.cold, self.warm))
        return {
            "model": self.model,
            "cold_s": MedianRange.of(cold).median,
            "warm_s": MedianRange.of(warm).median,
            "first_token_s": spread(self.warm, "first_token_s").median,
            "cold": {"means": self.cold_means, **_details(self.cold)},
            "warm": {"means": WARM, **_details(self.warm)},
            # As `vllm bench startup` calls them.
            "avg_cold_startup_time": fmean(cold),
            "cold_startup_times": cold,
            "avg_warm_startup_time": fmean(warm),
            "warm_startup_times": warm,
            "engine": self.engine,
            "run": self.run,
        }


def spread(starts: Sequence[StartTimes], name: str) -> MedianRange:
    return MedianRange.of([getattr(start, name) for start in starts])


def _details(starts: Sequence[StartTimes]) -> dict[str, Any]:
    return {name: spread(starts, name).as_json() for name in StartTimes.__dataclass_fields__}


def measure_startup(
    model: str,
    engine_settings: Mapping[str, Any],
    plan: StartupPlan,
    settings: Mapping[str, Any],
    advance: Callable[[], None] = lambda: None,
) -> StartupResult:
    """Start processes, one after the other: one that does not count, then warm ones, then cold
    ones.

    Args:
        model: it must be here already.
        engine_settings: further keyword arguments of ``LLM``.
        settings: those of the user, to be kept with the result.
        advance: called after each start.

    Raises:
        BenchmarkError: a start failed; says why.
    """
    files = model_files(hub.resolve(model))
    arguments = {**engine_settings, "model": model}
    engine: dict[str, Any] = {}

    def start(variables: Mapping[str, str]) -> StartTimes:
        measured, info = start_once(arguments, variables)
        engine.update(info)
        advance()
        return measured

    def cold_start() -> StartTimes:
        drop_from_memory(files)
        with tempfile.TemporaryDirectory(dir=_scratch_folder()) as folder:
            return start({"OCTAVO_PACKED_DIR": folder})

    start({})
    recorder = Recorder(settings, engine_settings.get("threads"))
    with recorder:
        warm = tuple(start({}) for _ in range(plan.num_warm))
        cold = tuple(cold_start() for _ in range(plan.num_cold))
    recorder.engine = engine
    recorder.samples = {"cold": columns(cold), "warm": columns(warm)}
    means = COLD + (_DROPPED if _CAN_DROP else _KEPT)
    return StartupResult(model, cold, warm, means, engine, recorder.as_json())


_CAN_DROP = hasattr(os, "posix_fadvise")


def start_once(
    arguments: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> tuple[StartTimes, dict[str, Any]]:
    """Start a process that loads an engine with ``arguments`` and generates a token; return its
    times and a description of the engine.

    Args:
        variables: of its environment, beside this process's own.

    Raises:
        BenchmarkError: it failed; says why.
    """
    need_process_groups("octavo bench startup")
    command = [
        sys.executable,
        "-m",
        "octavo.bench.offline.start_once",
        json.dumps(arguments),
    ]
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(variables or {})},
        )
        assert process.stdout is not None
        try:
            inside = process.stdout.readline()
            ready = time.perf_counter() - begin
            outcome = process.stdout.readline()
            first_token = time.perf_counter() - begin
            peak = _wait(process)
        finally:
            process.kill()
            process.stdout.close()
        if process.returncode != 0:
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()
            raise BenchmarkError(f"a start failed: {reason[-1] if reason else 'without a word'}")
    phases = json.loads(inside)
    start = StartTimes(
        ready_s=ready,
        first_token_s=first_token,
        import_s=ready - sum(phases.values()),
        **{f"{phase}_s": seconds for phase, seconds in phases.items()},
        answer_s=first_token - ready,
        peak_rss_bytes=peak,
    )
    return start, json.loads(outcome)["engine"]


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process; return the most bytes of memory that it has had."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return peak_rss_bytes(usage)


def model_files(path: Path) -> list[Path]:
    """Return all files of a model that may be read: its file, with the other parts of a split one;
    a folder's files."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    part = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path.name)
    if part is None:
        return [path]
    return sorted(path.parent.glob(f"{glob.escape(part[1])}?????{part[2]}"))


def drop_from_memory(files: Sequence[Path]) -> None:
    """Ask the system to drop the contents of files from its memory."""
    if not _CAN_DROP:
        return
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _scratch_folder() -> Path | None:
    """Return a folder on the disk of the models, if possible; a temporary folder may be in
    memory."""
    home = hub.home()
    return home if os.access(home, os.W_OK) else None
