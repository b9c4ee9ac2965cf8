"""CUDA graphs of steps, each of which is launched as one.

Launching a step kernel by kernel takes the host about 15 ms, of which most is spent in Python, and
a GPU computes a step of few tokens in less. A graph has one of the shapes of ``step_shapes.py``.
Those of decode steps sample, too; logits of steps with prompts, and sampling, are launched.

All shapes are captured at the start, before any request waits for a token: a capture synchronizes
the device and frees cached memory, which would delay running requests. The largest comes first, so
that the smaller ones reuse its memory. Other steps are launched kernel by kernel, and so are those
for which no graph that is large enough was captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError
from octavo.core.batch import Batch
from octavo.runtime.memory_ledger import gib
from octavo.runtime.step_shapes import StepShape

if TYPE_CHECKING:
    from octavo.runtime.streams import CapturedGraph, Stream, Work

_log = logging.getLogger("octavo")


def is_plain_decode(batch: Batch) -> bool:
    """Return whether a step computes and samples one token of each request."""
    return all(item.num_tokens == item.num_sampled == 1 for item in batch.items)


class StepGraphs:
    """Captures steps, and chooses the graph for a batch.

    Args:
        shapes: to capture. A decode step is one of ``StepShape.decode``.
        step_of: returns the work of a step of a shape.
        reset: resets the state that a partly launched step leaves behind.
        idle: writes inputs of padding, so that the work can run once before it is captured:
            kernels are compiled then, and libraries allocate their memory.
        all_needed: a shape that cannot be captured is an error, since other ranks replay it.
    """

    def __init__(
        self,
        stream: Stream,
        shapes: Collection[StepShape],
        step_of: Callable[[StepShape], Work],
        reset: Work,
        idle: Callable[[StepShape], None],
        *,
        all_needed: bool = False,
    ):
        self._stream = stream
        self._step_of, self._reset, self._idle = step_of, reset, idle
        self._all_needed = all_needed
        self._missing = sorted(shapes, key=_size)
        self._graphs: dict[StepShape, CapturedGraph] = {}  # the largest first
        self._decodes: list[StepShape] = []  # that are captured, ascending
        self._prompts: list[StepShape] = []

    @property
    def bytes_by_shape(self) -> dict[StepShape, int]:
        """The device memory of each captured graph, in bytes, the largest first."""
        return {shape: graph.num_bytes for shape, graph in self._graphs.items()}

    def shape_of(self, batch: Batch) -> StepShape | None:
        """Return the shape of the smallest graph that a batch fits in, None if there is none."""
        tokens, seqs = batch.num_tokens, batch.num_seqs
        shapes = self._decodes if is_plain_decode(batch) else self._prompts
        for shape in shapes:
            if shape.num_tokens >= tokens and shape.num_seqs >= seqs:
                return shape
        return None

    def __getitem__(self, shape: StepShape) -> Work:
        return self._graphs[shape].replay

    def capture(self) -> None:
        """Capture every shape, the largest first."""
        if not self._missing:
            return
        begin = time.perf_counter()
        while self._missing:
            self._capture(self._missing.pop())
        _log.info(
            "%d decode steps and %d prompt steps are captured after %.1f s, in %s",
            *(len(self._decodes), len(self._prompts), time.perf_counter() - begin),
            gib(sum(self.bytes_by_shape.values())),
        )

    def _capture(self, shape: StepShape) -> None:
        step = self._step_of(shape)
        try:
            self._idle(shape)
            self._stream.launch(step)
            graph = self._stream.capture(step)
        except RuntimeError as error:  # PyTorch, Triton and the driver raise this
            if self._all_needed:
                raise ConfigError(
                    f"steps of {shape.num_tokens} tokens of {shape.num_seqs} requests are not "
                    f"captured, and all ranks have to: set enforce_eager ({error})"
                ) from error
            # It is not tried again: each try would take time, and fail in the same way.
            _log.warning(
                "steps of %d tokens of %d requests are not captured: %s",
                *(shape.num_tokens, shape.num_seqs, error),
            )
            self._stream.launch(self._reset)
        else:
            self._graphs[shape] = graph
            (self._decodes if shape.is_decode else self._prompts).insert(0, shape)
            _log.debug("captured %s, %d bytes", shape, graph.num_bytes)


def _size(shape: StepShape) -> tuple[int, int]:
    return shape.num_tokens, shape.num_seqs
