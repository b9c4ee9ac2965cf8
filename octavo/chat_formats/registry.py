"""Registered formats, and the choice among them by a chat template."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.command import Command
from octavo.chat_formats.deepseek import DeepSeekV3, DeepSeekV31
from octavo.chat_formats.gemma import FunctionGemma, Gemma4
from octavo.chat_formats.generic_json import GenericJSON
from octavo.chat_formats.glm4 import GLM4, GLM47
from octavo.chat_formats.harmony import Harmony
from octavo.chat_formats.hermes import Hermes
from octavo.chat_formats.internlm import InternLM
from octavo.chat_formats.invoke_calls import DeepSeekV4, DeepSeekV32, MiniMaxM2
from octavo.chat_formats.json_lists import Granite3, Nemotron, Phi4Mini, ToolCallsList
from octavo.chat_formats.kimi_k2 import KimiK2
from octavo.chat_formats.kimi_k3 import KimiK3
from octavo.chat_formats.llama_json import LlamaJSON
from octavo.chat_formats.mistral import Mistral, MistralArgs
from octavo.chat_formats.pythonic import Olmo3, Pythonic, TaggedPythonic
from octavo.chat_formats.qwen3_coder import Qwen3Coder, SeedOSS
from octavo.chat_formats.xlam import XLAM

# The first that fits is taken: those with tags of their own come before those that share tags with
# others, and the one that fits all is last.
FORMATS: tuple[type[ChatFormat], ...] = (
    Harmony,
    Command,
    InternLM,
    DeepSeekV3,
    DeepSeekV31,
    DeepSeekV32,
    DeepSeekV4,
    KimiK2,
    KimiK3,
    MiniMaxM2,
    GLM47,
    GLM4,
    FunctionGemma,
    Gemma4,
    Granite3,
    Phi4Mini,
    Nemotron,
    ToolCallsList,
    Olmo3,
    TaggedPythonic,
    MistralArgs,
    Mistral,
    SeedOSS,
    Qwen3Coder,
    XLAM,
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
