"""Where the family of an architecture is declared: a line for each, and nothing more.

A module is imported when a model of it is looked up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.base.errors import UnsupportedModelError
from octavo.base.optional_deps import ADD_TRANSFORMERS

if TYPE_CHECKING:
    from octavo.layers.context import Activations, ForwardContext
    from octavo.models.config import ModelConfig
    from octavo.models.family import Family


class Listed(NamedTuple):
    """A family: where it is, and the names by which files ask for it.

    ``names``: in ``architectures`` of ``config.json``, the family's own first. Others are models
    that can do more, such as see images, of which the text part is run. ``gguf``: in
    ``general.architecture``; families that share one have it once, where it is read.
    """

    family: str  # module:attribute
    names: tuple[str, ...]
    gguf: str | None = None


FAMILIES = (
    Listed("octavo.models.llama:LLAMA", ("LlamaForCausalLM",), "llama"),
    Listed(
        "octavo.models.llama:MISTRAL", ("MistralForCausalLM", "Mistral3ForConditionalGeneration")
    ),
    Listed("octavo.models.llama:MIXTRAL", ("MixtralForCausalLM",)),
    Listed("octavo.models.qwen_moe:QWEN2_MOE", ("Qwen2MoeForCausalLM",), "qwen2moe"),
    Listed("octavo.models.qwen_moe:QWEN3_MOE", ("Qwen3MoeForCausalLM",), "qwen3moe"),
    Listed("octavo.models.olmoe:OLMOE", ("OlmoeForCausalLM",), "olmoe"),
    Listed("octavo.models.granite:GRANITE_MOE", ("GraniteMoeForCausalLM",), "granitemoe"),
    Listed("octavo.models.glm4_moe:GLM4_MOE", ("Glm4MoeForCausalLM",), "glm4moe"),
    Listed("octavo.models.gpt_oss:GPT_OSS", ("GptOssForCausalLM",), "gpt-oss"),
    Listed("octavo.models.llama:QWEN2", ("Qwen2ForCausalLM",), "qwen2"),
    Listed("octavo.models.llama:QWEN3", ("Qwen3ForCausalLM",), "qwen3"),
    Listed(
        "octavo.models.gemma3:GEMMA3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "gemma3",
    ),
    Listed("octavo.models.deepseek:DEEPSEEK_V2", ("DeepseekV2ForCausalLM",), "deepseek2"),
    Listed("octavo.models.deepseek:DEEPSEEK_V3", ("DeepseekV3ForCausalLM",)),
    Listed("octavo.models.lfm2:LFM2", ("Lfm2ForCausalLM",), "lfm2"),
    Listed(
        "octavo.models.granite_hybrid:GRANITE_HYBRID",
        ("GraniteMoeHybridForCausalLM",),
        "granitehybrid",
    ),
    Listed("octavo.models.falcon_h1:FALCON_H1", ("FalconH1ForCausalLM",), "falcon-h1"),
    Listed("octavo.models.qwen3_next:QWEN3_NEXT", ("Qwen3NextForCausalLM",), "qwen3next"),
    Listed("octavo.models.gemma2:GEMMA2", ("Gemma2ForCausalLM",), "gemma2"),
    Listed("octavo.models.phi3:PHI3", ("Phi3ForCausalLM",), "phi3"),
    Listed("octavo.models.granite:GRANITE", ("GraniteForCausalLM",), "granite"),
    Listed("octavo.models.olmo2:OLMO2", ("Olmo2ForCausalLM",), "olmo2"),
    Listed("octavo.models.olmo2:OLMO3", ("Olmo3ForCausalLM",)),
    Listed("octavo.models.smollm3:SMOLLM3", ("SmolLM3ForCausalLM",), "smollm3"),
    Listed("octavo.models.glm4:GLM4", ("Glm4ForCausalLM",), "glm4"),
    Listed("octavo.models.cohere2:COHERE2", ("Cohere2ForCausalLM",), "cohere2"),
    Listed("octavo.models.gpt:STARCODER2", ("Starcoder2ForCausalLM",), "starcoder2"),
    Listed("octavo.models.gpt:GPT2", ("GPT2LMHeadModel",), "gpt2"),
    Listed("octavo.models.gpt:OPT", ("OPTForCausalLM",)),
)
_BY_NAME = {name: listed.family for listed in FAMILIES for name in listed.names}
_BY_GGUF = {listed.gguf: listed.family for listed in FAMILIES if listed.gguf}

ARCHITECTURES = tuple(listed.names[0] for listed in FAMILIES)


class CausalLM(Protocol):
    """What a model is to those who run it."""

    def __call__(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        """Token ids (int64 [T]) to hidden states [T, hidden_size], after the last norm."""
        ...

    def compute_logits(self, hidden: Activations, ctx: ForwardContext) -> Activations:
        """Hidden states [R, hidden_size] to logits, float32 [R, vocab_size]."""
        ...

    def exit_after(self, num_layers: int) -> CausalLM:
        """The model of the first layers, with the same last norm and head, and the same weights."""
        ...


def is_known(name: str) -> bool:
    """Whether octavo has an architecture of this name, among ``architectures`` of a config."""
    return name in _BY_NAME


def check_architecture(name: str, where: str) -> str:
    """``name``, if it is one of a config's; UnsupportedModelError, naming ``where``, if not."""
    if not is_known(name):
        known = ", ".join(_BY_NAME)
        raise UnsupportedModelError(
            f"{where}: octavo runs {known}, but not {name}; where transformers is installed and "
            f"has it, it is run by that ({ADD_TRANSFORMERS})"
        )
    return name


def find_family(name: str, where: str) -> Family:
    """The family of a name in ``architectures``; UnsupportedModelError, naming ``where``, if none.
    Imports its module."""
    return _declared(_BY_NAME[check_architecture(name, where)])


def find_gguf_family(name: str, where: str) -> Family:
    """The same for the architecture of a GGUF file."""
    if name not in _BY_GGUF:
        known = ", ".join(_BY_GGUF)
        raise UnsupportedModelError(f"{where}: octavo runs GGUF files of {known}, but not {name}")
    return _declared(_BY_GGUF[name])


def family_of(architecture: str) -> Family:
    """The family of a config's ``architecture``."""
    return _declared(_BY_NAME[architecture])


def model_class(architecture: str) -> type:
    """What runs a config's ``architecture``."""
    return family_of(architecture).model


def gguf_architecture(config: ModelConfig) -> str:
    """``general.architecture`` of a GGUF file of a model; UnsupportedModelError if it has none."""
    kind = family_of(config.architecture).gguf
    if kind is None:
        raise UnsupportedModelError(
            f"{config.name}: llama.cpp has no name for a {config.architecture}, so that there are "
            "no GGUF files of it"
        )
    return kind


def _declared(place: str) -> Family:
    module, _, name = place.partition(":")
    family: Family = getattr(import_module(module), name)
    return family
