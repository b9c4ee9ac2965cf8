"""Models that octavo does not run, told by what their files call themselves, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.base.errors import UnsupportedModelError
from octavo.models.registry import listed_of, listed_of_kind

_EMBEDDINGS = (
    "it is an encoder that octavo does not run yet: BERT, RoBERTa, XLM-RoBERTa and ModernBERT are "
    "what it embeds texts with, and decoders such as Qwen3-Embedding"
)
# By ``model_type`` of config.json, and by ``general.architecture`` of a GGUF file.
_ENCODERS = {
    *("distilbert", "camembert", "electra", "albert", "mpnet"),
    *("deberta", "deberta-v2", "nomic_bert", "new", "eurobert", "jina_embeddings_v3"),
    *("nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert", "modern-bert"),
}

_SPARSE = "sparse attention, for which an indexer chooses the positions"
_MAMBA_MIX = "layers of Mamba beside attention in this family's layout"
_RWKV = "layers of RWKV"
_ENCODER_DECODER = "an encoder before its decoder"
_TEMPERATURE = "queries that are scaled by their position (llama_4_scaling_beta)"

# What models need that no family of the registry stands for, named as above; `Listed.lacks` has it
# of those that can be planned.
_FEATURES = {
    "nemotron_h_moe": "layers that are a Mamba-2, an attention or an MLP alone",
    "deepseek_v4": _SPARSE,
    **dict.fromkeys(("zamba", "zamba2"), _MAMBA_MIX),
    **dict.fromkeys(("rwkv", "rwkv6", "rwkv7", "rwkv5", "rwkv6qwen2", "arwkv7"), _RWKV),
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "t5gemma", "t5encoder"), _ENCODER_DECODER),
    **dict.fromkeys(("ministral3", "mistral3"), _TEMPERATURE),
}


def _feature_of(kind: str) -> str:
    """The features that models of a kind need; empty if nothing special is known."""
    listed = listed_of_kind(kind)
    return _FEATURES.get(kind) or (listed.lacks if listed is not None else "")


# What transformers can compute for itself alone: its layers hand keys and values on to each other
# in a cache of its own, where octavo puts its paged one.
_SHARE_KEYS = {"gemma4", "gemma4_text", "gemma4_unified", "gemma3n", "gemma3n_text"}


def check_generates(config: Mapping[str, Any], path: Path) -> None:
    """UnsupportedModelError if ``config``, of a ``config.json``, is of a model that octavo cannot
    run by any means, whatever else is installed."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _ENCODERS and not config.get("is_decoder"):
        raise UnsupportedModelError(f"{path}: {kind}: {_EMBEDDINGS}")


def check_gguf_generates(kind: str, path: Path) -> None:
    """The same of a GGUF file's ``general.architecture``."""
    if kind in _ENCODERS:
        raise UnsupportedModelError(f"{path}: {kind}: {_EMBEDDINGS}")


@contextmanager
def naming_features(*kinds: Any) -> Iterator[None]:
    """Say in an UnsupportedModelError what models of these kinds need, where that is known.

    ``kinds``: what the files call them, the part that makes text first.
    """
    try:
        yield
    except UnsupportedModelError as error:
        named = [kind for kind in kinds if isinstance(kind, str)]
        known = [kind for kind in named if _feature_of(kind)]
        message = str(error)
        if known:
            message += (
                f". A model of the kind {known[0]} needs {_feature_of(known[0])}, which octavo "
                "does not have yet"
            )
        if any(listed_of_kind(kind) is not None for kind in named):
            message += ". It can be planned: `octavo plan` says what it would take, and how fast"
        raise UnsupportedModelError(message) from None


def kinds_of(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The names that a ``config.json`` has for its model: of the text part, and of the whole."""
    inner = config.get("text_config")
    own = inner.get("model_type") if isinstance(inner, Mapping) else None
    listed = listed_of(config)
    return own, config.get("model_type"), listed and listed.model_type


def check_by_transformers(config: Mapping[str, Any], path: Path) -> None:
    """UnsupportedModelError if not even transformers could run the model on a paged cache."""
    found = [kind for kind in kinds_of(config) if isinstance(kind, str) and kind in _SHARE_KEYS]
    if found:
        with naming_features(*found):
            raise UnsupportedModelError(
                f"{path}: transformers cannot run {found[0]} on a paged cache, as layers take keys "
                "and values from others"
            )
