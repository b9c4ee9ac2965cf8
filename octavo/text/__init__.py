"""Tokenizers, chat templates and incremental detokenization (loaded when first used)."""

from __future__ import annotations

from typing import Any

__all__ = ["IncrementalDetokenizer", "Tokenizer"]


def __getattr__(name: str) -> Any:
    if name == "Tokenizer":
        from octavo.text.tokenizer import Tokenizer

        return Tokenizer
    if name == "IncrementalDetokenizer":
        from octavo.text.detokenizer import IncrementalDetokenizer

        return IncrementalDetokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
