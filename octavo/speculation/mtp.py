"""The ``mtp`` method, multi-token prediction by a module of the model's own checkpoint.

At position p it reads the target's hidden state h after the last norm, and the embedding e of the
token p + 1 (DeepSeek-V3, arXiv 2412.19437, section 2.2)::

    x      = layer(eh_proj [enorm(e), hnorm(h)])        a layer as the target's own are
    logits = head(norm(x))                              the target's head

and is run again on its own x for the tokens after that. Embedding and head are the target's, even
if the checkpoint has a copy of them. Tensors have one of two layouts; of several modules the first
is used:

- DeepSeek's: ``model.layers.{n}.{enorm,hnorm,eh_proj,shared_head.norm}``, n being the number of
  layers, and the layer's own names beside these;
- Qwen's: ``mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}`` and ``mtp.layers.0.*``; there
  the module is run again on norm(x).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo import hub
from octavo.base.errors import ConfigError
from octavo.base.model_files import is_engine_folder
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import LMHead
from octavo.layers.module import named_parameters
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryEmbedding
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig
from octavo.models.decoder import DecoderForCausalLM
from octavo.models.registry import ARCHITECTURES, family_of, model_class
from octavo.runtime.capacity import RankLimits
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.draft_tree import DraftTreeShape, min_probability_of
from octavo.speculation.drafter import TargetModel
from octavo.speculation.head_folder import CheckpointTensors
from octavo.speculation.head_program import DraftHead
from octavo.speculation.layer_head import FEATURE, LayerProposer, kv_bytes_per_token
from octavo.speculation.native_target import NativeTarget, normalized
from octavo.speculation.two_input_linear import PairLinear

_NUM_TOKENS = 2  # the module was trained to predict one


def is_served_by_mtp(architecture: str) -> bool:
    """True if MTP modules of an architecture have the layers of the model itself."""
    return family_of(architecture).next_token_layers


class MTPHead(DraftHead):
    """One drafting step: logits of the token after next, from a hidden state and the next token."""

    def __init__(self, layer: ModelConfig):
        size = layer.hidden_size
        self.inputs = {FEATURE: size}
        self.embed_tokens = Embedding(layer.vocab_size, size)
        self.rotary_emb = RotaryEmbedding(layer.rope)
        self.enorm = RMSNorm(size, layer.norm_eps)
        self.hnorm = RMSNorm(size, layer.norm_eps)
        self.eh_proj = PairLinear(size, size, size)
        target: type[DecoderForCausalLM] = model_class(layer.architecture)
        self.layer = target.layer_type(layer, 0)
        self.norm = RMSNorm(size, layer.norm_eps)
        self.lm_head = LMHead(size, layer.vocab_size)

    def forward(
        self, inputs: Mapping[str, Activations], token_ids: Activations, ctx: ForwardContext
    ) -> Activations:
        e = self.enorm(self.embed_tokens(token_ids, ctx), ctx)
        x = self.eh_proj((e, self.hnorm(inputs[FEATURE], ctx)), ctx)
        x = self.layer(x, self.rotary_emb(ctx), ctx)
        return self.lm_head(self.norm(x, ctx), ctx)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names of the parts of an MTP module in a checkpoint."""

    names: Mapping[str, str]
    layer: str  # prefix of the decoder layer's tensors
    goes_on_normed: bool

    def tensor(self, parameter: str) -> str:
        stem, _, suffix = parameter.rpartition(".")
        if stem in self.names:
            return f"{self.names[stem]}.{suffix}"
        return self.layer + parameter.removeprefix("layer.")


def _deepseek(index: int) -> _Layout:
    prefix = f"model.layers.{index}."
    names = {part: prefix + part for part in ("enorm", "hnorm", "eh_proj")}
    return _Layout(names | {"norm": prefix + "shared_head.norm"}, prefix, goes_on_normed=False)


_QWEN = _Layout(
    {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "norm": "mtp.norm",
    },
    "mtp.layers.0.",
    goes_on_normed=True,
)


class MTPDrafter:
    """A ``Drafter`` of the MTP module of a checkpoint, the target's own or ``config.model``. Raises
    as ``open_drafter`` does."""

    def __init__(self, config: SpeculativeConfig, target: TargetModel):
        self._rank = target.rank
        self._native = NativeTarget(target, "mtp")
        path = hub.resolve(config.model) if config.model else target.spec.path
        self._head, self._layer, self._goes_on_normed = _load(path, self._native)
        asked = config.num_speculative_tokens or _NUM_TOKENS
        self._shape = DraftTreeShape(asked, asked, 1, 1, min_probability_of(config))
        self._rank.keep_hidden_states([self._native.depth])
        self.kv_bytes_per_token = kv_bytes_per_token(self._layer)

    def start(self, limits: RankLimits) -> LayerProposer:
        norm = self._head.norm
        proposer = LayerProposer(
            self._head,
            self._layer,
            self._native,
            limits,
            [self._native.depth],
            self._native.last_norm(),
            np.arange(self._layer.vocab_size),
            self._shape,
            normalized(norm.weight.value, norm.eps) if self._goes_on_normed else None,
        )
        self._rank.follow(proposer)
        return proposer


def _load(path: Path, native: NativeTarget) -> tuple[MTPHead, ModelConfig, bool]:
    target = native.config
    if not is_served_by_mtp(target.architecture):
        served = ", ".join(filter(is_served_by_mtp, ARCHITECTURES))
        raise ConfigError(
            f"speculative_config: method mtp serves {served}, and "
            f"{target.name} is a {target.architecture}"
        )
    if is_engine_folder(path):
        raise ConfigError(
            f"speculative_config: {path} is an engine folder, which has no MTP modules: give the "
            "checkpoint that it was built from as the model of speculative_config"
        )
    checkpoint = open_checkpoint(path)
    layout = next(
        (
            layout
            for layout in (_deepseek(target.num_layers), _QWEN)
            if layout.tensor("eh_proj.weight") in checkpoint.tensors
        ),
        None,
    )
    if layout is None:
        raise ConfigError(f"speculative_config: method mtp: {path} has no MTP module")
    experts = target.experts and replace(target.experts, layers=target.experts.layers[-1:])
    layer = replace(target, num_layers=1, layer_windows=(None,), experts=experts)
    head = MTPHead(layer)
    head.embed_tokens.weight, head.embed_tokens.scale = native.share_embedding(
        head.embed_tokens.weight
    )
    head.lm_head.weight = native.share_head(head.lm_head.weight)
    tensors = CheckpointTensors(checkpoint)
    head.eh_proj.load(tensors, layout.tensor("eh_proj.weight"))
    for name, parameter in named_parameters(head):
        if not parameter.is_loaded:
            tensors.fill(parameter, layout.tensor(name))
    return head, layer, layout.goes_on_normed
