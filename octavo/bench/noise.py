"""Probes of memory and arithmetic, and of the use of the processors by others, which tell how quiet
the machine is.

A figure that was measured while another program ran, or while a neighbour on the same host used the
memory, is worth nothing. Neither can be prevented here; both can be detected, and are recorded
beside every sample.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from octavo.base.errors import BenchmarkError


class BandwidthProbe:
    """Reads one large buffer with all threads, over and over, for about ``seconds``."""

    def __init__(self, threads: int, num_bytes: int = 300 * 10**6, seconds: float = 0.1):
        self._parts = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), threads)
        self._num_bytes = sum(part.nbytes for part in self._parts)
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(threads)

    def measure(self) -> float:
        """Return GB/s, the median over the passes."""
        return _median_rate(self._read, self._num_bytes, self._seconds)

    def _read(self) -> None:
        list(self._pool.map(np.bitwise_or.reduce, self._parts))  # numpy lets go of the GIL


class GemmProbe:
    """Multiplies two float32 matrices that stay in the caches, over and over.

    It detects a processor that has become slower: shared with a neighbour, or clocked down.
    """

    def __init__(self, size: int = 512, seconds: float = 0.1):
        self._left = np.full((size, size), 0.5, dtype=np.float32)
        self._right = np.full((size, size), 0.25, dtype=np.float32)
        self._product = np.empty_like(self._left)
        self._seconds = seconds

    def measure(self) -> float:
        """Return GFLOP/s, the median over the passes, with the threads of numpy's own library."""
        flops = 2 * len(self._left) ** 3
        return _median_rate(
            lambda: np.dot(self._left, self._right, out=self._product), flops, self._seconds
        )


def _median_rate(run: Callable[[], object], amount: int, seconds: float) -> float:
    """Run something for about ``seconds``; return 10^9 of its amounts per second, the median."""
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - begin < seconds:
        started = time.perf_counter()
        run()
        rates.append(amount / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates)


@dataclass(frozen=True, slots=True)
class NoiseProbe:
    """Speed of the machine at one moment."""

    read_gbytes_per_s: float
    gemm_gflops: float


def probe_machine(threads: int) -> NoiseProbe:
    """Run both probes in a process of their own, whose memory and threads end with it.

    Raises:
        BenchmarkError: the process failed.
    """
    command = [sys.executable, "-m", "octavo.bench.noise", str(threads)]
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"the probe of the machine failed: {done.stderr.strip()[-500:]}")
    return NoiseProbe(**json.loads(done.stdout))


# Probes that differ by more from one another, and more of a processor in use by others, make a
# measurement doubtful.
MOVED = 0.25
OTHERS_BUSY = 0.1


def has_moved(before: float, after: float) -> bool:
    return abs(after - before) > MOVED * min(before, after)


@dataclass
class CpuUse:
    """Processors kept busy in an interval: by all processes, and by the measured ones."""

    elapsed_s: float = 0.0
    machine: float | None = None
    measured: float = 0.0

    @property
    def others(self) -> float | None:
        """Processors that other processes kept busy; None where that is not known."""
        return None if self.machine is None else max(0.0, self.machine - self.measured)


@contextmanager
def watch_cpu(process_group: int | None = None) -> Iterator[CpuUse]:
    """Measure the use of the processors in the block; the result is filled at its end.

    Measured processes are a process group that lives on, and children that start and end within.
    """
    use = CpuUse()
    machine, measured, started = _machine_cpu_s(), _measured_cpu_s(process_group), time.monotonic()
    yield use
    use.elapsed_s = time.monotonic() - started
    use.measured = (_measured_cpu_s(process_group) - measured) / use.elapsed_s
    machine_after = _machine_cpu_s()
    if use.elapsed_s < 0.1:  # the system counts in steps of a hundredth of a second
        return
    if machine is not None and machine_after is not None:
        use.machine = (machine_after - machine) / use.elapsed_s


def group_cpu_s(process_group: int, proc: Path = Path("/proc")) -> float:
    """Processor seconds of the processes of a group, and of those that ended in it."""
    ticks = 0
    for stat in proc.glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it ended meanwhile
            continue
        # pid (name) state ppid pgrp …; a name may have blanks and brackets in it.
        fields = text[text.rindex(")") + 2 :].split()
        if int(fields[2]) == process_group:
            ticks += sum(int(field) for field in fields[11:15])  # user, system, and of children
    return ticks / os.sysconf("SC_CLK_TCK")


def parse_machine_cpu_s(stat: str) -> float:
    """Return the busy seconds of all processors since boot, from /proc/stat; stolen time is busy,
    too."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _machine_cpu_s() -> float | None:
    try:
        return parse_machine_cpu_s(Path("/proc/stat").read_text())
    except (OSError, ValueError):
        return None


def _measured_cpu_s(process_group: int | None) -> float:
    # This process waits, and reads output; children count once they have ended.
    own = sum(os.times()[:4])  # user, system, and of children
    return own + (0.0 if process_group is None else group_cpu_s(process_group))


if __name__ == "__main__":
    num_threads = int(sys.argv[1])
    print(
        json.dumps(asdict(NoiseProbe(BandwidthProbe(num_threads).measure(), GemmProbe().measure())))
    )
