"""A model run layer by layer on calibration text, and what its linears are handed.

The linears of a layer are called once, one after the other, with the tokens of all windows. A
*visitor* sees its input and its weight, and says which weight the layer goes on with::

    embeddings ─> layer 0 ─> layer 1 ─> ...        hidden states of all tokens, float32 [T, hidden]
                    │
                    └─ linear: weight = visitor(name, input, weight);  output = input weight^T

So statistics of any linear are those of what comes out of the visitor's weights before it, in the
layer too, at the price of a single pass ("true sequential" in the words of GPTQ's authors, who run
a layer again for each of its parts). Beside the model this takes one linear's weight in float32,
and the activations of T tokens in one layer: about 4 T (2 hidden + 3 intermediate sizes) bytes.

Products are not those of ``octavo.kernels.reference``, which go through tiles of 16 rows for the
sake of bitwise invariance: here all rows are one product, and attention knows that all windows are
of one length and begin at position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, cast
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.base.errors import UnsupportedModelError
from octavo.kernels.dispatch import Ops, create_ops
from octavo.kernels.op_arguments import Rotation, RowNorm
from octavo.kernels.reference import rmsnorm, rope
from octavo.layers.linear import Linear
from octavo.layers.module import Module, named_parameters
from octavo.layers.tensors import with_tensors
from octavo.models.family import HEAD
from octavo.models.registry import CausalLM
from octavo.quantization.tensors import WeightTensor

Visitor = Callable[[str, Tensor, Tensor], Tensor]
"""(name of the parameter, input float32 [T, K], weight float32 [N, K]) -> the weight to go on with,
of the same shape. Linears that share an input are handed the same tensor, one after the other."""

Watcher = Callable[[str, Tensor], None]
"""Is told what a linear computes: (name of the parameter, output float32 [T, N])."""


def keep(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """The visitor that changes nothing."""
    return weight


# Tokens of a product of inputs with themselves: they are in the cache when they come to be columns.
_HESSIAN_ROWS = 4096


class InputStatistics(NamedTuple):
    """What is known of a linear's input x.

    ``second_moment``: E[x^2] of each channel, float32 [K]. ``hessian``: 2 E[x x^T], float32 [K, K],
    the second derivative of the squared error of an output by the weights it is computed from; None
    unless it was asked for. ``num_tokens``: of how many tokens these are the means.
    """

    num_tokens: int
    second_moment: Tensor
    hessian: Tensor | None = None


def input_statistics(x: Tensor, *, hessian: bool = True) -> InputStatistics:
    """Statistics of an input, float32 [T, K]."""
    if not hessian:
        return InputStatistics(len(x), x.square().mean(dim=0))
    total = x.new_zeros(x.shape[1], x.shape[1])
    for rows in x.split(_HESSIAN_ROWS):
        total.addmm_(rows.t(), rows)
    total.mul_(2 / len(x))
    return InputStatistics(len(x), total.diagonal() / 2, total)


class LinearObserver:
    """A visitor that changes nothing, and keeps the statistics of every linear by its name.

    Linears of one input share one ``InputStatistics``.
    """

    def __init__(self, *, hessian: bool = False):
        self.statistics: dict[str, InputStatistics] = {}
        self._hessian = hessian
        self._input: Callable[[], Tensor | None] = lambda: None  # does not keep it in memory
        self._latest: InputStatistics

    def __call__(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        self.statistics[name] = self.observe(x)
        return weight

    def observe(self, x: Tensor) -> InputStatistics:
        """The statistics of an input, computed once where it is the one of the call before."""
        if self._input() is not x:
            self._latest = input_statistics(x, hessian=self._hessian)
            self._input = ref(x)
        return self._latest


class LayerwiseModel:
    """A loaded model whose layers are run one at a time, each on all windows.

    ``token_ids``: int64 [W, length]. The model stays as it is.
    """

    def __init__(self, model: CausalLM, token_ids: Tensor):
        self._model: Any = with_tensors(cast(Any, model))
        num_windows, self._length = token_ids.shape
        self._context = windows_context(num_windows, self._length)
        inputs = _record_layers(self._model.model, token_ids, self._context)
        self._cos_sin = [each.cos_sin for each in inputs]
        self.hidden = inputs[0].hidden  # what goes into the next layer
        self._next = 0

    @property
    def num_layers(self) -> int:
        return len(self._cos_sin)

    def layer(self, index: int) -> Module:
        """A layer as it is run, with parameters that are tensors."""
        layer: Module = self._model.model.layers[index]
        return layer

    def set_vectors(self, index: int, vectors: Mapping[str, Tensor]) -> None:
        """Give norms and biases of a layer, by the names of their parameters, other values."""
        layer = self.layer(index)
        places = {f"model.layers.{index}.{name}": place for name, place in named_parameters(layer)}
        values = {id(places[name]): value for name, value in vectors.items()}
        self._model.model.layers[index] = layer.with_parameters(
            lambda parameter: parameter.holding(values.get(id(parameter), parameter.value))
        )

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self._length

    @torch.no_grad()
    def run_layer(self, index: int, visitor: Visitor) -> None:
        """Run the layer that is next, which must be ``index``; ``visitor`` sees its linears."""
        assert index == self._next, (index, self._next)
        self.hidden = self.outputs(index, self.hidden, visitor)
        self._next += 1

    @torch.no_grad()
    def look_at_layer(self, index: int, visitor: Visitor) -> None:
        """The same, but the layer remains the next one, and what comes out of it is forgotten."""
        assert index == self._next, (index, self._next)
        self.outputs(index, self.hidden, visitor)

    def outputs(
        self, index: int, hidden: Tensor, visitor: Visitor, watcher: Watcher | None = None
    ) -> Tensor:
        """What a layer makes of the hidden states of whole windows, float32 [w length, hidden].

        ``visitor`` sees its linears. Where weights that it goes on with require gradients, so do
        the outputs; ``watcher`` can ask for those of each linear. Nothing is changed by it:
        ``run_layer`` is what goes on to the next layer.
        """
        layer: Any = self.layer(index)
        linear = _visited_linear(layer, f"model.layers.{index}", visitor, watcher)
        context = windows_context(len(hidden) // self._length, self._length)
        context = replace(context, ops=replace(context.ops, linear=linear))
        outputs: Tensor = layer(hidden, self._cos_sin[index], context)
        return outputs

    @torch.no_grad()
    def logits(self, window: int) -> Tensor:
        """Logits of one window after the last layer: float32 [length, vocab_size]."""
        return self.answers(self.hidden[window * self._length : (window + 1) * self._length])

    def answers(self, hidden: Tensor, visitor: Visitor = keep) -> Tensor:
        """Logits of any hidden states after the last layer [n, hidden]: float32 [n, vocab_size].

        ``visitor`` sees the head, as ``HEAD`` even where that is the embedding.
        """

        def lm_head(x: Tensor, weight: WeightTensor) -> Tensor:
            return F.linear(x, visitor(HEAD, x, dense(weight)))

        context = replace(self._context, ops=replace(self._context.ops, lm_head=lm_head))
        logits: Tensor = self._model.compute_logits(
            self._model.model.norm(hidden, context), context
        )
        return logits

    def embedding(self) -> tuple[Tensor, float]:
        """The embedding, float32 [vocab_size, hidden], and what its rows are multiplied with."""
        embedding = self._model.model.embed_tokens
        return dense(embedding.weight.value), embedding.scale or 1.0


def observe(
    model: CausalLM, token_ids: Tensor, *, hessian: bool = False
) -> dict[str, InputStatistics]:
    """Statistics of every linear's input on windows, int64 [W, length], by the parameter's name.

    Hessians of all layers together take as much memory as a model of float32 weights, or more.
    """
    observer, running = LinearObserver(hessian=hessian), LayerwiseModel(model, token_ids)
    for index in range(running.num_layers):
        running.run_layer(index, observer)
    return observer.statistics


def linear_names(model: CausalLM) -> list[list[str]]:
    """The parameters that are weights of linears, for each layer in the order of definition."""
    layers = cast(Any, model).model.layers
    return [list(_linears(layer, f"model.layers.{i}")) for i, layer in enumerate(layers)]


def dense(weight: WeightTensor) -> Tensor:
    """A matrix in any format as float32 [N, K]."""
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()


def _linears(layer: Module, prefix: str) -> Iterator[str]:
    for name, module in layer.named_modules(prefix):
        if isinstance(module, Linear):
            yield f"{name}.weight"


class _LayerInput(NamedTuple):
    hidden: Tensor
    cos_sin: Tensor


class _Recorder(Module):
    """Stands for a layer: notes what it is called with, and returns its hidden states unchanged."""

    def __init__(self) -> None:
        self.seen: _LayerInput

    def forward(self, hidden: Tensor, cos_sin: Tensor, ctx: Any) -> Tensor:
        self.seen = _LayerInput(hidden, cos_sin)
        return hidden


@torch.no_grad()
def _record_layers(body: Any, token_ids: Tensor, context: _WindowsContext) -> list[_LayerInput]:
    """What each layer is called with; of hidden states, all are those that go into the first.

    How a model embeds tokens, and which of its ropes a layer is given, is known to its forward
    alone. So that is run, with recorders in place of layers.
    """
    recorders = [_Recorder() for _ in body.layers]
    recorded = body.with_parameters(lambda parameter: parameter)
    recorded.layers = recorders
    recorded(token_ids.reshape(-1), context)
    return [recorder.seen for recorder in recorders]


def _visited_linear(
    layer: Module, prefix: str, visitor: Visitor, watcher: Watcher | None
) -> Callable[[Tensor, WeightTensor, Tensor | None], Tensor]:
    """The op ``linear`` of a layer, which knows linears by the weights that they hand over."""
    names = {
        id(module.weight.value): f"{name}.weight"
        for name, module in layer.named_modules(prefix)
        if isinstance(module, Linear)
    }

    def linear(x: Tensor, weight: WeightTensor, bias: Tensor | None = None) -> Tensor:
        name = names[id(weight)]
        output = F.linear(x, visitor(name, x, dense(weight)), bias)
        if watcher is not None:
            watcher(name, output)
        return output

    return linear


# -- ops of whole windows -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _WindowsContext:
    """A ``ForwardContext``."""

    positions: Tensor
    attention: _WindowsAttention
    ops: Ops

    def states(self, layer: int) -> NoReturn:
        raise UnsupportedModelError(
            "methods that look at activations do not run recurrent layers: choose one without "
            "calibration"
        )

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> Tensor:
        return torch.from_numpy(table(self.attention.length))


def windows_context(num_windows: int, length: int) -> _WindowsContext:
    """What a model needs to run whole windows: ``num_windows`` of ``length`` tokens, one after the
    other. Its ops can be differentiated."""
    ops = replace(
        create_ops("cpu"),
        name="windows",
        silu_mul=_silu_mul,
        gelu_mul=_gelu_mul,
        lm_head=_lm_head,
    )
    positions = torch.arange(length).repeat(num_windows)
    return _WindowsContext(positions, _WindowsAttention(length), ops)


def _lm_head(hidden: Tensor, weight: WeightTensor) -> Tensor:
    return F.linear(hidden, dense(weight))


@dataclass(frozen=True, slots=True)
class _WindowsAttention:
    """The ``StepAttention`` of windows of ``length`` tokens, one after the other: whole ones, of
    which nothing has to be kept."""

    length: int

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        rotated: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        attended = []
        hidden = _hidden_positions(self.length, window)
        parts = [each.split(self.length) for each in (q, k, v)]
        for queries, keys, values in zip(*parts, strict=True):
            group = queries.shape[1] // keys.shape[1]
            keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
            scores = torch.bmm(queries.transpose(0, 1), keys.permute(1, 2, 0)) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.masked_fill_(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(queries), 1)], -1)
            weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
            attended.append(torch.bmm(weights, values.transpose(0, 1)).transpose(0, 1))
        return torch.cat(attended)

    def attend_latents(
        self,
        layer: int,
        q: Tensor,
        ckv: Tensor,
        norm: RowNorm,
        rotation: Rotation,
        kv_b: WeightTensor,
        *,
        scale: float,
    ) -> Tensor:
        """With the keys and values of all heads: latents gain nothing where nothing is kept."""
        rank, rope_dim = norm.weight.shape[0], rotation.cos_sin.shape[1]
        nope_dim = q.shape[2] - rope_dim
        made = F.linear(rmsnorm(ckv[:, :rank], *norm), dense(kv_b)).unflatten(1, (q.shape[1], -1))
        turned, key = rope(q[..., nope_dim:], ckv[:, None, rank:], *rotation)
        queries = torch.cat([q[..., :nope_dim], turned], dim=-1)
        keys = torch.cat([made[..., :nope_dim], key.expand(-1, q.shape[1], -1)], dim=-1)
        return self.attend(layer, queries, keys, made[..., nope_dim:], scale=scale)


def _hidden_positions(length: int, window: int | None) -> Tensor:
    """Which keys a query does not see: bool [queries, keys]."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def _gelu_mul(gate: Tensor, up: Tensor, approximate: bool = True) -> Tensor:
    return F.gelu(gate, approximate="tanh" if approximate else "none").mul_(up)
