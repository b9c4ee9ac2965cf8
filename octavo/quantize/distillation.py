"""Self-distillation by the KL divergence of a quantized model from the float one.

The *teacher* is a float model, the *student* the same one with other matrices in its layers. The
loss is the KL divergence of the student's next token from the teacher's, in nats, the mean over all
positions of a window::

    sum over tokens v of  p(v) (log p(v) - log q(v))        p of the teacher, q of the student

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531). No
labels are needed: a text only gives the contexts in which the two are compared.

Logits of a whole window would be the largest tensors, for both models and several times. So the
head runs forward and backward on a few rows at a time, and the gradient by its hidden states then
goes back through the layers at once. Products are computed in ``dtype``; gradients are added up in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.layers.linear import Linear
from octavo.layers.module import Module
from octavo.layers.tensors import with_tensors
from octavo.models.registry import CausalLM
from octavo.quantization.tensors import WeightTensor
from octavo.quantize.layerwise_model import dense, windows_context

# Rows of logits that are computed at a time.
_ROWS = 256


class Distillation:
    """The loss of students against a teacher, on windows of ``length`` tokens."""

    def __init__(self, model: CausalLM, length: int, dtype: torch.dtype = torch.float32):
        self._teacher: Any = with_tensors(cast(Any, model))
        context = windows_context(1, length)
        self._context = replace(context, ops=replace(context.ops, linear=_linear))
        self._names = {
            id(module.weight.value): f"{name}.weight"
            for name, module in cast(Module, self._teacher).named_modules()
            if isinstance(module, Linear)
        }
        self._dtype = dtype

    @torch.no_grad()
    def divergence(self, weights: Mapping[str, Tensor], window: Tensor) -> float:
        """The KL divergence of a student with ``weights``, float32 [N, K] by name, on a window of
        token ids, int64 [length]."""
        with self._arithmetic():
            student, teacher = self._hidden(weights, window), self._hidden({}, window)
            parts = zip(student.split(_ROWS), teacher.split(_ROWS), strict=True)
            return sum(float(self._sum(*each)) for each in parts) / len(window)

    def add_gradient(self, weights: Mapping[str, Tensor], window: Tensor) -> float:
        """Return the divergence, and add its gradient to that of each weight that requires one."""
        with self._arithmetic():
            with torch.no_grad():
                teacher = self._hidden({}, window)
            student = self._hidden(weights, window)
            at_head = student.detach().requires_grad_()
            total = 0.0
            for rows, exact in zip(at_head.split(_ROWS), teacher.split(_ROWS), strict=True):
                part = self._sum(rows, exact) / len(window)
                total += float(part.detach())
                part.backward()
        student.backward(at_head.grad)
        return total

    def _hidden(self, weights: Mapping[str, Tensor], window: Tensor) -> Tensor:
        """Hidden states after the last norm, [length, hidden]."""
        model = self._teacher.with_parameters(
            lambda parameter: parameter.holding(
                weights.get(self._names.get(id(parameter.value), ""), parameter.value)
            )
        )
        hidden: Tensor = model(window, self._context)
        return hidden

    def _sum(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The sum of the divergence over some positions."""
        with torch.no_grad():
            exact = self._log_probabilities(teacher)
        found = self._log_probabilities(student)
        return F.kl_div(found, exact, reduction="sum", log_target=True)

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._teacher.compute_logits(hidden, self._context)
        return logits.float().log_softmax(dim=-1)

    def _arithmetic(self) -> torch.autocast:
        return torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32)


def _linear(x: Tensor, weight: WeightTensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, dense(weight), bias)
