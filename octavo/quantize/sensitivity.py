"""Estimates the KL divergence that rounding each matrix of a model causes.

A linear's rounded weight adds an error d_t to its output at each token t. To second order, the KL
divergence from the original model, with next-token distribution p(y), is then

    KL = 1/2 E[(sum_t g_t . d_t)^2]        g_t: the gradient of log p(y) by that output

with y drawn from p, the model's own predictions (Fisher information; no labels are needed). One
forward and one backward pass give the g_t of all linears, and the error of a candidate takes one
product of inputs and weights: so many candidates can be compared without running the model for
each. Products of different outputs of a linear, whose errors are taken as independent, and of
different windows are left out:

    cost = 1/2 sum over windows and outputs n of (sum_t g_tn d_tn)^2, divided by the tokens

Tokens of a window are *not* taken as independent: the error of a value matrix is similar at many
tokens, and attention adds it up; token by token its estimated cost would be half of the true one.

The head's errors are in the logits themselves, so their KL divergence is computed exactly.

Source: Fisher information as a measure of which weights matter is that of Optimal Brain Damage
(LeCun et al. 1989), with KL divergence for the loss as in Amari's natural gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.models.config import EMBEDDING, HEAD
from octavo.models.registry import CausalLM
from octavo.quantize.gptq import quantize_gptq
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.layerwise_model import LayerwiseModel, input_statistics, keep
from octavo.quantize.mix_candidates import MixCandidate
from octavo.quantize.scheme import Scheme

# The head is evaluated on every fourth token: it is the largest matrix.
_HEAD_STRIDE = 4

# Logits that are computed at a time.
_CHUNK_VALUES = 1 << 24

Progress = Callable[[int, int], None]


class Sensitivity(NamedTuple):
    """The costs of candidates.

    ``costs``: by parameter, the cost of each of its candidates, in nats a token.
    ``head_importance``: E[x^2] of the head's inputs by which it was rounded, float32 [hidden].
    """

    costs: dict[str, list[float]]
    head_importance: Tensor


def measure_sensitivity(
    model: CausalLM,
    token_ids: Tensor,
    candidates: Mapping[str, Sequence[MixCandidate]],
    *,
    is_tied: bool,
    gptq_scheme: Scheme | None = None,
    progress: Progress = lambda done, total: None,
) -> Sensitivity:
    """Measure the cost of each candidate alone; costs of different matrices add up.

    The hidden states between all layers are kept, 4 T hidden bytes for each layer, beside the
    memory of one layer's backward pass.

    Args:
        token_ids: windows, int64 [W, length].
        candidates: the candidates by parameter: linears of layers, the embedding, the head.
        is_tied: whether the embedding is also the head; its costs are then those of both.
        gptq_scheme: a scheme to measure by how much GPTQ lowers the cost of each matrix, if GPTQ
            will find the codes. The ratio is nearly the same for any number of bits, so all costs
            of the matrix are multiplied by it.
        progress: called after each layer.

    Raises:
        ConfigError: the model's logits are not finite.
    """
    running = LayerwiseModel(model, token_ids)
    hidden = [running.hidden]
    for index in range(running.num_layers):
        running.run_layer(index, keep)
        hidden.append(running.hidden)
    gradient = _gradient_of_answers(running, hidden[-1])
    head = _HeadSensitivity(running, hidden.pop()[::_HEAD_STRIDE])
    costs: dict[str, list[float]] = {}
    if HEAD in candidates:
        costs[HEAD] = head.costs(candidates[HEAD])
    for index in reversed(range(running.num_layers)):
        seen, gradient = _backward(running, index, hidden.pop(), gradient)
        for name in (name for name in seen if name in candidates):
            costs[name] = _costs_of_linear(seen[name], candidates[name], running.length)
            if gptq_scheme is not None:
                part = _gptq_cost_ratio(seen[name], gptq_scheme, running.length)
                costs[name] = [cost * part for cost in costs[name]]
        progress(running.num_layers - index, running.num_layers)
    if EMBEDDING in candidates:
        costs[EMBEDDING] = _costs_of_embedding(
            running, token_ids, gradient, candidates[EMBEDDING], head if is_tied else None
        )
    return Sensitivity(costs, head.importance)


def _cost(gradient: Tensor, error: Tensor, length: int) -> float:
    """The cost of an output error, by its gradient, both [T, N], in windows of ``length``."""
    of_windows = (gradient * error).view(-1, length, error.shape[1]).sum(dim=1)
    return float(of_windows.square().sum()) / (2 * len(error))


# -- layers ---------------------------------------------------------------------------------------


class _LinearGradient(NamedTuple):
    """A linear's input [T, K], weight [N, K], and gradient by its output [T, N]."""

    x: Tensor
    weight: Tensor
    gradient: Tensor


def _gradient_of_answers(running: LayerwiseModel, hidden: Tensor) -> Tensor:
    """The gradient of log p(y) by the hidden states after the last layer [T, hidden], with y drawn
    from p."""
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for part in hidden.split(_tokens_at_once(running)):
        leaf = part.detach().clone().requires_grad_()
        logits = running.answers(leaf)
        if not torch.isfinite(logits).all():
            raise ConfigError(
                "the model's logits are not finite on the calibration text: the model overflows, "
                "or its weights are damaged"
            )
        drawn = torch.multinomial(logits.detach().softmax(dim=-1), 1, generator=generator)[:, 0]
        F.cross_entropy(logits, drawn, reduction="sum").backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return torch.cat(gradients)


def _backward(
    running: LayerwiseModel, index: int, hidden: Tensor, gradient: Tensor
) -> tuple[dict[str, _LinearGradient], Tensor]:
    """Run a layer backward: the gradients of its linears, and that of the layer's input."""
    inputs: dict[str, tuple[Tensor, Tensor]] = {}
    outputs: dict[str, Tensor] = {}

    def look(name: str, x: Tensor, weight: Tensor) -> Tensor:
        inputs[name] = x.detach(), weight
        return weight

    def watch(name: str, output: Tensor) -> None:
        output.retain_grad()
        outputs[name] = output

    leaf = hidden.detach().clone().requires_grad_()
    running.outputs(index, leaf, look, watch).backward(gradient)
    assert leaf.grad is not None
    seen = {}
    for name, output in outputs.items():
        assert output.grad is not None
        seen[name] = _LinearGradient(*inputs[name], output.grad)
    return seen, leaf.grad


@torch.no_grad()
def _costs_of_linear(
    seen: _LinearGradient, candidates: Sequence[MixCandidate], length: int
) -> list[float]:
    importance = seen.x.square().mean(dim=0)
    errors = (candidate.values(seen.weight, importance) - seen.weight for candidate in candidates)
    return [_cost(seen.gradient, F.linear(seen.x, error), length) for error in errors]


@torch.no_grad()
def _gptq_cost_ratio(seen: _LinearGradient, scheme: Scheme, length: int) -> float:
    """The cost of GPTQ's codes, relative to that of rounding to nearest."""
    statistics = input_statistics(seen.x)
    assert statistics.hessian is not None
    importance = statistics.second_moment
    nearest = quantize_to_nearest(seen.weight, scheme, search=True, importance=importance)
    corrected = quantize_gptq(seen.weight, statistics.hessian, scheme)
    costs = [
        _cost(seen.gradient, F.linear(seen.x, matrix.dequantize() - seen.weight), length)
        for matrix in (corrected, nearest)
    ]
    return costs[0] / costs[1] if costs[1] else 1.0


# -- embedding and head ---------------------------------------------------------------------------


@torch.no_grad()
def _costs_of_embedding(
    running: LayerwiseModel,
    token_ids: Tensor,
    gradient: Tensor,
    candidates: Sequence[MixCandidate],
    head: _HeadSensitivity | None,
) -> list[float]:
    """Costs of an embedding's candidates.

    ``gradient``: by the input of the first layer [T, hidden]. ``head``: the head, if it is tied.
    """
    weight, scale = running.embedding()
    used, places = token_ids.reshape(-1).unique(return_inverse=True)
    costs = []
    for candidate in candidates:
        if head is None:
            values = candidate.values(weight[used], None)
            cost = 0.0
        else:
            rounded = candidate.values(weight, head.importance)
            values, cost = rounded[used], head.cost(rounded)
        error = (values - weight[used])[places] * scale
        costs.append(cost + _cost(gradient, error, running.length))
    return costs


class _HeadSensitivity:
    """Costs of an output head, on some hidden states after the last layer [n, hidden]."""

    def __init__(self, running: LayerwiseModel, hidden: Tensor):
        self._running, self._parts = running, hidden.split(_tokens_at_once(running))
        self._count, total = len(hidden), torch.zeros(hidden.shape[1])

        def look(name: str, x: Tensor, weight: Tensor) -> Tensor:
            total.add_(x.square().sum(dim=0))
            self._weight = weight
            return weight

        with torch.no_grad():
            for part in self._parts:
                running.answers(part, look)
        self.importance = total / self._count

    @torch.no_grad()
    def costs(self, candidates: Sequence[MixCandidate]) -> list[float]:
        return [self.cost(each.values(self._weight, self.importance)) for each in candidates]

    @torch.no_grad()
    def cost(self, weight: Tensor) -> float:
        """Mean KL divergence with another weight [vocab_size, hidden]."""
        total = 0.0
        for part in self._parts:
            exact = self._running.answers(part).log_softmax(dim=-1)
            found = self._running.answers(part, lambda name, x, _: weight).log_softmax(dim=-1)
            total += float(F.kl_div(found, exact, reduction="sum", log_target=True))
        return max(0.0, total / self._count)


def _tokens_at_once(running: LayerwiseModel) -> int:
    return max(1, _CHUNK_VALUES // len(running.embedding()[0]))
