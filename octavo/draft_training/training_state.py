"""A head on its way, as arrays: to be kept, and to go on from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from octavo.draft_training.training_loop import Training

# What AdamW keeps of each parameter beside the number of its steps.
_MOMENTS = "exp_avg", "exp_avg_sq"


def snapshot(training: Training) -> dict[str, np.ndarray]:
    """All that the next step depends on but the examples, in float32."""
    arrays = {"step": np.array(training.step)}
    for index, parameter in enumerate(training.head.parameters()):
        arrays[f"parameter-{index}"] = parameter.detach().numpy()
        state = training.optimizer.state[parameter]
        arrays |= {f"{name}-{index}": state[name].numpy() for name in _MOMENTS}
    return arrays


@torch.no_grad()
def restore(training: Training, arrays: Mapping[str, np.ndarray]) -> None:
    """Put a training back to where it was, which goes on to the same head as it would have.

    KeyError or RuntimeError if it is not of such a head.
    """
    training.step = int(arrays["step"])
    for index, parameter in enumerate(training.head.parameters()):
        parameter.copy_(torch.from_numpy(arrays[f"parameter-{index}"]))
        training.optimizer.state[parameter] = {
            "step": torch.tensor(float(training.step)),
            **{name: torch.from_numpy(arrays[f"{name}-{index}"]) for name in _MOMENTS},
        }
