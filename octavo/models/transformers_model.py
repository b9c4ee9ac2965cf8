"""Any causal language model of transformers as a :class:`octavo.models.registry.CausalLM`.

Everything but attention is done as transformers does it. Its models call attention by a name, for
which a function can be registered (``AttentionInterface``): under the name of ours, the queries,
keys and values of each layer go to the paged cache of the step. Batches are ragged: all tokens of a
step come as one sequence with positions of their own, and no mask is made.

So a model can be run if all of its layers have causal attention, over all positions or those of a
window, and nothing but a token's position tells it from others. What is known to be otherwise is
refused, by what the config says and by what the layers ask for in a first pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from octavo.base.errors import ModelFileError, OctavoError, UnsupportedModelError
from octavo.layers.context import ForwardContext
from octavo.models.config_transformers import SeenAttention

_ATTENTION = "octavo"
_OWNER = "octavo_model"  # an attribute of layers: the model whose step they are run by
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Ropes by the longest position of a step: tokens of other requests would be turned by it.
_ROPES_OF_BATCHES = {"dynamic", "longrope"}
# What layers may hand to attention that changes its result, and that ours does not know.
_UNKNOWN_TERMS = ("position_bias", "head_mask")


# A layer's index, q [T, H, D], k [T, Hk, D], v [T, Hk, Dv], the scale, and what else it says:
# attended, [T, H, Dv].
Attend = Callable[[int, Tensor, Tensor, Tensor, float, dict[str, Any]], Tensor]


class TransformersModel:
    """A loaded model. ``seen`` has the attention of each layer, in their order.

    Raises:
        UnsupportedModelError: it does not fit a paged cache.
    """

    def __init__(self, model: PreTrainedModel, where: Path):
        self.model = model
        self._where = where
        self._body = model.get_decoder()
        name = next((name for name, part in model.named_modules() if part is self._body), "")
        if not name:
            raise self._unsupported("its head cannot be told from its body")
        self._given = _Given()
        self._head = _with_part(model, name, self._given)
        self._attend: Attend = self._refuse_attention
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _OWNER, self)
        self.seen = self._look()

    def __call__(self, token_ids: Any, ctx: ForwardContext) -> Tensor:
        """See :class:`octavo.models.registry.CausalLM`."""

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, terms: dict[str, Any]
        ) -> Tensor:
            value_dim = v.shape[-1]
            if value_dim < k.shape[-1]:  # the cache has heads of one size
                v = F.pad(v, (0, k.shape[-1] - value_dim))
            attended = ctx.attention.attend(
                layer,
                q,
                k,
                v,
                scale=scale,
                window=_window(terms),
                softcap=terms.get("softcap"),
                sinks=terms.get("s_aux"),
            )
            return attended[..., :value_dim]

        return self._run(token_ids, ctx.positions, attend)

    def compute_logits(self, hidden: Any, ctx: ForwardContext) -> Tensor:
        """See :class:`octavo.models.registry.CausalLM`."""
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def exit_after(self, num_layers: int) -> TransformersModel:
        raise self._unsupported("which of its layers is the last one cannot be changed")

    def _run(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self._attend = attend
        try:
            output = self._body(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            )
        finally:
            self._attend = self._refuse_attention
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _look(self) -> list[SeenAttention]:
        """Runs two tokens, to see what the layers ask of attention."""
        found: dict[int, SeenAttention] = {}

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, terms: dict[str, Any]
        ) -> Tensor:
            for term in _UNKNOWN_TERMS:
                if terms.get(term) is not None:
                    raise self._unsupported(f"its attention has {term}")
            if v.shape[-1] > k.shape[-1]:
                raise self._unsupported("its values are wider than its keys")
            found[layer] = SeenAttention(k.shape[1], k.shape[2], v.shape[2], _window(terms))
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )
            return attended.transpose(0, 1)

        tokens = torch.arange(2, device=self.model.device)
        with torch.inference_mode():
            try:
                self._run(tokens, tokens, attend)
            except OctavoError:
                raise
            except TypeError as error:
                raise self._unsupported(f"it does not take positions of tokens ({error})") from None
            # Code of any kind: what it asks of a cache that it has not been given ends it somehow.
            except Exception as error:
                raise self._unsupported(
                    f"its first pass fails ({type(error).__name__}: {error!s:.200})"
                ) from None
        if sorted(found) != list(range(len(found))) or not found:
            raise self._unsupported(f"not all of its layers have attention, but {sorted(found)}")
        return [found[layer] for layer in range(len(found))]

    def _refuse_attention(self, *_: Any) -> Tensor:
        raise AssertionError("attention outside of a step")

    def attention_of(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, terms: Any
    ) -> Tensor:
        """Attention as transformers calls it: [1, heads, T, D] in, [1, T, H, Dv] out."""
        if not getattr(module, "is_causal", True):
            raise self._unsupported("its attention is not causal")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self._attend(module.layer_idx, q, k, v, scale, terms)[None]

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._where}: {type(self.model).__name__} of transformers cannot run on a paged "
            f"cache: {reason}"
        )


def read_config(path: Path) -> Any:
    """transformers' config of a folder. UnsupportedModelError if it has none for it, or one that a
    paged cache cannot serve."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of code for any family
        raise UnsupportedModelError(
            f"{path}: transformers cannot read it: {error!s:.400}"
        ) from None
    config = config.get_text_config(decoder=True)
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or not model.is_backend_compatible():
        reason = "is no language model" if model is None else "has its attention built in"
        raise UnsupportedModelError(f"{path}: {config.model_type} of transformers {reason}")
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise UnsupportedModelError(
            f"{path}: layers of type {', '.join(sorted(others))} do not run on a paged cache"
        )
    ropes = _rope_types(getattr(config, "rope_parameters", None) or {}) & _ROPES_OF_BATCHES
    if ropes:
        raise UnsupportedModelError(
            f"{path}: rope of type {', '.join(ropes)}, which transformers scales by the longest "
            "sequence of a batch"
        )
    return config


def load(path: Path, config: Any, device: torch.device, dtype: torch.dtype) -> TransformersModel:
    """The model of a folder with safetensors. Nothing of the folder is run as code.

    ModelFileError if weights are missing; UnsupportedModelError if it cannot be run.
    """
    model: Any
    info: dict[str, Any]
    try:
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            path,
            config=config,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of code for any family
        raise UnsupportedModelError(
            f"{path}: transformers cannot load it: {error!s:.400}"
        ) from None
    missing = sorted(info["missing_keys"])
    if missing:  # which transformers fills with random numbers
        raise ModelFileError(path, f"tensors are missing: {', '.join(missing)!s:.400}")
    return TransformersModel(model.eval().to(device), path)


class _Given(nn.Module):
    """Stands where a model has its body, and gives hidden states that were made before."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def _with_part(module: nn.Module, name: str, part: nn.Module) -> Any:
    """The module with another part under a dotted name; itself stays as it is."""
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    first, _, rest = name.partition(".")
    inner = changed._modules[first]
    assert inner is not None
    changed._modules[first] = _with_part(inner, rest, part) if rest else part
    return changed


def _window(terms: dict[str, Any]) -> int | None:
    window: int | None = terms.get("sliding_window")
    return window


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """The rope parameters, from a flat table or from one for each type of layer."""
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(table["rope_type"]) for table in tables if "rope_type" in table}


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **terms: Any,
) -> tuple[Tensor, None]:
    attended = getattr(module, _OWNER).attention_of(module, query, key, value, scaling, terms)
    return attended, None


AttentionInterface.register(_ATTENTION, _attention)
