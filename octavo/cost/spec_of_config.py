"""The `ModelSpec` of a model that octavo runs, from the modules that it is made of.

A family declares its model once, as the modules that compute it (`octavo.models`). They are made
here without a weight, one layer of each kind, and each becomes the part of a spec that has the same
tensors. So a model that runs can be planned, whatever its config calls things.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from octavo.base.errors import UnsupportedModelError
from octavo.cost.mixers import Attention, LatentAttention, Mixer
from octavo.cost.mlps import DenseMlp, ExpertMlp, Mlp
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.recurrences import GatedDeltaNet, Mamba2, ShortConvolution
from octavo.layers import attention, experts, latent_attention, mlp, recurrent
from octavo.layers.gated_attention import GatedAttention
from octavo.layers.module import Module, named_parameters
from octavo.models.config import ModelConfig
from octavo.models.decoder import DecoderForCausalLM
from octavo.models.registry import is_encoder, model_class

_MIXERS = (
    *(attention.Attention, latent_attention.LatentAttention, recurrent.ShortConv),
    *(recurrent.Mamba2, recurrent.GatedDeltaNet),
)
_LAST_NORM = "post_feedforward_layernorm"  # as all families call it
_MLPS = (mlp.GatedMLP, mlp.PlainMLP, experts.ExpertMLPs)


def spec_of_config(config: ModelConfig) -> ModelSpec:
    """The shape of a model that octavo runs; UnsupportedModelError for an encoder."""
    model = model_class(config.architecture)
    if is_encoder(config.architecture):
        raise UnsupportedModelError(
            f"{config.name} is an encoder ({config.architecture}), which generates nothing: plans "
            "are for models that generate"
        )
    assert issubclass(model, DecoderForCausalLM), model
    kinds: dict[tuple[object, ...], LayerSpec] = {}
    layers = []
    for index in range(config.num_layers):
        kind = _kind(config, index)
        if kind not in kinds:
            kinds[kind] = _layer(model.layer_type(config, index), config)
        layers.append(kinds[kind])
    alike: dict[LayerSpec, LayerSpec] = {}  # layers alike are one object
    return ModelSpec(
        name=config.name,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=tuple(alike.setdefault(layer, layer) for layer in layers),
        tie_embeddings=config.tie_embeddings,
        max_position=config.max_position,
        final_norm_size=_size(model.make_norm(config)),
        learned_positions=config.learned_positions or 0,
    )


def _kind(config: ModelConfig, index: int) -> tuple[object, ...]:
    """A key that is equal for two layers of the same modules and sizes, of which one is made."""
    has_experts = config.experts is not None and config.experts.layers[index]
    is_unrotated = index in config.unrotated_layers
    return config.layer_windows[index], config.attends(index), has_experts, is_unrotated


def _layer(layer: Module, config: ModelConfig) -> LayerSpec:
    parts = list(_parts(layer))
    mixers = [_mixer(part, config) for part in parts if isinstance(part, _MIXERS)]
    mlps = [_mlp(part) for part in parts if isinstance(part, _MLPS)]
    assert len(mlps) <= 1, "a layer has one MLP, or experts"
    norms = sum(_size(part) for part in parts if not isinstance(part, _MIXERS + _MLPS))
    return LayerSpec(
        mixers=tuple(mixers),
        mlp=mlps[0] if mlps else None,
        norm_size=norms,
        has_last_norm=any(name == _LAST_NORM for name, _ in layer.children()),
    )


def _parts(module: Module) -> Iterator[Module]:
    """The mixers and MLPs in a layer, and the modules beside them that have no parts."""
    for _, child in module.children():
        if isinstance(child, _MIXERS + _MLPS) or not list(child.children()):
            yield child
        else:
            yield from _parts(child)


def _mixer(module: Module, config: ModelConfig) -> Mixer:
    if isinstance(module, attention.Attention):
        return _attention(module)
    if isinstance(module, latent_attention.LatentAttention):
        latent = module.latent
        return LatentAttention(
            heads=module.num_heads,
            kv_rank=latent.kv_rank,
            nope_dim=latent.nope_dim,
            rope_dim=latent.rope_dim,
            value_dim=latent.value_dim,
            q_rank=latent.q_rank,
            has_bias=module.o_proj.bias is not None,
        )
    return _recurrence(config)


def _attention(module: attention.Attention) -> Attention:
    norms = [norm for norm in (module.q_norm, module.k_norm) if norm is not None]
    assert isinstance(module.q_proj, attention.Linear)
    return Attention(
        heads=module.num_heads,
        kv_heads=module.num_kv_heads,
        head_dim=module.head_dim,
        window=module.window,
        qkv_bias=module.q_proj.bias is not None,
        output_bias=module.o_proj.bias is not None,
        qk_norm_size=sum(map(_size, norms)),
        has_output_gate=isinstance(module, GatedAttention),
        num_sinks=0 if module.sinks is None else module.num_heads,
    )


def _recurrence(config: ModelConfig) -> Mixer:
    """The recurrent mixer, by the config: all recurrent layers of a model have the same sizes."""
    recurrence = config.recurrence
    assert recurrence is not None
    conv, norm = recurrence.conv, recurrence.norm
    if (mamba := recurrence.mamba) is not None:
        return Mamba2(
            heads=mamba.heads,
            head_dim=mamba.head_dim,
            state_dim=mamba.state_dim,
            groups=mamba.groups,
            kernel=conv.kernel,
            has_conv_bias=recurrence.conv_bias,
            has_proj_bias=recurrence.proj_bias,
            norm_size=norm.width if norm is not None and norm.normed else 0,
        )
    if (delta := recurrence.delta) is not None:
        return GatedDeltaNet(
            heads=delta.value_heads,
            key_heads=delta.key_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            kernel=conv.kernel,
        )
    return ShortConvolution(size=conv.channels, kernel=conv.kernel, has_bias=recurrence.conv_bias)


def _mlp(module: Module) -> Mlp:
    if not isinstance(module, experts.ExpertMLPs):
        return _dense(module)
    expert, router, shared = _dense(module.experts[0]), module.gate, module.shared_experts
    return ExpertMlp(
        num_experts=module.routing.num_experts,
        per_token=module.routing.top_k,
        inner=expert.inner,
        is_gated=expert.is_gated,
        has_bias=expert.has_bias,
        router_bias=router.bias is not None or router.e_score_correction_bias is not None,
        shared=None if shared is None else _dense(shared),
        has_shared_gate=module.shared_expert_gate is not None,
    )


def _dense(module: Module) -> DenseMlp:
    assert isinstance(module, mlp.GatedMLP | mlp.PlainMLP)
    up = module.up_proj
    return DenseMlp(
        inner=up.weight.shape[0],
        is_gated=isinstance(module, mlp.GatedMLP),
        has_bias=up.bias is not None,
    )


def _size(module: Module) -> int:
    """Values of all parameters of a module."""
    return sum(prod(parameter.shape) for _, parameter in named_parameters(module))
