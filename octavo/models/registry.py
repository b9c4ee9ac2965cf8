"""The registry of model families: an entry for each that octavo runs, or can only plan.

A checkpoint names its family by ``architectures`` or ``model_type`` of ``config.json``, or by
``general.architecture`` of GGUF metadata. A family that runs is declared by a `Family`
(`octavo.models.family`) in its model's module, which is imported when it is first looked up. The
layers of families that can only be planned are described in `octavo.cost.hf_families`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.base.errors import UnsupportedModelError
from octavo.base.optional_deps import ADD_TRANSFORMERS

if TYPE_CHECKING:
    from octavo.layers.context import Activations, ForwardContext
    from octavo.models.config import ModelConfig
    from octavo.models.family import Family


class Listed(NamedTuple):
    """A registered family: where it is declared, and the names that checkpoints have for it.

    Args:
        family: ``module:attribute`` of its `Family` in `octavo.models`; None if octavo can plan the
            family and not run it.
        names: in ``architectures``, the family's own first. The others are multi-modal models, of
            which the text part is run.
        model_types: the family's own first; the others mean the same.
        gguf: ``general.architecture``. Of families that share one, the entry that reads it.
        alike: further model types with layers of the same shapes, which are planned like this
            family and not run.
        lacks: the feature that octavo would need to run the family, for messages.
    """

    family: str | None
    names: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf: str | None = None
    alike: tuple[str, ...] = ()
    lacks: str = ""

    @property
    def is_encoder(self) -> bool:
        """Whether it embeds, scores and classifies, and generates nothing."""
        return self.family is not None and self.family.startswith(("bert:", "modernbert:"))

    @property
    def model_type(self) -> str:
        """The family's own ``model_type``, its key in `octavo.cost.hf_families`."""
        return self.model_types[0]


_GEMMA4 = "layers that share keys and values, and heads of another size where they see everything"
_GEMMA3N = "embeddings of each layer, several streams (AltUp), layers that share keys and values"
_QWEN35 = "Gated DeltaNet layers in the layout of Qwen3.5"
_SPARSE = "sparse attention, for which an indexer chooses the positions"
_MAMBA = "layers of Mamba without any attention"
_MAMBA_MIX = "layers of Mamba beside attention in this family's layout"

FAMILIES = (
    Listed(
        "llama:LLAMA",
        ("LlamaForCausalLM",),
        ("llama",),
        "llama",
        alike=("exaone", "internlm2", "internlm3", "helium", "ministral3"),
    ),
    Listed(
        "llama:MISTRAL",
        ("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
        ("mistral",),
        alike=("mistral3",),
    ),
    Listed("llama:MIXTRAL", ("MixtralForCausalLM",), ("mixtral",)),
    Listed("qwen_moe:QWEN2_MOE", ("Qwen2MoeForCausalLM",), ("qwen2_moe",), "qwen2moe"),
    Listed(
        "qwen_moe:QWEN3_MOE",
        ("Qwen3MoeForCausalLM",),
        ("qwen3_moe",),
        "qwen3moe",
        alike=("qwen3_omni_moe_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    ),
    Listed("olmoe:OLMOE", ("OlmoeForCausalLM",), ("olmoe",), "olmoe"),
    Listed("granite:GRANITE_MOE", ("GraniteMoeForCausalLM",), ("granitemoe",), "granitemoe"),
    Listed(
        "glm4_moe:GLM4_MOE",
        ("Glm4MoeForCausalLM",),
        ("glm4_moe",),
        "glm4moe",
        alike=("glm4v_moe_text",),
    ),
    Listed("gpt_oss:GPT_OSS", ("GptOssForCausalLM",), ("gpt_oss",), "gpt-oss"),
    Listed(
        "llama:QWEN2",
        ("Qwen2ForCausalLM",),
        ("qwen2",),
        "qwen2",
        alike=("qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    ),
    Listed(
        "llama:QWEN3",
        ("Qwen3ForCausalLM",),
        ("qwen3",),
        "qwen3",
        alike=("qwen3_vl", "qwen3_vl_text"),
    ),
    Listed(
        "gemma3:GEMMA3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "gemma3"),
        "gemma3",
    ),
    Listed("deepseek:DEEPSEEK_V2", ("DeepseekV2ForCausalLM",), ("deepseek_v2",), "deepseek2"),
    Listed(
        "deepseek:DEEPSEEK_V3",
        ("DeepseekV3ForCausalLM",),
        ("deepseek_v3", "kimi_k2"),
        alike=("kimi_k25",),
    ),
    Listed("lfm2:LFM2", ("Lfm2ForCausalLM",), ("lfm2",), "lfm2"),
    Listed(
        "granite_hybrid:GRANITE_HYBRID",
        ("GraniteMoeHybridForCausalLM",),
        ("granitemoehybrid",),
        "granitehybrid",
    ),
    Listed("falcon_h1:FALCON_H1", ("FalconH1ForCausalLM",), ("falcon_h1",), "falcon-h1"),
    Listed("qwen3_next:QWEN3_NEXT", ("Qwen3NextForCausalLM",), ("qwen3_next",), "qwen3next"),
    Listed("gemma2:GEMMA2", ("Gemma2ForCausalLM",), ("gemma2",), "gemma2"),
    Listed("phi3:PHI3", ("Phi3ForCausalLM",), ("phi3",), "phi3", alike=("phi4_multimodal",)),
    Listed("granite:GRANITE", ("GraniteForCausalLM",), ("granite",), "granite"),
    Listed("olmo2:OLMO2", ("Olmo2ForCausalLM",), ("olmo2",), "olmo2"),
    Listed("olmo2:OLMO3", ("Olmo3ForCausalLM",), ("olmo3",)),
    Listed("smollm3:SMOLLM3", ("SmolLM3ForCausalLM",), ("smollm3",), "smollm3"),
    Listed("glm4:GLM4", ("Glm4ForCausalLM",), ("glm4",), "glm4", alike=("glm4v_text",)),
    Listed("cohere2:COHERE2", ("Cohere2ForCausalLM",), ("cohere2",), "cohere2"),
    Listed("gpt:STARCODER2", ("Starcoder2ForCausalLM",), ("starcoder2",), "starcoder2"),
    Listed("gpt:GPT2", ("GPT2LMHeadModel",), ("gpt2",), "gpt2"),
    Listed("gpt:OPT", ("OPTForCausalLM",), ("opt",)),
    # Encoders, which embed, score and classify.
    Listed(
        "bert:BERT",
        ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
        ("bert",),
        "bert",
    ),
    Listed(
        "bert:ROBERTA",
        (
            *("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
            *("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
        ),
        ("xlm-roberta", "roberta"),
    ),
    Listed(
        "modernbert:MODERNBERT",
        ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
        ("modernbert",),
    ),
    # Families that can be planned and not run have no module.
    Listed(
        None,
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        "gemma4",
        lacks=_GEMMA4,
    ),
    Listed(
        None,
        ("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM"),
        ("gemma3n", "gemma3n_text"),
        "gemma3n",
        lacks=_GEMMA3N,
    ),
    Listed(
        None,
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
        ("qwen3_5", "qwen3_5_text"),
        "qwen35",
        lacks=_QWEN35,
    ),
    Listed(
        None,
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        "qwen35moe",
        lacks=_QWEN35,
    ),
    Listed(
        None,
        ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        ("llama4", "llama4_text"),
        "llama4",
        lacks="attention in chunks, and queries that are scaled by their position",
    ),
    Listed(
        None,
        ("NemotronHForCausalLM",),
        ("nemotron_h",),
        "nemotron_h",
        lacks="layers that are a Mamba-2, an attention or an MLP alone",
    ),
    Listed(None, ("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",), "glm-dsa", lacks=_SPARSE),
    Listed(None, ("DeepseekV32ForCausalLM",), ("deepseek_v32",), lacks=_SPARSE),
    Listed(
        None,
        ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        ("minimax", "minimax_text_01", "minimax_m1"),
        lacks="linear attention (lightning attention)",
    ),
    Listed(None, ("MambaForCausalLM",), ("mamba",), "mamba", lacks=_MAMBA),
    Listed(None, ("Mamba2ForCausalLM",), ("mamba2",), "mamba2", lacks=_MAMBA),
    Listed(None, ("FalconMambaForCausalLM",), ("falcon_mamba",), lacks=_MAMBA),
    Listed(None, ("JambaForCausalLM",), ("jamba",), "jamba", lacks=_MAMBA_MIX),
    Listed(None, ("BambaForCausalLM",), ("bamba",), lacks=_MAMBA_MIX),
    Listed(
        None,
        ("KimiLinearForCausalLM",),
        ("kimi_linear",),
        "kimi-linear",
        lacks="Kimi Delta Attention",
    ),
    Listed(None, ("MinistralForCausalLM",), ("ministral",)),
    Listed(None, ("GemmaForCausalLM",), ("gemma",)),
    Listed(None, ("VaultGemmaForCausalLM",), ("vaultgemma",)),
    Listed(None, ("PhiForCausalLM",), ("phi",)),
    Listed(None, ("PhimoeForCausalLM", "PhiMoEForCausalLM"), ("phimoe",)),
    Listed(None, ("GPTBigCodeForCausalLM",), ("gpt_bigcode",)),
    Listed(None, ("GPTNeoXForCausalLM",), ("gpt_neox",)),
    Listed(None, ("BloomForCausalLM",), ("bloom",)),
    Listed(
        None, ("FalconForCausalLM", "RWForCausalLM"), ("falcon", "RefinedWeb", "RefinedWebModel")
    ),
    Listed(None, ("GPTJForCausalLM",), ("gptj",)),
    Listed(None, ("MptForCausalLM", "MPTForCausalLM"), ("mpt",)),
    Listed(None, ("CohereForCausalLM",), ("cohere",)),
    Listed(None, ("OlmoForCausalLM",), ("olmo",)),
    Listed(None, ("FlexOlmoForCausalLM",), ("flex_olmo",)),
    Listed(None, ("Dots1ForCausalLM",), ("dots1",)),
    Listed(None, ("Ernie4_5ForCausalLM",), ("ernie4_5",)),
    Listed(None, ("Ernie4_5_MoeForCausalLM",), ("ernie4_5_moe",)),
    Listed(None, ("ExaoneMoeForCausalLM",), ("exaone_moe",)),
    Listed(None, ("Exaone4ForCausalLM",), ("exaone4", "exaone4_5_text")),
    Listed(None, ("SolarOpenForCausalLM",), ("solar_open",)),
    Listed(None, ("AfmoeForCausalLM",), ("afmoe",)),
    Listed(None, ("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",)),
    Listed(None, ("HunYuanMoEV1ForCausalLM",), ("hunyuan_v1_moe",)),
    Listed(None, ("Jais2ForCausalLM",), ("jais2",)),
    Listed(None, ("CwmForCausalLM",), ("cwm",)),
    Listed(None, ("ArceeForCausalLM",), ("arcee",)),
    Listed(None, ("DeepseekForCausalLM",), ("deepseek",)),
    Listed(None, ("MiniCPM3ForCausalLM",), ("minicpm3",)),
    Listed(None, ("YoutuForCausalLM",), ("youtu",)),
    Listed(None, ("DbrxForCausalLM",), ("dbrx",)),
    Listed(None, ("ChatGLMModel", "ChatGLMForConditionalGeneration"), ("chatglm",)),
    Listed(None, ("GlmForCausalLM",), ("glm",)),
    Listed(None, ("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",)),
    Listed(None, ("GraniteMoeSharedForCausalLM",), ("granitemoeshared",)),
    Listed(None, ("Lfm2MoeForCausalLM",), ("lfm2_moe",)),
    Listed(None, ("NemotronForCausalLM",), ("nemotron",)),
    Listed(None, ("MiniMaxM2ForCausalLM",), ("minimax_m2",)),
    Listed(None, ("SeedOssForCausalLM",), ("seed_oss",)),
    Listed(None, ("StableLmForCausalLM",), ("stablelm",)),
)
_OTHER_HEADS = re.compile(r"(Text)?Model$|ForSequenceClassification$")
_BY_NAME = {name: listed for listed in FAMILIES for name in listed.names}
_BY_MODEL_TYPE = {
    kind: listed for listed in FAMILIES for kind in (*listed.model_types, *listed.alike)
}
_BY_GGUF = {listed.gguf: listed for listed in FAMILIES if listed.gguf}
_RUN_BY_NAME = {name: listed.family for name, listed in _BY_NAME.items() if listed.family}
_RUN_BY_GGUF = {kind: listed.family for kind, listed in _BY_GGUF.items() if listed.family}

ARCHITECTURES = tuple(listed.names[0] for listed in FAMILIES if listed.family)


class HiddenStates(Protocol):
    """A model without its head, as the runtime calls it."""

    def __call__(self, token_ids: Activations, ctx: ForwardContext) -> Activations:
        """Token ids (int64 [T]) to hidden states [T, hidden_size], after the last norm."""
        ...


class CausalLM(HiddenStates, Protocol):
    """A model that generates, as the runtime calls it."""

    def compute_logits(self, hidden: Activations, ctx: ForwardContext) -> Activations:
        """Hidden states [R, hidden_size] to logits, float32 [R, vocab_size]."""
        ...

    def exit_after(self, num_layers: int) -> CausalLM:
        """The model of the first layers, with the same last norm and head, and the same weights."""
        ...


def listed_of(config: Mapping[str, Any]) -> Listed | None:
    """The family that a ``config.json`` asks for by its ``model_type``, or by ``architectures``
    where it has none; None if no family has that name."""
    kind, names = _model_type(config), config.get("architectures")
    if kind is not None:
        return _BY_MODEL_TYPE.get(kind)
    first = names[0] if isinstance(names, list) and names else None
    return _BY_NAME.get(first) if isinstance(first, str) else None


def _model_type(config: Mapping[str, Any]) -> str | None:
    """The ``model_type`` of a config's text part; that of the whole config if the text part has
    none, or there is no text part. None for a multi-modal model of an unknown type whose text part
    has none: ``architectures`` decides."""
    inner, kind = config.get("text_config"), config.get("model_type")
    if isinstance(inner, Mapping) and inner:
        if isinstance(own := inner.get("model_type"), str):
            return own
        if kind not in _BY_MODEL_TYPE:
            return None
    return kind if isinstance(kind, str) else None


def listed_of_kind(kind: str) -> Listed | None:
    """The family of a ``model_type``, or of the architecture of a GGUF file."""
    return _BY_MODEL_TYPE.get(kind) or _BY_GGUF.get(kind)


def why_not_run(config: Mapping[str, Any]) -> str | None:
    """A message that says why octavo does not run the family of a ``config.json``; None if it runs
    it. Other keys of the config are not checked."""
    name, kind = architecture_of(config), _model_type(config)
    if name is not None and is_known(name) and kind in (None, *model_types_of(name)):
        return None
    called = f"{name}" if kind is None else f"{kind}" if name is None else f"{name} ({kind})"
    return _why(called, listed_of(config))


def why_gguf_not_run(kind: str) -> str | None:
    """A message that says why octavo does not run GGUF files with this ``general.architecture``;
    None if it runs them."""
    return None if kind in _RUN_BY_GGUF else _why(kind, _BY_GGUF.get(kind))


def _why(called: str, listed: Listed | None) -> str:
    lacks = f", which needs {listed.lacks}" if listed is not None and listed.lacks else ""
    return f"octavo can plan a {called}{lacks}, but has no code to run it yet"


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The first name in ``architectures``; of a config that has none, that of the family of its
    ``model_type``; None if there is no such family. A class of a family that differs in its head
    alone, such as ``Qwen3Model``, is named as the family's own."""
    names, listed = config.get("architectures"), listed_of(config)
    if not (isinstance(names, list) and names):
        return listed.names[0] if listed is not None else None
    name = str(names[0])
    if name in _BY_NAME or listed is None:
        return name
    body = _OTHER_HEADS.sub("", name)
    return listed.names[0] if body and listed.names[0].startswith(body) else name


def is_known(name: str) -> bool:
    """True if octavo runs an architecture of this name, among ``architectures`` of a config."""
    return name in _RUN_BY_NAME


def check_architecture(name: str, where: str) -> str:
    """Return ``name``, an entry of ``architectures``, if octavo runs it; else raise
    UnsupportedModelError. ``where``: the file that asks for it, for the message."""
    if not is_known(name):
        known = ", ".join(_RUN_BY_NAME)
        raise UnsupportedModelError(
            f"{where}: octavo runs {known}, but not {name}; where transformers is installed and "
            f"has it, it is run by that ({ADD_TRANSFORMERS})"
        )
    return name


def find_family(name: str, where: str) -> Family:
    """The family of a name in ``architectures``; UnsupportedModelError, naming ``where``, if octavo
    runs none of that name. Imports its module."""
    return _declared(_RUN_BY_NAME[check_architecture(name, where)])


def find_gguf_family(name: str, where: str) -> Family:
    """The same for the architecture of a GGUF file."""
    if name not in _RUN_BY_GGUF:
        known = ", ".join(_RUN_BY_GGUF)
        raise UnsupportedModelError(f"{where}: octavo runs GGUF files of {known}, but not {name}")
    return _declared(_RUN_BY_GGUF[name])


def model_types_of(architecture: str) -> tuple[str, ...]:
    """The model types that a config's ``architecture`` runs, its own first."""
    return _BY_NAME[architecture].model_types


def family_of(architecture: str) -> Family:
    """The family of the ``architecture`` of a `ModelConfig`."""
    return _declared(_RUN_BY_NAME[architecture])


def declared_in(listed: Listed) -> Family:
    """The declaration of a listed family that runs. Imports its module."""
    assert listed.family is not None, f"{listed.model_type} can only be planned"
    return _declared(listed.family)


def is_encoder(architecture: str) -> bool:
    """Whether a `ModelConfig` of this ``architecture`` is of an encoder."""
    return _BY_NAME[architecture].is_encoder


def model_class(architecture: str) -> type:
    """The class that runs the ``architecture`` of a `ModelConfig`."""
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
    family: Family = getattr(import_module(f"octavo.models.{module}"), name)
    return family
