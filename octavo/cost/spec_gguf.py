"""ModelSpec from the metadata and the tensor table of a GGUF file.

Which tensors there are says what a layer is made of, whatever the architecture is called; metadata
have what shapes do not tell: heads, experts of a token, windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.cost.mixers import Attention, LatentAttention, Mixer
from octavo.cost.mlps import DenseMlp, ExpertMlp, Mlp
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.recurrences import GatedDeltaNet, Mamba1, Mamba2, ShortConvolution
from octavo.cost.weight_shape import WeightShape
from octavo.models.registry import why_gguf_not_run
from octavo.models.sliding_windows import gguf_windows

_MAX_LAYERS = 1024
# Every so many layers one sees everything, where a file has a window and does not say which have.
_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma4": 6,
    "gpt-oss": 2,
    "cohere2": 4,
    "llama4": 4,
}
_DEFAULT_WINDOWS = {"llama4": 8192}
_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_norm_2")
_OTHER_NORMS = ("attn_post_norm", "ffn_post_norm", "attn_output_norm", "layer_output_norm",
                "post_norm", "laurel_post_norm", "altup_router_norm", "altup_correct_scale",
                "altup_correct_coef", "altup_predict_coef", "layer_output_scale")  # fmt: skip
# What only Gemma 3n and 4 have beside the rest of a layer, and before all layers.
_BESIDE = ("inp_gate", "proj", "laurel_l", "laurel_r", "altup_router")
_INPUTS = ("per_layer_model_proj", "altup_proj", "altup_unembd_proj")

Shapes = Mapping[str, tuple[int, ...]]


def spec_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    path: str | Path = "model.gguf",
) -> ModelSpec:
    """Read the metadata of a GGUF file and its table of tensors, each of which has a ``shape``.

    ``path`` is for error messages; for the errors see `spec_hf.spec_from_hf`.
    """
    path = Path(path)
    general = Fields(path, metadata, "general.")
    kind = general.text("architecture")
    fields = Fields(path, metadata, f"{kind}.")
    shapes = {name: tuple(int(size) for size in entry.shape) for name, entry in tensors.items()}
    vocab_size, hidden = _sizes_of(shapes, "token_embd.weight", 2, path)
    num_layers = fields.integer("block_count", maximum=_MAX_LAYERS)
    windows = gguf_windows(fields, num_layers, _PATTERNS.get(kind, 0), _DEFAULT_WINDOWS.get(kind))
    layers: dict[LayerSpec, LayerSpec] = {}  # layers alike are one object
    made = [
        _Layer(fields, _of_layer(shapes, i), i).spec(hidden, windows[i]) for i in range(num_layers)
    ]
    return ModelSpec(
        name=general.text("name", "") or path.stem,
        hidden_size=hidden,
        vocab_size=vocab_size,
        layers=tuple(layers.setdefault(layer, layer) for layer in made),
        tie_embeddings="output.weight" not in shapes,
        max_position=fields.integer("context_length", 2048),
        final_norm_size=_sizes(shapes, "output_norm", "token_embd_norm"),
        learned_positions=shapes.get("position_embd.weight", (0,))[0],
        head_bias="output.bias" in shapes,
        inputs=tuple(_inputs(shapes)),
        dtype="float16",
        why_not_run=why_gguf_not_run(kind),
    )


def _of_layer(shapes: Shapes, index: int) -> Shapes:
    prefix = f"blk.{index}."
    return {name.removeprefix(prefix): s for name, s in shapes.items() if name.startswith(prefix)}


def _sizes_of(shapes: Shapes, name: str, count: int, path: Path) -> tuple[int, ...]:
    """Find a tensor that must be there."""
    if name not in shapes:
        raise ModelFileError(path, f"the tensor {name} is missing")
    if len(shapes[name]) != count:
        raise ModelFileError(path, f"{count} dimensions are needed", field=name)
    return shapes[name]


def _sizes(shapes: Shapes, *names: str) -> int:
    """Values of tensors together, weights and biases, as far as they are there. Falcon-H1's
    ``ffn_norm`` is called no weight."""
    return sum(
        prod(shapes[name + kind])
        for name in names
        for kind in (".weight", ".bias", "")
        if name + kind in shapes
    )


def _matrices(shapes: Shapes, names: Iterable[str], op: str) -> Iterator[WeightShape]:
    """Find those tensors that are there; several in one tensor are one."""
    for name in names:
        if (shape := shapes.get(f"{name}.weight")) is not None:
            yield WeightShape(name, "mlp", prod(shape[:-1]), shape[-1], f"{op}.{name}")


def _inputs(shapes: Shapes) -> Iterator[WeightShape]:
    if len(shape := shapes.get("per_layer_token_embd.weight", ())) == 2:
        yield WeightShape("per_layer_token_embd", "embedding", shape[0], shape[1])
    if size := _sizes(shapes, "per_layer_proj_norm"):
        yield WeightShape("per_layer_proj_norm", "norm", size)
    yield from _matrices(shapes, _INPUTS, "inputs")


class _Layer:
    """One layer as its tensors have it."""

    def __init__(self, fields: Fields, shapes: Shapes, index: int):
        self._fields, self._shapes, self._index = fields, shapes, index

    def spec(self, hidden: int, window: int | None) -> LayerSpec:
        mixers: list[Mixer] = []
        if "ssm_conv1d.weight" in self._shapes:
            if self._has("attn_q"):  # side by side, as in Falcon-H1
                mixers.append(self._attention(hidden, window))
            mixers.append(self._recurrence())
        elif "shortconv.conv.weight" in self._shapes:
            kernel = self._sizes_of("shortconv.conv.weight", 2)[1]
            mixers.append(ShortConvolution(size=hidden, kernel=kernel))
        elif "attn_kv_a_mqa.weight" in self._shapes:
            mixers.append(self._latent_attention())
        elif self._has("attn_q") or self._has("attn_qkv"):
            mixers.append(self._attention(hidden, window))
        norms = _sizes(self._shapes, *_NORMS, *_OTHER_NORMS)
        beside = tuple(_matrices(self._shapes, _BESIDE, "beside"))
        return LayerSpec(
            mixers=tuple(mixers),
            mlp=self._mlp(hidden),
            norm_size=norms,
            beside=beside,
            has_last_norm="post_ffw_norm.weight" in self._shapes,
        )

    def _attention(self, hidden: int, window: int | None) -> Attention:
        heads = self._of_layers("attention.head_count")
        head_dim = self._length("key", window, max(1, hidden // heads))
        value_dim = self._length("value", window, head_dim)
        queries = self._shapes.get("attn_q.weight", (heads * head_dim,))[0]
        kv_heads = self._of_layers("attention.head_count_kv", heads)
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=0 if value_dim == head_dim else value_dim,
            window=window,
            qkv_bias="attn_q.bias" in self._shapes or "attn_qkv.bias" in self._shapes,
            output_bias="attn_output.bias" in self._shapes,
            qk_norm_size=_sizes(self._shapes, "attn_q_norm", "attn_k_norm"),
            has_output_gate=queries == 2 * heads * head_dim,
            value_is_key=self._has("attn_k") and not self._has("attn_v"),
            borrows_kv=self._borrows_kv,
            num_sinks=self._shapes.get("attn_sinks.weight", (0,))[0],
        )

    def _length(self, name: str, window: int | None, default: int) -> int:
        """Sizes of a head; layers with windows may have their own."""
        length = int(self._fields.integer(f"attention.{name}_length", default))
        if window is None:
            return length
        return int(self._fields.integer(f"attention.{name}_length_swa", length))

    @property
    def _borrows_kv(self) -> bool:
        """Whether this is one of the last layers, whose keys and values are of those before."""
        borrowing = self._fields.integer("attention.shared_kv_layers", 0, minimum=0)
        return bool(self._index >= self._fields.integer("block_count") - borrowing)

    def _latent_attention(self) -> LatentAttention:
        kv_rank = self._fields.integer("attention.kv_lora_rank")
        rope = self._fields.integer("rope.dimension_count")
        key = self._fields.integer(
            "attention.key_length_mla", self._fields.integer("attention.key_length")
        )
        value = self._fields.integer(
            "attention.value_length_mla", self._fields.integer("attention.value_length")
        )
        return LatentAttention(
            heads=self._of_layers("attention.head_count"),
            kv_rank=kv_rank,
            nope_dim=key - rope,
            rope_dim=rope,
            value_dim=value,
            q_rank=self._fields.integer("attention.q_lora_rank", 0, minimum=0) or None,
        )

    def _recurrence(self) -> Mixer:
        ssm = self._fields
        heads, inner = ssm.integer("ssm.time_step_rank"), ssm.integer("ssm.inner_size")
        state, groups = ssm.integer("ssm.state_size"), ssm.integer("ssm.group_count", 1)
        kernel = ssm.integer("ssm.conv_kernel")
        has_conv_bias = "ssm_conv1d.bias" in self._shapes
        if any(self._has(name) for name in ("ssm_ba", "ssm_beta", "ssm_beta_alpha")):
            return GatedDeltaNet(
                heads=heads,
                key_heads=groups,
                key_dim=state,
                value_dim=inner // heads,
                kernel=kernel,
            )
        if "ssm_x.weight" in self._shapes:
            return Mamba1(
                inner=inner,
                state_dim=state,
                step_rank=heads,
                kernel=kernel,
                has_conv_bias=has_conv_bias,
                has_norms=self._has("ssm_dt_norm"),
            )
        return Mamba2(
            heads=heads,
            head_dim=inner // heads,
            state_dim=state,
            groups=groups,
            kernel=kernel,
            has_conv_bias=has_conv_bias,
            norm_size=_sizes(self._shapes, "ssm_norm"),
        )

    def _mlp(self, hidden: int) -> Mlp | None:
        if not self._has("ffn_gate_inp"):
            return self._dense("ffn_{}", hidden)
        shared = self._dense("ffn_{}_shexp", hidden)
        count, inner, _ = self._sizes_of("ffn_up_exps.weight", 3)
        return ExpertMlp(
            num_experts=count,
            per_token=self._fields.integer("expert_used_count"),
            inner=inner,
            is_gated=self._has("ffn_gate_exps"),
            has_bias="ffn_up_exps.bias" in self._shapes,
            router_bias="ffn_gate_inp.bias" in self._shapes or "exp_probs_b.bias" in self._shapes,
            shared=shared,
            has_shared_gate=self._has("ffn_gate_inp_shexp"),
        )

    def _dense(self, name: str, hidden: int) -> DenseMlp | None:
        if not self._has(name.format("down")):
            return None
        down = self._sizes_of(name.format("down") + ".weight", 2)
        up = self._sizes_of(name.format("up") + ".weight", 2)
        is_fused = up[0] == 2 * down[1]  # both matrices in one, as Phi-3 has them
        has_bias = f"{name.format('up')}.bias" in self._shapes
        is_gated = self._has(name.format("gate")) or is_fused
        return DenseMlp(inner=down[1], is_gated=is_gated, has_bias=has_bias)

    def _sizes_of(self, name: str, count: int) -> tuple[int, ...]:
        return _sizes_of(self._shapes, name, count, self._fields.path)

    def _has(self, name: str) -> bool:
        return f"{name}.weight" in self._shapes

    def _of_layers(self, name: str, default: int | None = None) -> int:
        """A number that some files give for each layer, some once."""
        if self._fields.has_list(name):
            return int(self._fields.each(name, partial(Fields.integer, minimum=0))[self._index])
        given = () if default is None else (default,)
        return int(self._fields.integer(name, *given))
