"""What rounding each matrix of a model costs: an estimate of the KL divergence that it causes.

A linear's rounded weight adds an error d_t to its output at each token t. To second order, a model
that answered p(y) then diverges from itself by

    KL = 1/2 E[(sum_t g_t . d_t)^2]        g_t: the gradient of log p(y) by that output

with y drawn from the model's own answers (the Fisher information; no reference text is needed, nor
its tokens). One forward pass and one backward pass give the g_t of all linears, and an error costs
a product of inputs and weights, so candidates are many and a model is rounded matrix by matrix, not
run again for each. What is left out are products of different outputs of a linear, whose errors are
independent, and of windows, which do not see each other:

    cost = 1/2 sum over windows and outputs n of (sum_t g_tn d_tn)^2, divided by the tokens

Tokens of a window are *not* taken as independent: what a value matrix does wrong is much the same
at many tokens, attention adds it up, and token by token it would seem to cost half of what it does.

The head's errors are in the answers themselves, so their KL divergence is computed as it is.

Source: the Fisher information as a measure of what weights matter is that of Optimal Brain Damage
(LeCun et al. 1989), with KL divergence for the loss as in Amari's natural gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.models.family import EMBEDDING, HEAD
from octavo.models.registry import CausalLM
from octavo.quantize.candidates import Candidate
from octavo.quantize.gptq import gptq
from octavo.quantize.grid import quantize_to_nearest
from octavo.quantize.observers import LayerwiseModel, input_statistics, keep
from octavo.quantize.scheme import Scheme

# A head is asked about one token of so many: it is the largest matrix, and has no depth below it.
_HEAD_STRIDE = 4

# Logits at a time.
_CHUNK_VALUES = 1 << 24

Progress = Callable[[int, int], None]


class Sensitivity(NamedTuple):
    """``costs``: of each matrix, by its parameter, what each candidate costs, in nats a token.

    ``head_importance``: E[x^2] of the head's inputs, float32 [hidden]: what it was rounded by.
    """

    costs: dict[str, list[float]]
    head_importance: Tensor


def measure_sensitivity(
    model: CausalLM,
    token_ids: Tensor,
    candidates: Mapping[str, Sequence[Candidate]],
    *,
    is_tied: bool,
    gptq_scheme: Scheme | None = None,
    progress: Progress = lambda done, total: None,
) -> Sensitivity:
    """What candidates would cost, each alone; costs of different matrices add up.

    The hidden states between all layers are kept: 4 T hidden bytes for each layer, beside what a
    layer's backward pass takes.

    Args:
        token_ids: windows, int64 [W, length].
        candidates: of each matrix, by its parameter: linears of layers, the embedding, the head.
        is_tied: whether the embedding is the head too; its costs are then those of both.
        gptq_scheme: where GPTQ is to find the codes. It leaves another part of each matrix's cost,
            nearly the same with any number of bits: the part is measured in this scheme, and the
            costs of the matrix's other candidates are taken to shrink alike.
        progress: is told of layers.

    Raises ConfigError for answers that are not finite.
    """
    running = LayerwiseModel(model, token_ids)
    hidden = [running.hidden]
    for index in range(running.num_layers):
        running.run_layer(index, keep)
        hidden.append(running.hidden)
    gradient = _gradient_of_answers(running, hidden[-1])
    head = _Head(running, hidden.pop()[::_HEAD_STRIDE])
    costs: dict[str, list[float]] = {}
    if HEAD in candidates:
        costs[HEAD] = head.costs(candidates[HEAD])
    for index in reversed(range(running.num_layers)):
        seen, gradient = _backward(running, index, hidden.pop(), gradient)
        for name in (name for name in seen if name in candidates):
            costs[name] = _costs_of_linear(seen[name], candidates[name], running.length)
            if gptq_scheme is not None:
                part = _part_left_by_gptq(seen[name], gptq_scheme, running.length)
                costs[name] = [cost * part for cost in costs[name]]
        progress(running.num_layers - index, running.num_layers)
    if EMBEDDING in candidates:
        costs[EMBEDDING] = _costs_of_embedding(
            running, token_ids, gradient, candidates[EMBEDDING], head if is_tied else None
        )
    return Sensitivity(costs, head.importance)


def _cost(gradient: Tensor, error: Tensor, length: int) -> float:
    """Of an error of outputs, both [T, N], in windows of ``length`` tokens."""
    of_windows = (gradient * error).view(-1, length, error.shape[1]).sum(dim=1)
    return float(of_windows.square().sum()) / (2 * len(error))


# -- layers ---------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """Of a linear: input [T, K], weight [N, K], and the gradient by its output [T, N]."""

    x: Tensor
    weight: Tensor
    gradient: Tensor


def _gradient_of_answers(running: LayerwiseModel, hidden: Tensor) -> Tensor:
    """Of log p(y) by the hidden states after the last layer [T, hidden], y drawn from p."""
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for part in hidden.split(_tokens_at_once(running)):
        leaf = part.detach().clone().requires_grad_()
        logits = running.answers(leaf)
        if not torch.isfinite(logits).all():
            raise ConfigError(
                "the model's answers are not finite on the calibration text: the model overflows, "
                "or its weights are damaged"
            )
        drawn = torch.multinomial(logits.detach().softmax(dim=-1), 1, generator=generator)[:, 0]
        F.cross_entropy(logits, drawn, reduction="sum").backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return torch.cat(gradients)


def _backward(
    running: LayerwiseModel, index: int, hidden: Tensor, gradient: Tensor
) -> tuple[dict[str, _Seen], Tensor]:
    """What a layer's linears see, and the gradient by what goes into the layer."""
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
        seen[name] = _Seen(*inputs[name], output.grad)
    return seen, leaf.grad


@torch.no_grad()
def _costs_of_linear(seen: _Seen, candidates: Sequence[Candidate], length: int) -> list[float]:
    importance = seen.x.square().mean(dim=0)
    errors = (candidate.values(seen.weight, importance) - seen.weight for candidate in candidates)
    return [_cost(seen.gradient, F.linear(seen.x, error), length) for error in errors]


@torch.no_grad()
def _part_left_by_gptq(seen: _Seen, scheme: Scheme, length: int) -> float:
    """Of the cost of rounding to nearest."""
    statistics = input_statistics(seen.x)
    assert statistics.hessian is not None
    importance = statistics.second_moment
    nearest = quantize_to_nearest(seen.weight, scheme, search=True, importance=importance)
    corrected = gptq(seen.weight, statistics.hessian, scheme)
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
    candidates: Sequence[Candidate],
    head: _Head | None,
) -> list[float]:
    """``gradient``: by what goes into the first layer [T, hidden]. ``head``: that shares it."""
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


class _Head:
    """The head, and hidden states after the last layer that it is asked about [n, hidden]."""

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
    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        return [self.cost(each.values(self._weight, self.importance)) for each in candidates]

    @torch.no_grad()
    def cost(self, weight: Tensor) -> float:
        """The mean KL divergence of the answers with another weight [vocab_size, hidden]."""
        total = 0.0
        for part in self._parts:
            exact = self._running.answers(part).log_softmax(dim=-1)
            found = self._running.answers(part, lambda name, x, _: weight).log_softmax(dim=-1)
            total += float(F.kl_div(found, exact, reduction="sum", log_target=True))
        return max(0.0, total / self._count)


def _tokens_at_once(running: LayerwiseModel) -> int:
    return max(1, _CHUNK_VALUES // len(running.embedding()[0]))
