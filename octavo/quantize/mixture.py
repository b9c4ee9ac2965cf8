"""A mix: each matrix of a model in a format of its own, the least harm that a size allows.

    mixing = Mixing.of_gguf(parameters, target_bpw)      or of_folder: what there is to choose from
    sensitivity = mixing.measure(model, windows, ...)    what each of that would cost
    mixture = mixing.choose(sensitivity.costs)           what each matrix becomes

Matrices that a server puts together (q, k and v; gate and up) have one scheme in a folder, since
they are one matrix there, as in vLLM. In a GGUF file each has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, prod
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.models import footprint
from octavo.models.family import EMBEDDING, HEAD
from octavo.models.parameters import Parameters
from octavo.models.registry import CausalLM
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_mixes import LATENT_TYPE
from octavo.quantize.allocation import Option, allocate
from octavo.quantize.candidates import (
    Candidate,
    SchemeCandidate,
    TypeCandidate,
    gguf_candidates,
)
from octavo.quantize.scheme import Scheme
from octavo.quantize.sensitivity import Progress, Sensitivity, measure_sensitivity
from octavo.quantize.writers.base import MixedWriter

# Windows of the text that are looked at, spread over all of it. The order of matrices is known with
# few: the estimate of one by four windows is within a fifth of what is measured.
_WINDOWS = 8

# Modules of a layer that are one in servers.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """What each matrix becomes, by its parameter; ``divergence``: the KL that is expected of it."""

    chosen: Mapping[str, Candidate]
    divergence: float

    def schemes(self) -> dict[str, Scheme]:
        """Of a folder: the schemes of those that have one."""
        found = {}
        for name, candidate in self.chosen.items():
            assert isinstance(candidate, SchemeCandidate)
            if candidate.scheme is not None:
                found[name] = candidate.scheme
        return found

    def type(self, parameter: str) -> GGMLType:
        """Of a matrix of a GGUF file."""
        candidate = self.chosen[parameter]
        assert isinstance(candidate, TypeCandidate)
        return candidate.type

    def by_kind(self) -> dict[str, dict[str, int]]:
        """How many matrices of a kind ("q_proj") become what, the kinds in the model's order."""
        kinds: dict[str, Counter[str]] = {}
        for name, candidate in self.chosen.items():
            kinds.setdefault(_kind(name), Counter())[candidate.name] += 1
        return {kind: dict(counts) for kind, counts in kinds.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "expected_kl": self.divergence,
            "kinds": self.by_kind(),
            "matrices": {name: candidate.name for name, candidate in self.chosen.items()},
        }


@dataclass(frozen=True, slots=True)
class Mixing:
    """What there is to choose from, and how large it may be.

    Args:
        shapes: of the matrices that are chosen for, by parameter, in the model's order.
        candidates: what each of them may become.
        items: those that must become the same.
        budget: bits of all of them together.
    """

    shapes: Mapping[str, tuple[int, int]]
    candidates: Mapping[str, Sequence[Candidate]]
    items: Sequence[Sequence[str]]
    budget: int

    @classmethod
    def of_gguf(cls, parameters: Parameters, target_bpw: float) -> Mixing:
        """All matrices, each by itself, but those of latents, which have one type in every mix.

        ConfigError if no mix is as small, or needs as much.
        """
        shapes = _matrices(parameters)
        latents = [each.name for each in footprint.shapes(parameters.config) if each.is_latent]
        of_latents = sum(TypeCandidate(LATENT_TYPE).num_bits(shapes.pop(name)) for name in latents)
        candidates = {name: gguf_candidates(shape[1]) for name, shape in shapes.items()}
        vectors = _num_weights(parameters) - sum(map(prod, _matrices(parameters).values()))
        rest = 32 * (vectors + sum(each.size for each in parameters.divisors.values())) + of_latents
        return cls._within(
            parameters, target_bpw, rest, shapes, candidates, [[name] for name in shapes]
        )

    @classmethod
    def of_folder(
        cls,
        parameters: Parameters,
        target_bpw: float,
        schemes: Sequence[Scheme | None],
        writer: MixedWriter,
    ) -> Mixing:
        """The linears of layers, those together that servers fuse; all else has 16 bits.

        ConfigError if no mix is as small, or needs as much, or a matrix has no room in the format.
        """
        shapes = _matrices(parameters)
        shapes = {n: shape for n, shape in shapes.items() if n not in (EMBEDDING, HEAD)}
        for name, shape in shapes.items():
            for scheme in filter(None, schemes):
                _check(name, shape, scheme, writer)
        ways = [SchemeCandidate(scheme, writer) for scheme in schemes]
        items: dict[str, list[str]] = {}
        for name in shapes:
            items.setdefault(_item(name), []).append(name)
        rest = 16 * (_num_weights(parameters) - sum(map(prod, shapes.values())))
        candidates = dict.fromkeys(shapes, ways)
        return cls._within(parameters, target_bpw, rest, shapes, candidates, [*items.values()])

    @classmethod
    def _within(
        cls,
        parameters: Parameters,
        target_bpw: float,
        rest: int,
        shapes: Mapping[str, tuple[int, int]],
        candidates: Mapping[str, Sequence[Candidate]],
        items: Sequence[Sequence[str]],
    ) -> Mixing:
        """``rest``: bits of all that is not chosen for."""
        # Of what is quantized: where a rotation parts head and embedding, that is no weight more.
        num_weights = _num_weights(Parameters(parameters.checkpoint.origin))
        sizes = [[each.num_bits(shapes[n]) for each in candidates[n]] for n in shapes]
        low, high = ((rest + sum(map(extreme, sizes))) / num_weights for extreme in (min, max))
        if not low <= target_bpw <= max(high, 16.0):
            raise ConfigError(
                f"no mix has {target_bpw:g} bits per weight: of this model, those of this format "
                f"have {_up(low):.2f} to {max(high, 16.0):.2f}, all tensors counted"
            )
        return cls(shapes, candidates, items, floor(target_bpw * num_weights) - rest)

    def measure(
        self,
        model: CausalLM,
        windows: Tensor,
        *,
        is_tied: bool,
        gptq_scheme: Scheme | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Sensitivity:
        """What candidates would cost a model, on some of the windows; see ``sensitivity.py``."""
        count = min(len(windows), _WINDOWS)
        windows = windows[torch.arange(count) * len(windows) // count]
        return measure_sensitivity(
            model,
            windows,
            self.candidates,
            is_tied=is_tied,
            gptq_scheme=gptq_scheme,
            progress=progress,
        )

    def choose(self, costs: Mapping[str, Sequence[float]]) -> Mixture:
        """The mix of least cost. ``costs``: of each matrix, what each of its candidates costs."""
        options = [
            [
                Option(
                    sum(self.candidates[n][i].num_bits(self.shapes[n]) for n in names),
                    sum(costs[n][i] for n in names),
                )
                for i in range(len(self.candidates[names[0]]))
            ]
            for names in self.items
        ]
        found = allocate(options, self.budget)
        indices = {n: i for names, i in zip(self.items, found, strict=True) for n in names}
        return Mixture(
            {name: self.candidates[name][indices[name]] for name in self.shapes},
            sum(costs[name][i] for name, i in indices.items()),
        )


def _matrices(parameters: Parameters) -> dict[str, tuple[int, int]]:
    shapes = {name: parameters.shape(name) for name in parameters.names}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def _num_weights(parameters: Parameters) -> int:
    return sum(prod(parameters.shape(name)) for name in parameters.names)


def _kind(name: str) -> str:
    return name.split(".")[-2]


def _item(name: str) -> str:
    """What matrices of one item have in common: the layer, and the module that they are part of."""
    layer = name.rpartition(f".{_kind(name)}.")[0]
    return f"{layer}.{_FUSED.get(_kind(name), _kind(name))}"


def _check(name: str, shape: tuple[int, int], scheme: Scheme, writer: MixedWriter) -> None:
    try:
        writer.check(shape, scheme)
        scheme.group_width(shape[1])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _up(bits: float) -> float:
    """To two digits, and not below: who asks for what an error names must get it."""
    return -floor(-bits * 100) / 100
