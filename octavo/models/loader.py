"""Loads a checkpoint into a model: every parameter gets its tensor, and no tensor is left over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from octavo.base.errors import ModelFileError
from octavo.layers.module import Module, named_parameters
from octavo.layers.parameter import ShapeMismatch
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import EMBEDDING, HEAD, ModelConfig
from octavo.models.registry import CausalLM, model_class
from octavo.models.tensor_map import sources
from octavo.quantization.base import Weight

Progress = Callable[[int, int], None]


def load_checkpoint(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    progress: Progress | None = None,
) -> CausalLM:
    """The model of an open checkpoint.

    Weights are views of the mapped files in their own format, and are read from disk when they are
    first used. ``progress`` is called with the bytes done and their total after each tensor.
    ModelFileError if tensors are missing, left over or of another shape than the config makes them;
    UnsupportedModelError if octavo cannot run the model.
    """
    model: CausalLM = model_class(config.architecture)(config)
    _load_parameters(model, config, checkpoint, progress)
    return model


def load_without_head(
    checkpoint: Checkpoint,
    config: ModelConfig,
    unread: Collection[str] = (),
    *,
    progress: Progress | None = None,
) -> CausalLM:
    """The same of a model that is used without its head, which the files may lack.

    ``unread``: names of tensors that others read.
    """
    model: CausalLM = model_class(config.architecture)(config)
    vars(model).pop("lm_head", None)  # encoders have none
    _load_parameters(model, config, checkpoint, progress, unread)
    return model


def weights_bytes(model: CausalLM) -> int:
    """Bytes of a model's weights, a tied one counted once."""
    assert isinstance(model, Module)
    values = {id(p.value): p.value.nbytes for _, p in named_parameters(model)}
    return sum(values.values())


def _load_parameters(
    model: CausalLM,
    config: ModelConfig,
    checkpoint: Checkpoint,
    progress: Progress | None,
    unread: Collection[str] = (),
) -> None:
    assert isinstance(model, Module)
    parameters = dict(named_parameters(model))
    has_head = HEAD in parameters
    if config.tie_embeddings:
        parameters.pop(HEAD, None)
    leftover = []
    for source, name, weight in _stream(checkpoint, config, progress):
        parameter = parameters.get(name)
        if parameter is None:
            if source in unread or (name == HEAD and not has_head):
                continue
            if not _changes_nothing(source, weight):
                leftover.append(source)
            continue
        where = checkpoint.tensors[source].path
        if parameter.is_loaded:
            raise ModelFileError(where, f"a second tensor for {name}", field=source)
        try:
            parameter.load(weight)
        except ShapeMismatch as error:
            raise ModelFileError(where, f"{error}", field=source) from None
    missing = [name for name, parameter in parameters.items() if not parameter.is_loaded]
    if missing:
        raise ModelFileError(checkpoint.path, f"tensors are missing: {', '.join(missing)}")
    if leftover:
        raise ModelFileError(
            checkpoint.path,
            f"tensors that a {config.architecture} does not have: {', '.join(leftover)}",
        )
    if config.tie_embeddings and has_head:
        head = dict(named_parameters(model))[HEAD]
        head.share(parameters[EMBEDDING])


def _stream(
    checkpoint: Checkpoint, config: ModelConfig, progress: Progress | None
) -> Iterator[tuple[str, str, Weight]]:
    """(name in the checkpoint, name of the parameter, weight) of each tensor that is needed."""
    total = sum(entry.num_bytes for entry in checkpoint.tensors.values())
    done, last = 0, None
    for name, source in sources(checkpoint, config):
        if name is not None:
            yield source.tensor, name, source.read(checkpoint)
        if source.tensor != last:  # the parts of one follow each other
            last = source.tensor
            done += checkpoint.tensors[last].num_bytes
        if progress is not None:
            progress(done, total)


def _changes_nothing(name: str, weight: Weight) -> bool:
    """Whether it is a bias of zeros: AutoGPTQ gives one to layers that have none."""
    return name.endswith(".bias") and not weight.is_quantized and not weight.floats().any()
