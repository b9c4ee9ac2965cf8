"""Whether a checkpoint is all that its config makes of it, seen before anybody loads it.

    report = inspect_model("folder")          or a GGUF file
    report.problems                           what is missing, left over, of another shape

Tables are compared, of names, shapes and types. No weight is read, but the scales of those that
several tensors make up, since only they say what shape that has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.base.errors import ModelError
from octavo.layers.module import named_parameters
from octavo.models.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from octavo.models.config import HEAD, ModelConfig
from octavo.models.pooling_files import pooling_of_checkpoint
from octavo.models.registry import is_encoder, model_class
from octavo.models.tensor_map import TensorSource, sources
from octavo.quantization.ggml_types import FLOAT_TYPES, READABLE_TYPES

Kind = Literal["unreadable", "missing", "left over", "twice", "shape", "type"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that loading would stumble over.

    ``name``: of a tensor as the file has it, or of a parameter that no tensor is for; empty where
    the files cannot be read at all, or ask for what octavo does not have.
    """

    kind: Kind
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Result of a check: the model that a checkpoint says it has, and what is wrong with it.

    ``architecture`` is None where its config cannot be read. ``notes`` are what is to be known of a
    model in which nothing is wrong.
    """

    path: str
    architecture: str | None
    quantization: str | None
    num_tensors: int
    num_bytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


def inspect_model(path: str | Path) -> ModelReport:
    """Look over the checkpoint at ``path``. Nothing that is wrong with it is an error here."""
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        return ModelReport(str(path), None, None, 0, 0, (Problem("unreadable", "", f"{error}"),))
    architecture: str | None = None
    notes: tuple[str, ...] = ()
    try:
        config = checkpoint.config()
        architecture = config.architecture
        notes = tuple(filter(None, (config.length_note,)))
        problems = tuple(_problems(checkpoint, config))
    except ModelError as error:
        problems = (Problem("unreadable", "", f"{error}"),)
    return ModelReport(
        path=str(path),
        architecture=architecture,
        quantization=checkpoint.quantization,
        num_tensors=len(checkpoint.tensors),
        num_bytes=sum(entry.num_bytes for entry in checkpoint.tensors.values()),
        problems=problems,
        notes=notes,
    )


def _problems(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[Problem]:
    model = model_class(config.architecture)(config)
    wanted = {name: parameter.shape for name, parameter in named_parameters(model)}
    pooling = pooling_of_checkpoint(checkpoint, is_encoder=is_encoder(config.architecture))
    if config.tie_embeddings or pooling is not None:
        wanted.pop(HEAD, None)
    of_others = set() if pooling is None else {HEAD, *pooling.tensors}
    found: dict[str, str] = {}
    for name, source in sources(checkpoint, config):
        entry = checkpoint.tensors[source.tensor]
        if name is None or not of_others.isdisjoint((name, source.tensor)):
            continue
        if name not in wanted:
            reason = f"a {config.architecture} like this has no {name}"
            yield Problem("left over", source.tensor, reason)
        elif name in found:
            yield Problem("twice", source.tensor, f"{found[name]} is for {name} too")
        else:
            yield from _mismatches(checkpoint, source, entry, name, wanted)
        found.setdefault(name, source.tensor)
    for name in wanted:
        if name not in found:
            yield Problem("missing", name, f"{list(wanted[name])}: no tensor is for it")


def _mismatches(
    checkpoint: Checkpoint,
    source: TensorSource,
    entry: TensorEntry,
    name: str,
    wanted: Mapping[str, tuple[int, ...]],
) -> Iterator[Problem]:
    if entry.type is not None and entry.type not in READABLE_TYPES:
        yield Problem("type", source.tensor, f"tensors of {entry.type.name} cannot be read")
        return
    shape = _shape(checkpoint, source, entry)
    if shape != wanted[name]:
        reason = f"{list(shape)} for {name}, which is {list(wanted[name])}"
        yield Problem("shape", source.tensor, reason)


def _shape(checkpoint: Checkpoint, source: TensorSource, entry: TensorEntry) -> tuple[int, ...]:
    """The shape of the part of a tensor that a parameter takes."""
    if source.further:
        return source.read(checkpoint).shape
    shape = entry.shape or checkpoint.read(source.tensor).shape
    return source.shape(tuple(shape), is_quantized=entry.type not in FLOAT_TYPES)
