"""What the system tells about the work of a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.system.child_process import work_of

# Fields 3 to 15 behind the name: state, five ids, the terminal's group, flags; page faults, minor
# and major, with those of children; ticks of processors, its own and the system's.
STAT = "7 ({name}) S 1 7 7 0 -1 4194560 {minor} 90 {major} 91 {own} {system} 0 0 20 0 1 0 5\n"


@pytest.mark.parametrize("name", ["python", "a b", "odd) (name"])
def test_faults_and_ticks_of_a_process_whatever_its_name(tmp_path, name):
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(STAT.format(name=name, minor=11, major=12, own=13, system=14))
    assert work_of(7, tmp_path) == (11, 12, 13, 14)


def test_nothing_is_told_of_one_that_has_gone(tmp_path):
    assert work_of(7, tmp_path) == ()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_it_grows_while_this_process_computes():
    before = work_of(os.getpid())
    while work_of(os.getpid()) == before:
        sum(range(10_000))
