from __future__ import annotations

import pytest

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.cuda_graphs import StepGraphs
from octavo.runtime.step_shapes import StepShape, decode_shapes
from octavo.runtime.streams import CapturedGraph

DECODES = decode_shapes(4)
PROMPTS = [StepShape(16, 2, 1, 16), StepShape(16, 4, 1, 16), StepShape(32, 4, 1, 32)]


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


def graphs_of(stream, shapes=(*DECODES, *PROMPTS), idle=lambda shape: None):
    return StepGraphs(stream, shapes, lambda shape: shape, no_reset, idle)


def test_all_shapes_are_captured_the_largest_first(caplog):
    caplog.set_level("INFO", "octavo")
    notes = Notes()
    graphs = graphs_of(notes, idle=lambda shape: notes.told.append(("idle", shape)))
    assert graphs.shape_of(batch(1)) is None
    graphs.capture()
    # Inputs of an empty step, a step that compiles what has to be, and the same step captured.
    largest_first = [*PROMPTS[::-1], *DECODES[::-1]]
    each = [[("idle", s), ("launch", s), ("capture", s)] for s in largest_first]
    assert notes.told == [told for of_shape in each for told in of_shape]
    assert graphs.bytes_by_shape == dict.fromkeys(largest_first, 100)
    text = "3 decode steps and 3 prompt steps are captured"
    assert any(m.startswith(text) for m in caplog.messages)
    graphs.capture()  # once there are all of them, nothing is left to do
    assert len(notes.told) == 18


def test_a_batch_has_the_smallest_graph_that_it_fits_in():
    graphs = graphs_of(Notes())
    graphs.capture()
    of_decodes = [graphs.shape_of(batch(*[1] * n)) for n in range(1, 6)]
    assert of_decodes == [*DECODES, DECODES[-1], None]
    assert graphs.shape_of(batch(3)) == graphs.shape_of(batch(9, 7)) == PROMPTS[0]
    assert graphs.shape_of(batch(3, 1, 1)) == PROMPTS[1]
    assert graphs.shape_of(batch(17)) == PROMPTS[2]
    assert graphs.shape_of(batch(33)) is graphs.shape_of(batch(2, 1, 1, 1, 1)) is None


@pytest.mark.parametrize(
    ("failing", "serving"), [(4, [1, 2, None, None]), (2, [1, 4, 4, 4]), (1, [2, 2, 4, 4])]
)
def test_a_shape_that_cannot_be_captured_costs_no_other(failing, serving, caplog):
    at_fault = StepShape.decode(failing)

    class Failing(Notes):
        def capture(self, work) -> CapturedGraph:
            if work == at_fault:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(work)

    stream = Failing()
    graphs = graphs_of(stream)
    graphs.capture()
    found = [graphs.shape_of(batch(*[1] * n)) for n in range(1, 5)]
    assert [shape and shape.num_seqs for shape in found] == serving
    assert graphs.shape_of(batch(2)) == PROMPTS[0]
    assert [told for told in stream.told if told == ("launch", at_fault)] == [("launch", at_fault)]
    # What the step may have left half done is undone before anything else is launched.
    after = stream.told.index(("launch", at_fault)) + 1
    assert stream.told[after] == ("launch", no_reset)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    text = f"steps of {failing} tokens of {failing} requests are not captured: operation"
    assert text in warning.getMessage()


def test_chunks_of_prompts_and_drafts_are_no_plain_decoding():
    graphs = graphs_of(Notes(), DECODES)
    graphs.capture()
    assert graphs.shape_of(batch(1, 2)) is None
    assert graphs.shape_of(batch(2, draft=Draft.chain([1]))) is None
    chunk = ScheduledRequest(Request("a", [1] * 9, SamplingParams(), 0.0), 3, 1, num_sampled=0)
    assert graphs.shape_of(Batch(0, (chunk,))) is None
