"""``adapter_config.json`` of PEFT: the scale of each module's change, and what octavo cannot do.

A key that would change answers and is not understood is an error. Names are PEFT's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.base.fields import Fields
from octavo.lora.limits import MAX_RANK

# Keys of training, of where weights came from, and of what the tensors say themselves.
_MEANINGLESS = frozenset(
    (
        *("lora_dropout", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"),
        *("peft_version", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("runtime_config", "layers_to_transform", "layers_pattern", "exclude_modules"),
        *("fan_in_fan_out", "qalora_group_size", "megatron_core"),
    )
)
# Variants whose change of a weight is no product of two matrices, or which change something else.
_VARIANTS = {
    "use_dora": "DoRA normalizes the changed weights",
    "modules_to_save": "whole modules are replaced",
    "lora_bias": "B has a bias",
    "use_qalora": "QALoRA pools the inputs of A",
    "use_bdlora": "BD-LoRA has matrices of blocks",
    "layer_replication": "layers are repeated",
    "trainable_token_indices": "rows of the embedding are replaced",
    "target_parameters": "parameters that are no weight of a linear, such as stacked experts",
    "alora_invocation_tokens": "aLoRA begins at some tokens",
    "megatron_config": "Megatron's layers are divided",
    "ensure_weight_tying": "a tied head is changed too",
    "kasa_config": "KaSA has singular values of its own",
    "arrow_config": "Arrow routes tokens among adapters",
    "monteclora_config": "MonteCLoRA samples its matrices",
    "velora_config": "VeLoRA projects its inputs",
}
_MERGE = "merge it into the model with PEFT (merge_and_unload), and load that"
# With these, PEFT changes the model's own weights before training.
_KEPT_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal")
_PLAIN_NAME = re.compile(r"\^?(?:[\w-]|\\?\.)+")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of an adapter that say how large its changes are.

    ``targets``: names in ``target_modules``, if it is a list of such.
    """

    path: Path
    rank: int
    alpha: float
    is_stabilized: bool  # rslora: by the root of the rank
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_key_of(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of B A, for a module by its name in the base model."""
        alpha = self.alpha_pattern.get(_key_of(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_stabilized else rank)

    def is_target(self, name: str, module: str) -> bool:
        """Whether a name in ``targets`` means a module: it is the end of its name."""
        return _means(name, module)


def read_config(path: Path, values: Mapping[str, Any]) -> PeftConfig:
    """Read the settings of ``adapter_config.json`` at ``path``.

    Raises:
        ModelFileError: a value is out of range, or a key is not known.
        UnsupportedModelError: the adapter is of a kind that octavo does not have.
    """
    fields = Fields(path, values)
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type {kind!r:.40} is not supported, but LORA is")
    task = fields.raw("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedModelError(
            f"{path}: task_type {task!r:.40} is not supported, but CAUSAL_LM is"
        )
    for name, why in _VARIANTS.items():
        if fields.raw(name):
            raise UnsupportedModelError(f"{path}: {name} is not supported ({why}): {_MERGE}")
    if fields.text("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias is not supported (it is replaced): {_MERGE}")
    beginning = fields.raw("init_lora_weights", True)
    if not any(beginning is kept or beginning == kept for kept in _KEPT_WEIGHTS):
        raise UnsupportedModelError(
            f"{path}: init_lora_weights {beginning!r:.40} is not supported (it changes the model's "
            "own weights): have PEFT convert it when it is saved "
            "(path_initial_model_for_weight_conversion)"
        )
    config = PeftConfig(
        path,
        fields.integer("r", maximum=MAX_RANK),
        fields.number("lora_alpha"),
        fields.boolean("use_rslora", False),
        _pattern(fields, "rank_pattern", lambda each, key: each.integer(key, maximum=MAX_RANK)),
        _pattern(fields, "alpha_pattern", lambda each, key: each.number(key)),
        _targets(fields),
    )
    _refuse_unread(fields, values)
    return config


def _pattern(fields: Fields, name: str, read: Any) -> dict[str, Any]:
    """Return the entries of a pattern by module names. PEFT takes these for regular expressions,
    which files of others should not have evaluated here."""
    table = fields.section(name, {})
    found = {}
    for key in table:
        if not _PLAIN_NAME.fullmatch(key):
            raise UnsupportedModelError(
                f"{fields.path} ({name}): {key!r:.80} is a regular expression: write the names of "
                "modules, or the ends of them"
            )
        found[key] = read(table, key)
    return found


def _targets(fields: Fields) -> tuple[str, ...]:
    """A text is "all-linear" or a regular expression: then the tensors say which modules it is."""
    named = fields.raw("target_modules")
    if named is None or isinstance(named, str):
        return ()
    return tuple(fields.texts("target_modules"))


def _key_of(pattern: Mapping[str, Any], module: str) -> str:
    return next((key for key in pattern if _means(key, module)), "")


def _means(name: str, module: str) -> bool:
    plain = name.removeprefix("^").replace("\\.", ".")
    is_end = not name.startswith("^") and module.endswith(f".{plain}")
    return module == plain or is_end


def _refuse_unread(fields: Fields, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        is_read = key in fields.asked or key in _MEANINGLESS
        if not is_read and value not in (None, False, [], {}, ""):
            raise ModelFileError(
                fields.path, "octavo does not know this setting of an adapter", field=f"{key:.80}"
            )
