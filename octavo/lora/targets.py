"""The parameters that an adapter changes, of the modules that it was trained for.

PEFT calls modules as Hugging Face's model does. Octavo's parameters may be some rows of these (of a
fused ``qkv_proj``), or have them in another order (of a GGUF file, or where heads are kept apart):
the same happens to the rows of B, since each is of an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.lora.peft_folder import ModuleChange, PeftFolder
from octavo.models.config import EMBEDDING, ModelConfig
from octavo.models.family import EACH, Family
from octavo.models.parameters import rope_row_order, rotated_rows
from octavo.models.registry import family_of

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change ``scale`` b a of a parameter of N outputs and K inputs: a is float32 [r, K], b
    float32 [N, r]. The embedding's inputs are tokens, so that its change is the transpose."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    def product(self) -> np.ndarray:
        """Return the change as a matrix, float32 [N, K]."""
        product: np.ndarray = (self.b @ self.a) * np.float32(self.scale)
        return product


@dataclass(frozen=True, slots=True)
class AdaptableModel:
    """A model that adapters may change.

    Args:
        shapes: (outputs, inputs) of each parameter that they may change, by name; the inputs of the
            embedding are tokens.
        is_gguf: it was read from a GGUF file.
    """

    config: ModelConfig
    shapes: Mapping[str, Shape]
    is_gguf: bool = False


def changes_of(folder: PeftFolder, model: AdaptableModel) -> dict[str, LowRank]:
    """Return the changes of an adapter by the names of parameters.

    Raises:
        ModelFileError: a module is none of the model's, or of another shape.
        UnsupportedModelError: a module is one that adapters cannot change here.
    """
    found: dict[str, LowRank] = {}
    for change in folder.changes():
        for parameter, low_rank in _of_module(change, folder, model):
            if parameter in found:
                raise _error(folder, change, f"a second change of {parameter}")
            found[parameter] = low_rank
    return found


def _of_module(
    change: ModuleChange, folder: PeftFolder, model: AdaptableModel
) -> Iterator[tuple[str, LowRank]]:
    family = family_of(model.config.architecture)
    names = family.hf_names
    named = names.parameter(f"{change.module}.weight") or ""
    parts = family.parts(named, names)
    for part in parts:
        if part not in model.shapes:
            raise _error(folder, change, _why_not(part, model))
        if (part == EMBEDDING) != change.is_embedding:
            raise _error(
                folder, change, "lora_embedding_A and B are for embeddings, and for these alone"
            )
    a, b = change.a.floats(), change.b.floats()
    sizes = [model.shapes[part] for part in parts]
    wanted = sum(rows for rows, _ in sizes), sizes[0][1]
    if (len(b), a.shape[1]) != wanted:
        raise _error(
            folder,
            change,
            f"A {list(a.shape)} and B {list(b.shape)} are of a weight {[len(b), a.shape[1]]}, and "
            f"the model's is {list(wanted)}: the adapter is of another model",
        )
    order = family.row_order(model.config, named)
    if order is not None:
        b = b[order]
    ends = list(accumulate((rows for rows, _ in sizes), initial=0))
    for index, part in enumerate(parts):
        if names.values_of(part) is not None or EACH in part:
            raise UnsupportedModelError(f"{folder.path}: adapters cannot change {change.module}")
        is_in_turn = names.is_interleaved(named)
        rows = b[index :: len(parts)] if is_in_turn else b[ends[index] : ends[index + 1]]
        rows = _in_order(part, rows, folder, family, model)
        yield part, LowRank(a, np.ascontiguousarray(rows), change.scale)


def _in_order(
    part: str, rows: np.ndarray, folder: PeftFolder, family: Family, model: AdaptableModel
) -> np.ndarray:
    """Return rows as the model's file has them."""
    config = model.config
    if model.is_gguf and family.gguf_factors(config, part) is not None:
        raise UnsupportedModelError(
            f"{folder.path}: the GGUF file has {part} scaled, so that this adapter does not fit: "
            "load the model's folder of safetensors"
        )
    rotated = rotated_rows(part, config)
    if rotated is None or config.rope.interleaved == family.hf_interleaved:
        return rows
    return rows[rope_row_order(len(rows), *rotated, config.rope)]


def _why_not(part: str, model: AdaptableModel) -> str:
    if ".experts." in part or EACH in part or part.endswith((".gate.weight", "kv_b_proj.weight")):
        return "adapters cannot change experts, routers and latent vectors (kv_b_proj) here"
    return f"a {model.config.architecture} like this has no linear or embedding of this name"


def _error(folder: PeftFolder, change: ModuleChange, reason: str) -> ModelFileError:
    return ModelFileError(folder.path, reason, field=f"{change.module:.200}")
