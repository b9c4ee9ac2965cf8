"""ModelSpec from Hugging Face's ``config.json``.

Families say what configs do not (``hf_families.py``), and make their layers (``hf_layers.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.cost.hf_config import TextConfig
from octavo.cost.hf_families import FAMILIES, family_of
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.quantization_config import section_of
from octavo.cost.unread_keys import check
from octavo.models.registry import listed_of, why_not_run


def spec_from_hf(config: Mapping[str, Any], *, path: str | Path = "config.json") -> ModelSpec:
    """Read the contents of ``config.json``; ``path`` is for error messages.

    Raises:
        UnsupportedModelError: a model of this kind cannot be planned.
        ModelFileError: a value is missing or makes no sense.
    """
    path = Path(path)
    fields = _open(config, path)
    family = fields.family
    layers: dict[LayerSpec, LayerSpec] = {}  # layers alike are one object
    made = [_layer(fields.at(index), index) for index in range(fields.num_layers)]
    positions = fields.integer("max_position_embeddings", 2048)
    if (own := fields.integer("word_embed_proj_dim", fields.hidden)) != fields.hidden:
        raise UnsupportedModelError(
            f"{path}: word_embed_proj_dim = {own} is not hidden_size = {fields.hidden}: embeddings "
            "of another size than the layers cannot be planned"
        )
    norm = fields.hidden * (2 if family.norm_bias else 1)
    return ModelSpec(
        name=path.parent.name or path.stem,
        hidden_size=fields.hidden,
        vocab_size=fields.integer("vocab_size"),
        layers=tuple(layers.setdefault(layer, layer) for layer in made),
        tie_embeddings=fields.flag("tie_word_embeddings", family.tie),
        max_position=positions,
        final_norm_size=family.final_norms * norm,
        learned_positions=(
            0 if family.extra_positions is None else positions + family.extra_positions
        ),
        head_bias=family.head_bias,
        inputs=family.inputs(fields),
        dtype=fields.text("torch_dtype", None) or fields.text("dtype", "bfloat16"),
        quantization=section_of(config, path),
        why_not_run=why_not_run(config),
        notes=tuple(check(fields.kind, path, fields.unread())),
    )


# Tables of a config that say of its text model what others say at the top (DBRX, MPT).
_PARTS = ("attn_config", "ffn_config")


def _open(config: Mapping[str, Any], path: Path) -> TextConfig:
    outer = Fields(path, config)
    inner = outer.table("text_config", {})
    parts = (outer.table(name, {}) for name in _PARTS)
    values = {
        **{name: value for name, value in config.items() if name not in ("text_config", *_PARTS)},
        **{k: v for part in (*parts, inner) for k, v in part.items() if v is not None},
    }
    listed = listed_of(config)
    if listed is None:
        raise _unknown(outer, Fields(path, inner).text("model_type", None))
    kind = listed.model_type
    return TextConfig(path, values, family_of(kind, values), kind)


def _unknown(config: Fields, own: str | None) -> UnsupportedModelError:
    """The error for a ``config.json`` of no family; ``own``: the model type of its text part."""
    kind = own or config.text("model_type")
    near = get_close_matches(kind, FAMILIES, 3)
    return UnsupportedModelError(
        f"{config.path}: models of type {kind!r:.80} cannot be planned"
        + (f"; do you mean {' or '.join(near)}?" if near else "")
    )


def _layer(config: TextConfig, index: int) -> LayerSpec:
    family = config.family
    return LayerSpec(
        mixers=family.mixers(config, index),
        mlp=family.mlp(config, index),
        norm_size=family.norms * config.hidden * (2 if family.norm_bias else 1),
        beside=family.beside(config, index),
    )
