"""ModelSpec from Hugging Face's ``config.json``.

A family that runs is read as it is for running, and its modules say what it is made of
(``spec_of_config.py``). Of a family that can only be planned, ``hf_families.py`` has what its
configs do not say, and ``hf_layers.py`` makes its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.cost.hf_config import ConfigFamily, TextConfig, usual_name
from octavo.cost.hf_families import family_of
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.quantization_config import section_of
from octavo.cost.spec_of_config import spec_of_config
from octavo.cost.unread_keys import changes_no_shape, check
from octavo.models.config_hf import config_from_hf, sizes_from_hf
from octavo.models.registry import FAMILIES, Listed, declared_in, listed_of, why_not_run


def spec_from_hf(config: Mapping[str, Any], *, path: str | Path = "config.json") -> ModelSpec:
    """Read the contents of ``config.json``; ``path`` is for error messages.

    Raises:
        UnsupportedModelError: a model of this kind cannot be planned.
        ModelFileError: a value is missing or makes no sense.
    """
    path = Path(path)
    listed = _listed(config, path)
    if listed.family is not None:
        return _of_running(config, listed, path)
    outer = Fields(path, config)
    return _by_facts(config, family_of(listed.model_type, _values(outer)), path)


def _of_running(config: Mapping[str, Any], listed: Listed, path: Path) -> ModelSpec:
    """A spec from the modules of a family that runs. Fields that change no shape are left out, so
    that a model can be planned whose rope or activation octavo does not have."""
    family = declared_in(listed)
    inner = Fields(path, config).table("text_config", {})
    sizes = {name: value for name, value in config.items() if not changes_no_shape(name)}
    if inner:
        sizes["text_config"] = {k: v for k, v in inner.items() if not changes_no_shape(k)}
    read, asked, unread = sizes_from_hf(sizes, family, path=path)
    known = {usual_name(name) for name in asked}
    left = [(name, value) for name, value in unread if usual_name(name) not in known]
    notes = tuple(check(listed.model_type, path, left))
    return _finished(replace(spec_of_config(read), notes=notes), config, path)


def spec_as_it_runs(config: Mapping[str, Any], *, path: Path) -> ModelSpec:
    """The spec of a model that octavo would load: its tensors show that a
    field which no reader asks for changes no shape. The errors are those of loading."""
    return _finished(spec_of_config(config_from_hf(config, path=path)), config, path)


def _finished(spec: ModelSpec, config: Mapping[str, Any], path: Path) -> ModelSpec:
    """The spec with what a ``config.json`` says of any model: types of weights, whether it runs."""
    fields = Fields(path, _values(Fields(path, config)))
    return replace(
        spec,
        name=path.parent.name or path.stem,
        dtype=fields.text("torch_dtype", None) or fields.text("dtype", "bfloat16"),
        quantization=section_of(config, path),
        why_not_run=why_not_run(config),
    )


def _by_facts(config: Mapping[str, Any], family: ConfigFamily, path: Path) -> ModelSpec:
    """A spec from what a family says of its configs."""
    fields = TextConfig(
        path, _values(Fields(path, config)), family, _listed(config, path).model_type
    )
    layers: dict[LayerSpec, LayerSpec] = {}  # layers alike are one object
    made = [_layer(fields.at(index), index) for index in range(fields.num_layers)]
    positions = fields.integer("max_position_embeddings", 2048)
    if (own := fields.integer("word_embed_proj_dim", fields.hidden)) != fields.hidden:
        raise UnsupportedModelError(
            f"{fields.path}: word_embed_proj_dim = {own} is not hidden_size = {fields.hidden}: "
            "embeddings of another size than the layers cannot be planned"
        )
    norm = fields.hidden * (2 if family.norm_bias else 1)
    spec = ModelSpec(
        name="",
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
        notes=tuple(check(fields.kind, fields.path, fields.unread())),
    )
    return _finished(spec, config, path)


# Tables of a config that say of its text model what others say at the top (DBRX, MPT).
_PARTS = ("attn_config", "ffn_config")


def _values(outer: Fields) -> dict[str, Any]:
    """The fields of a config's text model."""
    inner = outer.table("text_config", {})
    parts = (outer.table(name, {}) for name in _PARTS)
    return {
        **{name: outer.raw(name) for name in outer if name not in ("text_config", *_PARTS)},
        **{k: v for part in (*parts, inner) for k, v in part.items() if v is not None},
    }


def _listed(config: Mapping[str, Any], path: Path) -> Listed:
    listed = listed_of(config)
    if listed is None:
        outer = Fields(path, config)
        inner = Fields(path, outer.table("text_config", {}))
        raise _unknown(outer, inner.text("model_type", None))
    return listed


def _unknown(config: Fields, own: str | None) -> UnsupportedModelError:
    """The error for a ``config.json`` of no family; ``own``: the model type of its text part."""
    kind = own or config.text("model_type")
    near = get_close_matches(kind, [each.model_type for each in FAMILIES], 3)
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
        has_last_norm=family.has_last_norm,
    )
