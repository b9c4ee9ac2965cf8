"""Adapters on PyTorch ops: products of whole rows that are added to those of the model.

The slow twin of ``native_lora.py``: of each adapter of a step, the rows are taken out, multiplied
with A and with B, and added. On the CPU in float32 these products are batch invariant
(``reference.py``), so that a row does not depend on others; rows without an adapter are not
touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from octavo.core.batch import Batch
from octavo.kernels.dispatch import Ops
from octavo.layers.module import Module, named_parameters
from octavo.lora.targets import LowRank
from octavo.models.config import EMBEDDING, HEAD
from octavo.runtime.lora_pool import PooledLora
from octavo.runtime.op_program import record


@dataclass(frozen=True, slots=True)
class _Change:
    a: Tensor  # float32 [r, K]; of the embedding [tokens, r]
    b: Tensor  # float32 [N, r]
    scale: float


class EagerLora:
    """One adapter as tensors, by the names of parameters."""

    def __init__(self, changes: Mapping[str, _Change]):
        self.changes = changes
        self.num_bytes = sum(each.a.nbytes + each.b.nbytes for each in changes.values())


class EagerLoras:
    """Packs adapters for a model of tensors, and makes the ops of steps that have some.

    ``shapes``: (outputs, inputs) of what adapters may change, by name.
    """

    def __init__(self, model: Module, ops: Ops, device: torch.device):
        self._ops, self._device = ops, device
        self._names: dict[int, str] = {}
        parameters = dict(named_parameters(model))
        for name, parameter in parameters.items():
            self._names.setdefault(id(parameter.value), name)
        self.shapes: dict[str, tuple[int, int]] = {}
        for call in record(model).calls:  # type: ignore[arg-type]  # a CausalLM
            if call.name in ("linear", "embed", "lm_head"):
                rows, columns = call.arguments["weight"].shape
                name = self._name(call.name, call.arguments["weight"])
                self.shapes[name] = (columns, rows) if name == EMBEDDING else (rows, columns)

    def pack(self, changes: Mapping[str, LowRank]) -> EagerLora:
        return EagerLora(
            {
                name: _Change(
                    self._tensor(change.a.T if name == EMBEDDING else change.a),
                    self._tensor(change.b),
                    change.scale,
                )
                for name, change in changes.items()
            }
        )

    def rows_of(self, batch: Batch) -> list[EagerLora | None]:
        """Return the adapter of each row of a step; nothing if no row has one."""
        adapters = [item.request.adapter for item in batch.items]
        if not any(adapters):
            return []
        loras = [each.needed() if isinstance(each, PooledLora) else None for each in adapters]
        counts = [item.num_tokens for item in batch.items]
        return list(chain.from_iterable(map(repeat, loras, counts)))

    def ops(self, loras: Sequence[EagerLora | None]) -> Ops:
        """Return the ops for rows that have these adapters."""
        if not any(loras):
            return self._ops
        found = {id(lora): lora for lora in loras if lora is not None}
        rows = {
            key: torch.tensor(
                [row for row, lora in enumerate(loras) if id(lora) == key], device=self._device
            )
            for key in found
        }
        placed = [(lora, rows[key]) for key, lora in found.items()]

        def change(kind: str, y: Tensor, x: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
            name = self._name(kind, weight)
            for lora, at in placed:
                if (its := lora.changes.get(name)) is not None:
                    added = self._product(kind, x[at], its) * (its.scale * scale)
                    y[at] = y[at] + added.to(y.dtype)
            return y

        def embed(ids: Tensor, weight: Any, scale: float | None = None) -> Tensor:
            y = self._ops.embed(ids, weight, scale)
            return change("embed", y, ids, weight, 1.0 if scale is None else scale)

        def linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
            return change("linear", self._ops.linear(x, weight, bias), x, weight)

        def lm_head(hidden: Tensor, weight: Any) -> Tensor:
            return change("lm_head", self._ops.lm_head(hidden, weight), hidden, weight)

        return replace(self._ops, embed=embed, linear=linear, lm_head=lm_head)

    def _product(self, kind: str, x: Tensor, change: _Change) -> Tensor:
        """Return B A x of some rows, float32 [R, N]."""
        linear = self._ops.linear
        sums = change.a[x] if kind == "embed" else linear(x.float(), change.a)
        product: Tensor = linear(sums, change.b)
        return product

    def _name(self, kind: str, weight: Any) -> str:
        """Return what adapters call a weight: a tied head and its embedding are told apart."""
        fixed = {"embed": EMBEDDING, "lm_head": HEAD}.get(kind)
        return fixed or self._names.get(id(weight), "")

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(values.copy()).to(self._device)
