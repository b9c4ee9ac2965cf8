"""States of recurrent layers as tensors, for ops of PyTorch."""

from __future__ import annotations

import torch

from octavo.core.batch import NO_STATE, Batch
from octavo.kernels.recurrence import LayerStates, SequenceStates
from octavo.runtime.input_batch import StepInputs, state_steps
from octavo.runtime.state_memory import StateMemory


class EagerStates:
    """The states of all slots on a device; on the CPU, they share the memory of ``StateMemory``."""

    def __init__(self, memory: StateMemory, device: torch.device):
        self._layers = [
            [torch.from_numpy(array).to(device) for array in memory.layer(index)]
            for index in range(memory.num_layers)
        ]

    def of_step(self, inputs: StepInputs, batch: Batch) -> list[LayerStates]:
        """Return the states of each layer with the slots of a step's sequences."""
        bounds = inputs.query_start.tolist()
        sequences = [
            SequenceStates(
                begin, end, None if step.source == NO_STATE else step.source, step.target
            )
            for begin, end, step in zip(bounds, bounds[1:], state_steps(batch), strict=False)
        ]
        return [LayerStates(memories, sequences) for memories in self._layers]
