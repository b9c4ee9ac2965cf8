"""The weights of a model, and how many parameters they are.

    V h                      embedding, and again a head that is not tied to it
    h d (Hq + 2 Hkv) + Hq d h    attention; 3 h f an MLP with a gate, 2 h f without
    E 3 h fe + E h           experts and their router; a token uses k of the E

Counts are exact: see the totals in ``catalogue.json``, which tests compare with these.
"""

from __future__ import annotations

from functools import lru_cache

from octavo.cost.model_spec import ModelSpec
from octavo.cost.weight_shape import WeightShape


@lru_cache(maxsize=64)
def weights(spec: ModelSpec) -> tuple[WeightShape, ...]:
    """Every tensor of a model, one that is used twice counted once."""
    last = spec.last_weights()
    if spec.tie_embeddings:
        last = (weight for weight in last if weight.part != "head")
    return (*spec.first_weights(), *spec.layer_weights(0, spec.num_layers), *last)


@lru_cache(maxsize=64)
def num_parameters(spec: ModelSpec, active: bool = False) -> int:
    """Number of parameters of a model; with ``active``, of those that one token uses.

    Of active ones the embedding counts whole, as model cards have it.
    """
    if active:
        return sum(weight.num_active_params for weight in weights(spec) if weight.part != "other")
    return sum(weight.num_params for weight in weights(spec))
