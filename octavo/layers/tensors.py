"""Models whose parameters are torch tensors."""

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
    """Return a copy of a loaded model whose parameters are tensors; the model itself stays
    unchanged.

    On the CPU the tensors share the memory of the weights. On other devices unquantized matrices
    are converted to ``dtype``, except exact ones, and ``progress`` is called with the bytes
    uploaded so far and in all.
    """
    device = torch.device(device)
    values = {id(p.value): p.value for _, p in named_parameters(model)}
    exact = {id(p.value) for _, p in named_parameters(model) if p.exact}
    total, done = sum(value.nbytes for value in values.values()), 0
    upload = upload_to(device)
    made: dict[int, WeightTensor] = {}  # by the weight's id: tied weights stay one tensor
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
