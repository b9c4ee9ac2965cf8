"""Which class runs an architecture. Names are those of Hugging Face's ``architectures``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from octavo.errors import UnsupportedModelError
from octavo.extras import ADD_TRANSFORMERS

if TYPE_CHECKING:
    from octavo.layers.context import Activations, ForwardContext

ARCHITECTURES = {
    "LlamaForCausalLM": "octavo.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "octavo.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "octavo.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "octavo.models.llama:LlamaForCausalLM",
    "Gemma3ForCausalLM": "octavo.models.gemma3:Gemma3ForCausalLM",
}

# The text part of a model that also sees images; its other weights are left out.
ALIASES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}

# ``general.architecture`` of GGUF files. Mistral's come as llama.
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


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
    """Whether octavo has an architecture of this name."""
    return ALIASES.get(name, name) in ARCHITECTURES


def resolve_architecture(name: str, where: str) -> str:
    """The key of ARCHITECTURES for a name; UnsupportedModelError, naming ``where``, if none."""
    if not is_known(name):
        known = ", ".join([*ARCHITECTURES, *ALIASES])
        raise UnsupportedModelError(
            f"{where}: octavo runs {known}, but not {name}; with transformers installed, which may "
            f"have it, it would run that ({ADD_TRANSFORMERS})"
        )
    return ALIASES.get(name, name)


def resolve_gguf_architecture(name: str, where: str) -> str:
    """The same for the architecture of a GGUF file."""
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModelError(f"{where}: octavo runs GGUF files of {known}, but not {name}")
    return GGUF_ARCHITECTURES[name]


def model_class(architecture: str) -> type:
    """The class for a key of ARCHITECTURES; imports its module now."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(import_module(module), name)
