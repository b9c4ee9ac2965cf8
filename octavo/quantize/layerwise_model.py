"""Runs a model layer by layer on calibration text, with visitors of its linears.

The linears of a layer are called once, one after the other, with the tokens of all windows. A
*visitor* gets the input and the weight of each, and returns the weight that is used::

    embeddings ─> layer 0 ─> layer 1 ─> ...        hidden states of all tokens, float32 [T, hidden]
                    │
                    └─ linear: weight = visitor(name, input, weight);  output = input weight^T

So the input of any linear comes from the visitor's weights in all linears before it, those of its
own layer too, in a single pass. (GPTQ's authors call that "true sequential", and run a layer again
for each of its parts.) Beside the model it takes one linear's weight in float32, and the
activations of T tokens in one layer: about 4 T (2 hidden + 3 intermediate sizes) bytes.

Products are not those of ``octavo.kernels.reference``, which computes tiles of 16 rows for bitwise
invariance: here all rows are one product, and all windows have one length and begin at position 0.
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
from octavo.kernels.op_arguments import RopeArguments, RowNorm
from octavo.kernels.reference import rmsnorm, rope
from octavo.layers.linear import Linear
from octavo.layers.module import Module, named_parameters
from octavo.layers.tensors import with_tensors
from octavo.models.config import HEAD
from octavo.models.registry import CausalLM
from octavo.quantization.tensors import WeightTensor

LinearVisitor = Callable[[str, Tensor, Tensor], Tensor]
"""(name of the parameter, input float32 [T, K], weight float32 [N, K]) -> the weight to use, of the
same shape. Linears that share an input get the same tensor, one after the other."""

OutputWatcher = Callable[[str, Tensor], None]
"""Called with the output of a linear: (name of the parameter, output float32 [T, N])."""


def keep(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """A visitor that returns the weight unchanged."""
    return weight


# Tokens of a product of inputs with themselves, few enough to stay in the cache.
_HESSIAN_ROWS = 4096


class InputStatistics(NamedTuple):
    """Statistics of a linear's input x.

    ``second_moment``: E[x^2] of each channel, float32 [K]. ``hessian``: 2 E[x x^T], float32 [K, K],
    the second derivative of an output's squared error by its weights; None unless asked for.
    ``num_tokens``: the number of tokens that the means are over.
    """

    num_tokens: int
    second_moment: Tensor
    hessian: Tensor | None = None


def input_statistics(x: Tensor, *, hessian: bool = True) -> InputStatistics:
    """Compute the statistics of an input, float32 [T, K]."""
    if not hessian:
        return InputStatistics(len(x), x.square().mean(dim=0))
    total = x.new_zeros(x.shape[1], x.shape[1])
    for rows in x.split(_HESSIAN_ROWS):
        total.addmm_(rows.t(), rows)
    total.mul_(2 / len(x))
    return InputStatistics(len(x), total.diagonal() / 2, total)


class LinearObserver:
    """A visitor that keeps the input statistics of every linear by its name.

    Linears that share an input share one ``InputStatistics``. Weights are left unchanged.
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
        """Compute the statistics of an input, unless it is the one of the call before."""
        if self._input() is not x:
            self._latest = input_statistics(x, hessian=self._hessian)
            self._input = ref(x)
        return self._latest


class LayerwiseModel:
    """A loaded model whose layers are run one at a time, each on all windows.

    ``token_ids``: int64 [W, length]. The model itself is not changed.
    """

    def __init__(self, model: CausalLM, token_ids: Tensor):
        self._model: Any = with_tensors(cast(Any, model))
        num_windows, self._length = token_ids.shape
        self._context = windows_context(num_windows, self._length)
        inputs = _record_layers(self._model.model, token_ids, self._context)
        self._cos_sin = [each.cos_sin for each in inputs]
        self.hidden = inputs[0].hidden  # the input of the next layer
        self._next = 0

    @property
    def num_layers(self) -> int:
        return len(self._cos_sin)

    def layer(self, index: int) -> Module:
        """Return a layer, with tensors for parameters."""
        layer: Module = self._model.model.layers[index]
        return layer

    def set_vectors(self, index: int, vectors: Mapping[str, Tensor]) -> None:
        """Replace norms and biases of a layer, by the names of their parameters."""
        layer = self.layer(index)
        places = {f"model.layers.{index}.{name}": place for name, place in named_parameters(layer)}
        values = {id(places[name]): value for name, value in vectors.items()}
        self._model.model.layers[index] = layer.with_parameters(
            lambda parameter: parameter.holding(values.get(id(parameter), parameter.value))
        )

    @property
    def length(self) -> int:
        """Number of tokens of a window."""
        return self._length

    @torch.no_grad()
    def run_layer(self, index: int, visitor: LinearVisitor) -> None:
        """Run the next layer, which must be ``index``; ``visitor`` is called for its linears."""
        assert index == self._next, (index, self._next)
        self.hidden = self.outputs(index, self.hidden, visitor)
        self._next += 1

    @torch.no_grad()
    def probe_layer(self, index: int, visitor: LinearVisitor) -> None:
        """Run the next layer for the visitor alone: outputs are dropped, and it stays the next."""
        assert index == self._next, (index, self._next)
        self.outputs(index, self.hidden, visitor)

    def outputs(
        self,
        index: int,
        hidden: Tensor,
        visitor: LinearVisitor,
        watcher: OutputWatcher | None = None,
    ) -> Tensor:
        """Compute the outputs of a layer for hidden states of whole windows, float32
        [w length, hidden], without going on to the next layer.

        ``visitor`` is called for each linear, and ``watcher`` with its output. If the visitor's
        weights require gradients, outputs do.
        """
        layer: Any = self.layer(index)
        linear = _visited_linear(layer, f"model.layers.{index}", visitor, watcher)
        context = windows_context(len(hidden) // self._length, self._length)
        context = replace(context, ops=replace(context.ops, linear=linear))
        outputs: Tensor = layer(hidden, self._cos_sin[index], context)
        return outputs

    @torch.no_grad()
    def logits(self, window: int) -> Tensor:
        """Compute the logits of one window after the last layer: float32 [length, vocab_size]."""
        return self.answers(self.hidden[window * self._length : (window + 1) * self._length])

    def answers(self, hidden: Tensor, visitor: LinearVisitor = keep) -> Tensor:
        """Compute the logits of hidden states after the last layer [n, hidden]: float32
        [n, vocab_size].

        ``visitor`` is called for the head, by the name ``HEAD`` even if that is the embedding.
        """

        def lm_head(x: Tensor, weight: WeightTensor) -> Tensor:
            return F.linear(x, visitor(HEAD, x, dense(weight)))

        context = replace(self._context, ops=replace(self._context.ops, lm_head=lm_head))
        logits: Tensor = self._model.compute_logits(
            self._model.model.norm(hidden, context), context
        )
        return logits

    def embedding(self) -> tuple[Tensor, float]:
        """Return the embedding, float32 [vocab_size, hidden], and the scale of its rows."""
        embedding = self._model.model.embed_tokens
        return dense(embedding.weight.value), embedding.scale or 1.0


def observe(
    model: CausalLM, token_ids: Tensor, *, hessian: bool = False
) -> dict[str, InputStatistics]:
    """Compute the input statistics of every linear on windows, int64 [W, length], by parameter.

    Hessians of all layers together take as much memory as a float32 model, or more.
    """
    observer, running = LinearObserver(hessian=hessian), LayerwiseModel(model, token_ids)
    for index in range(running.num_layers):
        running.run_layer(index, observer)
    return observer.statistics


def linear_names(model: CausalLM) -> list[list[str]]:
    """The names of linears' weights for each layer, in the order of definition."""
    layers = cast(Any, model).model.layers
    return [list(_linears(layer, f"model.layers.{i}")) for i, layer in enumerate(layers)]


def dense(weight: WeightTensor) -> Tensor:
    """Dequantize a matrix of any format to float32 [N, K]."""
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()


def _linears(layer: Module, prefix: str) -> Iterator[str]:
    for name, module in layer.named_modules(prefix):
        if isinstance(module, Linear):
            yield f"{name}.weight"


class _LayerInput(NamedTuple):
    hidden: Tensor
    cos_sin: Tensor


class _Recorder(Module):
    """A stand-in for a layer, which records its inputs and returns hidden states unchanged."""

    def __init__(self) -> None:
        self.seen: _LayerInput

    def forward(self, hidden: Tensor, cos_sin: Tensor, ctx: Any) -> Tensor:
        self.seen = _LayerInput(hidden, cos_sin)
        return hidden


@torch.no_grad()
def _record_layers(body: Any, token_ids: Tensor, context: _WindowsContext) -> list[_LayerInput]:
    """Record the inputs of each layer; the hidden states are those of the first for all.

    Only the model's forward knows how tokens are embedded and which rope a layer gets, so it is run
    with recorders in place of its layers.
    """
    recorders = [_Recorder() for _ in body.layers]
    recorded = body.with_parameters(lambda parameter: parameter)
    recorded.layers = recorders
    recorded(token_ids.reshape(-1), context)
    return [recorder.seen for recorder in recorders]


def _visited_linear(
    layer: Module, prefix: str, visitor: LinearVisitor, watcher: OutputWatcher | None
) -> Callable[[Tensor, WeightTensor, Tensor | None], Tensor]:
    """The op ``linear`` of a layer, which names linears by the identity of their weights."""
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

    @property
    def token_types(self) -> Tensor:
        return torch.zeros_like(self.positions)

    def states(self, layer: int) -> NoReturn:
        raise UnsupportedModelError(
            "methods that use calibration text do not run recurrent layers: choose a method "
            "without calibration"
        )

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> Tensor:
        return torch.from_numpy(table(self.attention.length))


def windows_context(num_windows: int, length: int) -> _WindowsContext:
    """The ``ForwardContext`` of ``num_windows`` windows of ``length`` tokens, concatenated. Its ops
    are differentiable."""
    ops = replace(
        create_ops(),
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
    """The ``StepAttention`` of concatenated windows of ``length`` tokens, without a KV cache."""

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
        bidirectional: bool = False,
    ) -> Tensor:
        attended = []
        hidden = _hidden_positions(self.length, window, bidirectional)
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
        rotation: RopeArguments,
        kv_b: WeightTensor,
        *,
        scale: float,
    ) -> Tensor:
        """Compute latent attention with the keys and values of all heads: without a KV cache
        latents save nothing."""
        rank, rope_dim = norm.weight.shape[0], rotation.cos_sin.shape[1]
        nope_dim = q.shape[2] - rope_dim
        made = F.linear(rmsnorm(ckv[:, :rank], *norm), dense(kv_b)).unflatten(1, (q.shape[1], -1))
        rotated, key = rope(q[..., nope_dim:], ckv[:, None, rank:], *rotation)
        queries = torch.cat([q[..., :nope_dim], rotated], dim=-1)
        keys = torch.cat([made[..., :nope_dim], key.expand(-1, q.shape[1], -1)], dim=-1)
        return self.attend(layer, queries, keys, made[..., nope_dim:], scale=scale)


def _hidden_positions(length: int, window: int | None, bidirectional: bool = False) -> Tensor:
    """The mask of a window: True for keys that a query does not attend to, bool [queries, keys]."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if bidirectional:
        distance = distance.abs()
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def _gelu_mul(gate: Tensor, up: Tensor, approximate: bool = True) -> Tensor:
    return F.gelu(gate, approximate="tanh" if approximate else "none").mul_(up)
