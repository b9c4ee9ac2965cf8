"""What all streams promise: that of a GPU, the CPU, and the double that tests them all."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from queued_stream import QueuedStream

from octavo.runtime.streams import CudaStream, HostStream

ON_GPU = pytest.param(
    lambda: CudaStream(torch.device("cuda")),
    id="cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


@pytest.fixture(params=[HostStream, QueuedStream, ON_GPU])
def stream(request):
    return request.param()


def test_work_is_done_in_its_order(stream):
    given, taken = (stream.host_buffer(4, torch.int32) for _ in range(2))
    memory = torch.zeros(4, dtype=torch.int32, device=stream.device)
    given[:] = torch.arange(4)
    stream.launch(lambda: memory.copy_(given, non_blocking=True))
    stream.launch(lambda: memory.mul_(3))
    stream.launch(lambda: taken.copy_(memory, non_blocking=True))
    stream.mark().wait()
    assert taken.tolist() == [0, 3, 6, 9]


def test_what_was_launched_is_copied_though_its_buffer_was_forgotten(stream):
    taken = stream.host_buffer(8 << 16, torch.int32).view(8, -1)
    memory = torch.zeros_like(taken, device=stream.device)

    def launch(row: int) -> None:
        given = stream.host_buffer(taken.shape[1], torch.int32)
        given.fill_(row + 1)
        stream.launch(lambda: memory[row].copy_(given, non_blocking=True))

    for row in range(len(taken)):
        launch(row)
    stream.launch(lambda: taken.copy_(memory, non_blocking=True))
    stream.mark().wait()
    assert (taken == torch.arange(1, 9)[:, None]).all()


def test_a_graph_does_again_what_was_captured_with_what_is_there_by_then(stream):
    taken = stream.host_buffer(2, torch.float32)
    x, y = (torch.ones(2, device=stream.device) for _ in range(2))

    def work() -> None:
        y.add_(x)

    stream.launch(work)
    graph = stream.capture(work)  # which adds nothing
    for value in (10.0, 100.0):
        stream.launch(lambda value=value: x.fill_(value))
        stream.launch(graph.replay)
    stream.launch(lambda: taken.copy_(y, non_blocking=True))
    stream.mark().wait()
    assert taken.tolist() == [112.0, 112.0] and graph.num_bytes >= 0


def test_an_event_that_has_come_waits_for_nothing_later():
    stream, done = QueuedStream(), []
    stream.launch(lambda: done.append(1))
    first = stream.mark()
    stream.launch(lambda: done.append(2))
    assert not done
    first.wait()
    first.wait()
    assert done == [1]


def test_after_a_capture_that_failed_others_have_a_pool_of_their_own(monkeypatch):
    """As PyTorch refuses a pool that it believes to be captured into. A double of it, as no GPU has
    to be there."""
    pools, used = iter(range(9)), []

    class Capturing(nullcontext):
        def __init__(self, graph, pool, stream, mode):
            super().__init__()
            used.append(pool)

    for name, double in {
        "Stream": lambda device: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph_pool_handle": lambda: next(pools),
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (0, 0),
        "stream": lambda stream: nullcontext(),
        "graph": Capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    stream = CudaStream(torch.device("cuda"))
    stream.capture(lambda: None)
    with pytest.raises(RuntimeError, match="not permitted"):
        stream.capture(fail)
    for _ in range(2):
        stream.capture(lambda: None)
    assert used == [0, 0, 1, 1]
