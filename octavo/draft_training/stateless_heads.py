"""Draft heads without attention in training, ReDrafter and Medusa, with the names of their files.

Such a head reads what the target's output head reads at position p: x_p, the hidden state after the
final norm. The token p + 1 is sampled from it; the draft head predicts those after it, over a
shortlist of S tokens, with the target's own rows of its output head, which are not trained.

**recurrent**, the ReDrafter head (Zhang et al. 2024, arXiv 2403.09919; Hydra, Ankner et al. 2024,
arXiv 2402.05109, is similar), is a recurrence of gated layers over the last hidden state and the
embedding e of each next token::

    s_0 = x_p
    s_i+1 = s_i, and for each layer  s += down(silu(gate x) * up x),  x = norm(s); in the first
            layer also norm(e of token p + 1 + i) behind it
    token p + 2 + i = shortlist[argmax of rows @ s_i+1]

**medusa** (Cai et al. 2024, arXiv 2401.10774) has a head for each position ahead, which reads x_p
and no token::

    token p + 2 + i = shortlist[argmax of rows @ (x_p + silu(W_i x_p + b_i))]

Both are initialized to the identity: untrained, they predict what the target predicts for p + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.draft_training.examples import PositionBatch

Inputs = TypeVar("Inputs", contravariant=True)


class TrainableHead(Protocol[Inputs]):
    """A head in training, of any kind."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...

    def states(self, inputs: Inputs) -> Iterator[Tensor]:
        """Yield the hidden states of each of K positions ahead, float32 [B, d], for the B positions
        of a batch. Their products with the rows of the shortlist are the logits."""
        ...


class TrainableReDrafterHead(nn.Module):
    """A ReDrafter head of ``num_layers`` gated layers."""

    def __init__(self, size: int, intermediate_size: int, num_layers: int, eps: float, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed_norm = TrainableNorm(size, eps)
        self.layers = nn.ModuleList(
            _GatedLayer(size, 0 if index else size, intermediate_size, eps, generator)
            for index in range(num_layers)
        )

    def states(self, inputs: PositionBatch) -> Iterator[Tensor]:
        first, *others = self.layers
        state = inputs.hidden
        for embedding in self.embed_norm(inputs.embeddings).unbind(1):
            state = first(state, embedding)
            for layer in others:
                state = layer(state)
            yield state


class TrainableMedusaHeads(nn.Module):
    """Medusa heads of one residual layer each."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.blocks = nn.ModuleList(_ResidualBlock(size) for _ in range(num_heads))

    def states(self, inputs: PositionBatch) -> Iterator[Tensor]:
        for block, _ in zip(self.blocks, inputs.embeddings.unbind(1), strict=False):
            yield block(inputs.hidden)


class TrainableNorm(nn.Module):
    """An RMS norm whose weight is initialized to 1."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class _GatedLayer(nn.Module):
    """A gated residual layer. ``more``: the width of a vector that is concatenated to the state, 0
    for none."""

    def __init__(self, size: int, more: int, inner: int, eps: float, generator: torch.Generator):
        super().__init__()
        self.input_norm = TrainableNorm(size, eps)
        self.gate_proj = linear(size + more, inner, generator)
        self.up_proj = linear(size + more, inner, generator)
        self.down_proj = linear(inner, size, None)

    def forward(self, state: Tensor, more: Tensor | None = None) -> Tensor:
        x: Tensor = self.input_norm(state)
        if more is not None:
            x = torch.cat([x, more], dim=-1)
        added: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return state + added


class _ResidualBlock(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


def linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    """Create a linear without bias; its weights are drawn from ``generator``, or 0 without one."""
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        if generator is None:
            layer.weight.zero_()
        else:
            layer.weight.normal_(0, 1 / math.sqrt(inputs), generator=generator)
    return layer
