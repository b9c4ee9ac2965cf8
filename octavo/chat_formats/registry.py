"""Registered formats, and the choice among them by a chat template."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.generic_json import GenericJSON
from octavo.chat_formats.hermes import Hermes
from octavo.chat_formats.llama_json import LlamaJSON
from octavo.chat_formats.mistral import Mistral, MistralArgs
from octavo.chat_formats.pythonic import Pythonic, TaggedPythonic
from octavo.chat_formats.qwen3_coder import Qwen3Coder

# The first that fits is taken: those with tags of their own come before those that share tags with
# others, and the one that fits all is last.
FORMATS: tuple[type[ChatFormat], ...] = (
    TaggedPythonic,
    MistralArgs,
    Mistral,
    Qwen3Coder,
    Hermes,
    Pythonic,
    LlamaJSON,
    GenericJSON,
)


def format_of(template_source: str, special_tokens: Mapping[str, int]) -> ChatFormat:
    """Return the format of a model.

    Args:
        template_source: of its chat template; empty if it has none.
        special_tokens: ids of the vocabulary's control tokens by text
            (``tokenizer.specials.matcher.ids``).
    """
    template = Template(template_source, special_tokens)
    return next(known for known in FORMATS if known.fits(template))(template)
