"""A forward pass on the native kernels that ends with hidden states."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

import numpy as np

from octavo.core.batch import Batch
from octavo.kernels.recorder import Value
from octavo.runtime.forward import ForwardOutput
from octavo.runtime.input_batch import token_types
from octavo.runtime.native_forward import NativeForward


class NativePooling(NativeForward):
    """Runs batches of a model without a head.

    Args:
        output: the value of the program that is read after a step.
        arguments: those of ``NativeForward``.
    """

    def __init__(self, output: Value, *arguments: Any):
        super().__init__(*arguments)
        self._output_value = output
        self._types = array("i", bytes(4 * self.limits.max_num_batched_tokens))

    def submit(self, batch: Batch, weighed: Collection[str] = ()) -> ForwardOutput:
        types = token_types(batch)
        self._arguments.token_types = None
        if types:
            self._types[: len(types)] = array("i", types)
            self._arguments.token_types = self._types.buffer_info()[0]
        return super().submit(batch, weighed)

    def last_hidden_states(self) -> np.ndarray:
        """See :class:`octavo.runtime.pooling_runner.PooledForward`."""
        return self.program.buffer(self._output_value)[: self._arguments.seqs.num_tokens]
