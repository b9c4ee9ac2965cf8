"""A model with its parameters as tensors of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from octavo.layers.module import Module, named_parameters
from octavo.layers.parameter import Parameter
from octavo.quantization.tensors import WeightTensor, to_torch
from octavo.quantization.upload import upload_to

M = TypeVar("M", bound=Module)


def with_tensors(
    model: M,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] | None = None,
) -> M:
    """A loaded model for ops that compute when they are called; the model itself stays as it is.

    On the CPU the tensors are the same memory. Elsewhere unquantized matrices are converted to
    ``dtype``, but for those that are exact, and ``progress`` is called with the bytes that are
    there, and those of all.
    """
    device = torch.device(device)
    values = {id(p.value): p.value for _, p in named_parameters(model)}
    exact = {id(p.value) for _, p in named_parameters(model) if p.exact}
    total, done = sum(value.nbytes for value in values.values()), 0
    upload = upload_to(device)
    made: dict[int, WeightTensor] = {}  # by what it is made of: tied weights stay one
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            made[key] = torch.from_numpy(value).to(device)
        else:
            made[key] = to_torch(value, device, torch.float32 if key in exact else dtype, upload)
        done += value.nbytes
        if progress is not None and device.type != "cpu":
            progress(done, total)

    def place(parameter: Parameter) -> Parameter:
        return parameter.holding(made[id(parameter.value)])

    return model.with_parameters(place)
