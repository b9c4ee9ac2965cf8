"""Saves a training in progress as arrays, and restores it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from octavo.draft_training.training_loop import Training

# The state of AdamW for each parameter, beside the number of steps.
_MOMENTS = "exp_avg", "exp_avg_sq"


def snapshot(training: Training) -> dict[str, np.ndarray]:
    """Return all that the next step depends on but the examples: the head and the optimizer."""
    arrays = {"step": np.array(training.step)}
    for index, parameter in enumerate(training.head.parameters()):
        arrays[f"parameter-{index}"] = parameter.detach().numpy()
        state = training.optimizer.state[parameter]
        arrays |= {f"{name}-{index}": state[name].numpy() for name in _MOMENTS}
    return arrays


@torch.no_grad()
def restore(training: Training, arrays: Mapping[str, np.ndarray]) -> None:
    """Restore a training from its snapshot; it then makes the same head as without interruption.

    Raises:
        KeyError, RuntimeError: the snapshot is of another head.
    """
    training.step = int(arrays["step"])
    for index, parameter in enumerate(training.head.parameters()):
        parameter.copy_(torch.from_numpy(arrays[f"parameter-{index}"]))
        training.optimizer.state[parameter] = {
            "step": torch.tensor(float(training.step)),
            **{name: torch.from_numpy(arrays[f"{name}-{index}"]) for name in _MOMENTS},
        }
