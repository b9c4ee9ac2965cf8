"""Probes and accounts of processors: that they count what they say, not how fast a machine is."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench import noise
from octavo.bench.noise import BandwidthProbe, GemmProbe, has_moved, watch_cpu

SPIN = "import time; end = time.perf_counter() + 0.6\nwhile time.perf_counter() < end: pass"


def stopwatch(monkeypatch, seconds: float) -> None:
    """Every look at the clock is so much later than the one before."""
    now = [0.0]

    def tick() -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(noise.time, "perf_counter", tick)


def test_bandwidth_is_bytes_over_time(monkeypatch):
    stopwatch(monkeypatch, 0.5)
    assert BandwidthProbe(2, num_bytes=8000, seconds=0).measure() == pytest.approx(8000 / 0.5 / 1e9)


def test_arithmetic_is_operations_over_time(monkeypatch):
    stopwatch(monkeypatch, 0.25)
    assert GemmProbe(16, seconds=0).measure() == pytest.approx(2 * 16**3 / 0.25 / 1e9)


def test_a_probe_runs_in_a_process_of_its_own():
    probe = noise.probe_machine(1)
    assert probe.read_gbytes_per_s > 0 and probe.gemm_gflops > 0


def test_a_probe_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(noise.sys, "executable", "/bin/false")
    with pytest.raises(BenchmarkError, match="probe of the machine failed"):
        noise.probe_machine(1)


def test_a_quarter_is_a_move():
    assert not has_moved(100.0, 124.0) and not has_moved(124.0, 100.0)
    assert has_moved(100.0, 126.0) and has_moved(126.0, 100.0)


def test_machine_time_counts_all_but_idle():
    ticks = os.sysconf("SC_CLK_TCK")
    #                user nice system idle iowait irq softirq steal guest
    stat = "cpu  10 20 30 4000 500 1 2 3 7 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert noise.parse_machine_cpu_s(stat) == pytest.approx((10 + 20 + 30 + 1 + 2 + 3) / ticks)


def test_a_group_is_found_whatever_its_processes_are_called(tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, name, group, times in (
        (11, "python", 7, "10 20 0 0"),
        (12, "a ) b (c", 7, "1 2 3 4"),
        (13, "other", 8, "1000 1000 0 0"),
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        # pid (name) state ppid pgrp session tty tpgid flags 4 faults, then the times
        line = f"{pid} ({name}) S 1 {group} 7 0 -1 4194304 1 2 3 4 {times} 20 0 1"
        (folder / "stat").write_text(line)
    assert noise.group_cpu_s(7, tmp_path) == pytest.approx((10 + 20 + 1 + 2 + 3 + 4) / ticks)


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")


@pytest.mark.timing
@needs_proc
def test_what_this_process_and_its_children_use_is_not_others():
    with watch_cpu() as use:
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            pass
    # However busy the machine is, its own share is seen, and is part of the whole.
    assert use.elapsed_s >= 0.9
    assert use.measured > 0.2
    assert use.others is not None and use.machine is not None
    assert use.others == pytest.approx(max(0.0, use.machine - use.measured))


@pytest.mark.timing
@needs_proc
def test_what_others_use_is_seen():
    """A child that lives on is not counted as this process's: it stands for somebody else."""
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        with watch_cpu() as use:
            time.sleep(0.5)
    finally:
        spinner.kill()
        spinner.wait()
    assert use.others is not None and use.others > 0.1


def test_too_short_an_interval_says_nothing():
    with watch_cpu() as use:
        pass
    assert use.machine is None and use.others is None
