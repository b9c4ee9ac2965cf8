"""Reasons why a model does not do what a request asks for: one that generates pools nothing, and
the other way round."""

from __future__ import annotations

GENERATES_NOTHING = "pools texts to vectors or scores, and generates none: ask for embeddings"
POOLS_NOTHING = (
    "generates text, and pools none: start it with --runner pooling, or take a model of embeddings"
)
