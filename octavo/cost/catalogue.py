"""Models that can be planned by their names alone: ``catalogue.json``.

An entry has the facts of the model's ``config.json`` that shapes depend on, where these are from,
and the parameters that its authors or its files count, which tests hold against ours. ``rounded``
are counts of a model card; the others are exact. ``other_parameters`` are of what is loaded beside
the text model, and counted in ``parameters``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.base.errors import ConfigError
from octavo.cost.model_spec import ModelSpec

# What names are said with and that changes no shape.
_NO_MATTER = {
    *("meta", "hf", "base", "chat", "instruct", "it", "pt", "thinking", "preview", "coder", "math"),
    *("v0.1", "v0.2", "v1.0", "fp16", "bf16", "exp"),
}
_DATES = re.compile(r"\d{4}|\d{6}")
# What names of quantized models end in, and what the configs of these say.
_QUANTIZED = re.compile(
    r"[-_.](?:quantized\.)?(fp8|awq|gptq|nvfp4|w8a8|w4a16)(?:[-_](?:dynamic|block|int4|marlin))?$",
    re.IGNORECASE,
)
_OTHERWISE = "; a config.json, a folder or a GGUF file will do"
_CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "w8a8": {
        "quant_method": "compressed-tensors",
        "config_groups": {"all": {"weights": {"num_bits": 8}, "input_activations": {}}},
    },
    "w4a16": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "all": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}
        },
    },
}


@lru_cache(maxsize=1)
def entries() -> Mapping[str, Mapping[str, Any]]:
    """The catalogue as it is, by name."""
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return MappingProxyType(json.loads(text))


def names() -> list[str]:
    """All names, in the order of the catalogue."""
    return list(entries())


def find_name(text: str) -> str:
    """The name of an entry that someone writes in his own way.

    Capitals, the organisation, separators, and words such as ``instruct`` do not matter.
    ConfigError with the nearest names if there is none.
    """
    plain = _plain(text)
    alike = [name for name in names() if plain in (_plain(name), _plain(entries()[name]["source"]))]
    if alike:  # of a model and of one made of it, that which is written more like it
        return max(alike, key=lambda name: SequenceMatcher(None, name, text.lower()).ratio())
    near = get_close_matches(plain, [_plain(name) for name in names()], 4, 0.5)
    known = {_plain(name): name for name in reversed(names())}
    hint = f": do you mean {' or '.join(known[each] for each in near)}?" if near else _OTHERWISE
    raise ConfigError(f"no model {text!r:.120} is in the catalogue{hint}")


def spec_of(name: str) -> ModelSpec:
    """The shape of a model of the catalogue, by a name that ``find_name`` understands, which may
    end in how it is quantized: ``-FP8``, ``-AWQ``, ``-GPTQ-Int4``, ``-NVFP4``, ``.w8a8``."""
    from octavo.cost.spec_hf import spec_from_hf  # and families: only for a model that is opened

    try:
        found, quantization = find_name(name), None
    except ConfigError:
        ending = _QUANTIZED.search(name)
        if ending is None:
            raise
        found, quantization = find_name(name[: ending.start()]), _CONFIGS[ending[1].lower()]
    entry = entries()[found]
    spec = spec_from_hf(entry["config"], path=found)
    return replace(
        spec,
        name=found,
        other_params=entry.get("other_parameters", 0),
        quantization=quantization or spec.quantization,
    )


def _plain(name: str) -> str:
    """The part of a name that tells models apart."""
    last = name.strip().rstrip("/").rpartition("/")[2].lower()
    words = re.split(r"[-_\s:]+", last)
    return "".join(word for word in words if word not in _NO_MATTER and not _DATES.fullmatch(word))
