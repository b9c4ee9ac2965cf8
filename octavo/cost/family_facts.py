"""Families of Hugging Face's configs as JSON, for who reads a ``config.json`` elsewhere.

Only those are told whose layers are made by functions that are known there by their names: most of
what people run. Of others somebody has to ask octavo itself.
"""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

from octavo.cost.hf_config import SPELLINGS, ConfigFamily
from octavo.cost.hf_families import FAMILIES, USUAL, NormIfAsked
from octavo.cost.hf_layers import WindowsByType
from octavo.models.registry import FAMILIES as REGISTERED

# Names of the functions that make parts of layers: the page has functions of the same names.
_MIXERS = ("attention", "latent_attention")
_MLPS = ("dense", "experts_everywhere", "qwen_experts", "deepseek_experts")
_WINDOWS = ("no_windows", "same_window", "windows_if_used")


def families_json() -> dict[str, Any]:
    """``families`` by ``model_type``, ``same``: other names of them, ``spellings`` of fields. What
    a family has as others do is left out."""
    told = {kind: _facts(family) for kind, family in FAMILIES.items() if _is_told(family)}
    return {
        "usual": _all_facts(USUAL),
        "families": told,
        "same": {
            other: listed.model_type
            for listed in REGISTERED
            for other in (*listed.model_types[1:], *listed.alike)
            if listed.model_type in told
        },
        "spellings": SPELLINGS,
    }


def _is_told(family: ConfigFamily) -> bool:
    is_plain = family.beside is USUAL.beside and family.inputs is USUAL.inputs
    windows = family.windows
    return (
        is_plain
        and _name(family.mixers) in _MIXERS
        and _name(family.mlp) in _MLPS
        and (isinstance(windows, WindowsByType) or _name(windows) in _WINDOWS)
    )


def _facts(family: ConfigFamily) -> dict[str, Any]:
    usual = _all_facts(USUAL)
    return {name: fact for name, fact in _all_facts(family).items() if fact != usual[name]}


def _all_facts(family: ConfigFamily) -> dict[str, Any]:
    return {
        field.name: _fact(getattr(family, field.name))
        for field in fields(family)
        if field.name not in ("beside", "inputs")
    }


def _fact(value: Any) -> Any:
    """Functions by their names, or with what they were made of."""
    if isinstance(value, (WindowsByType, NormIfAsked)):
        return list(astuple(value))
    return _name(value) if callable(value) else value


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))
