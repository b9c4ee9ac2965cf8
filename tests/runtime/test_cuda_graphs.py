from __future__ import annotations

import pytest

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.cuda_graphs import DecodeGraphs, graph_sizes
from octavo.runtime.streams import CapturedGraph


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
    ],
)
def test_sizes(most, sizes):
    assert graph_sizes(most) == sizes


def test_no_more_than_256():
    assert graph_sizes(1000)[-2:] == [240, 256] and len(graph_sizes(1000)) == 20


class Notes:
    """A stream that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def launch(self, work) -> None:
        self.told.append(("launch", work))

    def capture(self, work) -> CapturedGraph:
        self.told.append(("capture", work))
        return CapturedGraph(lambda: None, 100)


def batch(*counts: int, **fields) -> Batch:
    return Batch(
        0,
        tuple(
            ScheduledRequest(Request(str(i), [1] * 9, SamplingParams(), 0.0), 3, count, 1, **fields)
            for i, count in enumerate(counts)
        ),
    )


def no_reset() -> None:
    raise AssertionError("no step was cut short")


def test_all_sizes_are_captured_the_largest_first(caplog):
    caplog.set_level("INFO", "octavo")
    notes = Notes()
    idle = lambda size: notes.told.append(("idle", size))  # noqa: E731
    graphs = DecodeGraphs(notes, 4, lambda size: size, no_reset, idle)
    assert graphs.size_of(batch(1)) is None
    graphs.capture()
    # Inputs of an empty step, a step that compiles what has to be, and the same step captured.
    each = [[("idle", size), ("launch", size), ("capture", size)] for size in (4, 2, 1)]
    assert notes.told == [told for of_size in each for told in of_size]
    assert [graphs.size_of(batch(*[1] * n)) for n in range(1, 6)] == [1, 2, 4, 4, None]
    assert graphs.bytes_by_size == {4: 100, 2: 100, 1: 100}
    assert any(m.startswith("3 decode steps are captured") for m in caplog.messages)
    graphs.capture()  # once there are all of them, nothing is left to do
    assert len(notes.told) == 9


@pytest.mark.parametrize(
    ("failing", "serving"), [(4, [1, 2, None, None]), (2, [1, 4, 4, 4]), (1, [2, 2, 4, 4])]
)
def test_a_size_that_cannot_be_captured_costs_no_other(failing, serving, caplog):
    class Failing(Notes):
        def capture(self, work) -> CapturedGraph:
            if work == failing:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(work)

    stream = Failing()
    graphs = DecodeGraphs(stream, 4, lambda size: size, no_reset, lambda size: None)
    graphs.capture()
    assert [graphs.size_of(batch(*[1] * n)) for n in range(1, 5)] == serving
    assert [told for told in stream.told if told == ("launch", failing)] == [("launch", failing)]
    # What the step may have left half done is undone before anything else is launched.
    after = stream.told.index(("launch", failing)) + 1
    assert stream.told[after] == ("launch", no_reset)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert f"steps of {failing} requests are not captured: operation" in warning.getMessage()


def test_pieces_of_prompts_and_drafts_are_no_plain_decoding():
    graphs = DecodeGraphs(Notes(), 4, lambda size: size, no_reset, lambda size: None)
    graphs.capture()
    assert graphs.size_of(batch(1, 2)) is None
    assert graphs.size_of(batch(2, draft=Draft.chain([1]))) is None
    chunk = ScheduledRequest(Request("a", [1] * 9, SamplingParams(), 0.0), 3, 1, num_sampled=0)
    assert graphs.size_of(Batch(0, (chunk,))) is None
