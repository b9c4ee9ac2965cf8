from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from octavo.server.engine.in_flight_record import InFlightRecord, RecordedExecutor


def test_what_is_written_outlives_its_writer():
    record, fd = InFlightRecord.create()
    assert record.read() == []
    code = (
        "import os, sys; from octavo.server.engine.in_flight_record import InFlightRecord\n"
        "record = InFlightRecord.open(int(sys.argv[1]))\n"
        "record.write(['somebody else']); record.write(['a', 'b#1', 'ä'])\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd])
    os.close(fd)
    assert record.read() == ["a", "b#1", "ä"]


@pytest.mark.parametrize(
    "names", [[], ["a"], [f"{i:032x}#{i % 4}" for i in range(5000)]], ids=["none", "one", "many"]
)
def test_the_last_word_counts(names):
    record = InFlightRecord()
    record.write([f"{i:064x}" for i in range(200)])
    record.write(names)
    assert record.read() == names


def test_more_than_fits_is_cut():
    record = InFlightRecord()
    record.write([f"{i:064x}" for i in range(40_000)])
    names = record.read()
    assert 10_000 < len(names) < 40_000 and names[7] == f"{7:064x}"
    record.write(["a"])
    assert record.read() == ["a"]


class Executor:
    """Says what it runs, and what is on record then."""

    def __init__(self, depth, record):
        self.depth, self.record, self.seen = depth, record, []

    def submit(self, batch):
        self.seen.append(self.record.read())
        return batch


def batch_of(*names):
    request = [SimpleNamespace(request=SimpleNamespace(request_id=name)) for name in names]
    return SimpleNamespace(items=request)


@pytest.mark.parametrize(
    ("depth", "seen"),
    [
        (1, [["a"], ["a", "b"], ["b"], ["b"]]),
        (2, [["a"], ["a", "a", "b"], ["a", "b", "b"], ["b", "b"]]),
    ],
)
def test_steps_in_flight_are_on_record_before_they_run(depth, seen):
    record = InFlightRecord()
    executor = RecordedExecutor(Executor(depth, record), record)
    for batch in (batch_of("a"), batch_of("a", "b"), batch_of("b"), batch_of("b")):
        assert executor.submit(batch) is batch
    assert executor._executor.seen == seen
