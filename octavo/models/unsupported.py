"""Models that octavo does not run, told by what their files call themselves, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import UnsupportedModelError

_EMBEDDINGS = (
    "it is an encoder, which makes embeddings of texts and generates none; octavo does not compute "
    "embeddings yet. Give a model that generates, such as the default of `octavo generate`"
)
# By ``model_type`` of config.json, and by ``general.architecture`` of a GGUF file.
_ENCODERS = {
    *("bert", "roberta", "xlm-roberta", "distilbert", "camembert", "electra", "albert", "mpnet"),
    *("deberta", "deberta-v2", "modernbert", "nomic_bert", "new", "eurobert", "jina_embeddings_v3"),
    *("nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert", "modern-bert"),
}


def check_generates(config: Mapping[str, Any], path: Path) -> None:
    """UnsupportedModelError if ``config``, of a ``config.json``, is of a model that octavo cannot
    run by any means, whatever else is installed."""
    kind = config.get("model_type")
    if kind in _ENCODERS and not config.get("is_decoder"):
        raise UnsupportedModelError(f"{path}: {kind}: {_EMBEDDINGS}")


def check_gguf_generates(kind: str, path: Path) -> None:
    """The same of a GGUF file's ``general.architecture``."""
    if kind in _ENCODERS:
        raise UnsupportedModelError(f"{path}: {kind}: {_EMBEDDINGS}")
