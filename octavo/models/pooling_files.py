"""`Pooling` from the files of a model, those of sentence-transformers above all.

sentence-transformers describes a model by ``modules.json``, a list of modules, each with a folder::

    Transformer   max_seq_length in sentence_bert_config.json
    Pooling       pooling_mode_mean_tokens and so on in config.json
    Dense         activation_function in config.json, linear.weight in model.safetensors
    LayerNorm     norm.weight, norm.bias
    Normalize     nothing

and by ``config_sentence_transformers.json``, with prompts. Classes that classify have their head in
the model's own files, by ``config.json``; GGUF files have metadata.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from octavo.base.errors import ConfigError, ModelFileError, UnsupportedModelError
from octavo.base.fields import Fields
from octavo.base.model_files import ModelFolder, read_text
from octavo.models.pooling import (
    METHODS,
    Dense,
    Method,
    Norm,
    Pooling,
    ScoreActivation,
    Similarity,
    Stage,
    StageActivation,
)

if TYPE_CHECKING:
    from octavo.models.checkpoint import Checkpoint

_log = logging.getLogger("octavo")

MAX_STAGES = 16
_MAX_LABELS = 1 << 16
_MAX_PROMPT_CHARS = 1 << 16

_CLASSIFIER = re.compile(r".*ForSequenceClassification")
_HEADLESS = re.compile(r".*Model")

# Keys of 1_Pooling/config.json before sentence-transformers 5, and their names since then.
_MODES: Mapping[str, Method] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
# By the last part of the name of a class of torch.
_ACTIVATIONS: Mapping[str, StageActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
# Of a Transformer: how it reads what is not text, and what its library is called with.
_OF_OTHER_INPUTS = (
    *("transformer_task", "modality_config", "module_output_name", "method_output_name"),
    *("unpad_inputs", "message_format"),
)
_SIMILARITIES: Mapping[str, Similarity] = {
    "cosine": "cosine",
    "dot": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}
_GGUF_METHODS: Mapping[int, Method] = {1: "mean", 2: "cls", 3: "last"}


def pooling_of_checkpoint(
    checkpoint: Checkpoint, *, is_encoder: bool, is_asked: bool = False
) -> Pooling | None:
    """Return how a model pools by its files; None if it generates. See ``pooling_of_folder``."""
    metadata = getattr(checkpoint, "metadata", None)  # of a GGUF file
    if metadata is None:
        return pooling_of_folder(checkpoint.path, is_encoder=is_encoder, is_asked=is_asked)
    kind, path = str(metadata.get("general.architecture")), checkpoint.path
    return pooling_of_gguf(metadata, kind, path, is_encoder=is_encoder, is_asked=is_asked)


def pooling_of_folder(folder: Path, *, is_encoder: bool, is_asked: bool) -> Pooling | None:
    """Return how the model of a folder pools; None if it generates.

    Args:
        is_encoder: it can do nothing but pool.
        is_asked: it is to pool, whether its files say so or not.

    Raises:
        ModelFileError: a file is damaged. UnsupportedModelError: it asks for what octavo has not.
    """
    files = ModelFolder(folder)
    config = files.read_json("config.json") or {}
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if _CLASSIFIER.fullmatch(name):
        return _classifier(name, Fields(folder / "config.json", config))
    modules = files.find("modules.json")
    if modules is not None:
        return _sentence_transformer(files, modules)
    if is_encoder:
        return Pooling(methods=("mean",), source="the default of encoders, without modules.json")
    if is_asked or _HEADLESS.fullmatch(name):
        return Pooling(methods=("last",), source="the default of decoders, without modules.json")
    return None


def pooling_of_gguf(
    metadata: Mapping[str, Any], kind: str, path: Path, *, is_encoder: bool, is_asked: bool
) -> Pooling | None:
    """The same of a GGUF file of the architecture ``kind``."""
    fields = Fields(path, metadata, f"{kind}.")
    given = fields.integer("pooling_type", 0, minimum=0)
    if given in _GGUF_METHODS:
        return Pooling(methods=(_GGUF_METHODS[given],), source=f"{kind}.pooling_type")
    if given:
        raise UnsupportedModelError(
            f"{path} ({kind}.pooling_type): {given}, of which octavo knows 1, 2 and 3 (mean, first "
            "and last token): a reranker's head is read from a folder of safetensors alone"
        )
    if is_encoder:
        return Pooling(methods=("mean",), source="the default of encoders, without pooling_type")
    return Pooling(methods=("last",), source="the default of decoders") if is_asked else None


def gguf_pooling_type(pooling: Pooling, name: str) -> int:
    """Return ``pooling_type`` of a GGUF file; UnsupportedModelError if none says what ``pooling``
    does."""
    for number, method in _GGUF_METHODS.items():
        if pooling.methods == (method,) and not pooling.stages and not pooling.is_classifier:
            return number
    raise UnsupportedModelError(
        f"{name}: a GGUF file cannot say how it pools ({pooling.source}): it has the mean, the "
        "first or the last token, and nothing behind that"
    )


def with_method(pooling: Pooling, method: str | None) -> Pooling:
    """Return ``pooling`` with the method that a user asks for in place of that of the files."""
    if method is None:
        return pooling
    if pooling.is_classifier:
        raise ConfigError(f"pooling {method}: the head of a classifier is made for its own")
    found = next(each for each in METHODS if each == method)
    return replace(pooling, methods=(found,), source="the setting `pooling`")


# -- sentence-transformers -------------------------------------------------------------------------


def _sentence_transformer(files: ModelFolder, path: Path) -> Pooling:
    methods: tuple[Method, ...] | None = None
    stages: list[Stage] = []
    max_length, normalize = None, False
    for kind, folder in _modules(path):
        is_first = methods is None and not stages
        if kind == "Transformer" and is_first and max_length is None:
            if folder:
                raise UnsupportedModelError(
                    f"{path}: the transformer is in the folder {folder}: octavo reads one that is "
                    "beside modules.json; move its files there"
                )
            max_length = _max_length(files)
        elif kind == "Pooling" and is_first:
            methods = _methods(files, folder)
        elif kind == "Normalize" and methods is not None:
            normalize = True
        elif kind in ("Dense", "LayerNorm") and methods is not None and not normalize:
            stages.append(_dense(files, folder) if kind == "Dense" else _norm(files, folder))
        else:
            raise UnsupportedModelError(
                f"{path}: a module {kind!r:.60} at this place is not supported: octavo has a "
                "Transformer, Pooling, then Dense and LayerNorm, then Normalize"
            )
        if len(stages) > MAX_STAGES:
            raise ModelFileError(path, f"more than {MAX_STAGES} modules behind the pooling")
    if methods is None:
        raise UnsupportedModelError(
            f"{path}: no module pools: what this model makes of a text is a vector for each token"
        )
    pooling = Pooling(
        methods=methods,
        stages=tuple(stages),
        normalize=normalize,
        max_length=max_length,
        source="modules.json",
    )
    return _with_prompts(files, pooling)


def _modules(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the class and the folder of each module, in their order."""
    import json

    text = read_text(path, 1 << 20)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not JSON: {error}") from error
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_STAGES + 3:
        raise ModelFileError(path, f"is not a list of 1 to {MAX_STAGES + 3} modules")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ModelFileError(path, f"module {number} is not an object")
        fields = Fields(path, entry)
        yield fields.text("type").rpartition(".")[2], fields.text("path", "").rstrip("/")


def _section(files: ModelFolder, folder: str, name: str = "config.json") -> Fields:
    path = f"{folder}/{name}" if folder else name
    if files.find(path, named_in=files.path / "modules.json") is None:
        raise ModelFileError(files.path / path, "there is no such file, which modules.json needs")
    return Fields(files.path / path, files.read_json(path) or {})


def _max_length(files: ModelFolder) -> int | None:
    """The tokens that the transformer reads by ``sentence_bert_config.json``."""
    name = "sentence_bert_config.json"
    values = files.read_json(name)
    if values is None:
        return None
    fields = Fields(files.path / name, values)
    if fields.boolean("do_lower_case", False):
        raise UnsupportedModelError(
            f"{fields.path}: do_lower_case: octavo lowers letters where tokenizer.json says so"
        )
    length: int | None = fields.integer("max_seq_length", None, minimum=2)
    _warn_of_unread(fields, {"do_lower_case", *_OF_OTHER_INPUTS})
    return length


def _methods(files: ModelFolder, folder: str) -> tuple[Method, ...]:
    fields = _section(files, folder)
    if not fields.boolean("include_prompt", True):
        raise UnsupportedModelError(
            f"{fields.path}: include_prompt is false: octavo pools the tokens of a prompt too"
        )
    given = fields.raw("pooling_mode")
    if given is not None:
        asked = [given] if isinstance(given, str) else fields.each("pooling_mode", Fields.text)
    else:
        prefix = "pooling_mode_"
        asked = [
            key.removeprefix(prefix)
            for key in fields
            if key.startswith(prefix) and fields.boolean(key)
        ]
    unknown = [mode for mode in asked if mode not in _MODES]
    if unknown or not asked or len(asked) > len(METHODS):
        raise UnsupportedModelError(
            f"{fields.path}: pooling by {', '.join(map(repr, unknown)) or 'no method'} is not "
            f"supported, but {', '.join(sorted(_MODES))} are"
        )
    _warn_of_unread(fields, {"word_embedding_dimension", "embedding_dimension"})
    return tuple(_MODES[mode] for mode in asked)


def _dense(files: ModelFolder, folder: str) -> Dense:
    fields = _section(files, folder)
    _check_folder(fields, folder)
    bias = "linear.bias" if fields.boolean("bias", True) else None
    activation = _activation(fields, "activation_function", "torch.nn.modules.activation.Tanh")
    _warn_of_unread(fields, {"in_features", "out_features"})  # which the weight has
    return Dense("linear.weight", bias, activation, folder)


def _norm(files: ModelFolder, folder: str) -> Norm:
    _check_folder(_section(files, folder), folder)
    return Norm("norm.weight", "norm.bias", 1e-5, folder)


def _check_folder(fields: Fields, folder: str) -> None:
    if not folder:
        raise ModelFileError(fields.path, "a module with weights has no folder of its own")


def _activation(fields: Fields, name: str, default: str) -> StageActivation:
    value = fields.text(name, default)
    found = _ACTIVATIONS.get(value.rpartition(".")[2])
    if found is None:
        raise UnsupportedModelError(
            f"{fields.path} ({name}): {value!r:.80} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return found


def _with_prompts(files: ModelFolder, pooling: Pooling) -> Pooling:
    name = "config_sentence_transformers.json"
    values = files.read_json(name)
    if values is None:
        return pooling
    fields = Fields(files.path / name, values)
    given = fields.section("prompts", {})
    prompts = {key: given.text(key) for key in given}
    if any(len(text) > _MAX_PROMPT_CHARS for text in prompts.values()):
        raise fields.error("prompts", f"a prompt is longer than {_MAX_PROMPT_CHARS} characters")
    default = fields.text("default_prompt_name", None)
    if default is not None and default not in prompts:
        raise fields.error("default_prompt_name", f"{default!r:.60} is none of the prompts")
    similarity = fields.text("similarity_fn_name", None) or "cosine"
    if similarity not in _SIMILARITIES:
        raise UnsupportedModelError(
            f"{fields.path} (similarity_fn_name): {similarity!r:.40} is not one of "
            f"{', '.join(sorted(_SIMILARITIES))}"
        )
    _warn_of_unread(fields, {"__version__", "model_type", "prompts"})
    return replace(
        pooling,
        prompts=prompts,
        default_prompt=default,
        similarity=_SIMILARITIES[similarity],
    )


def _warn_of_unread(fields: Fields, known: Collection[str]) -> None:
    """Log a warning of the keys of a file that nothing read, and that are not known to say nothing
    beside those that were."""
    unread = [
        name
        for name in fields
        if name not in fields.asked and name not in known and "." not in name
    ]
    if unread:
        _log.warning("%s: %s: octavo does not know these", fields.path, ", ".join(sorted(unread)))


# -- classifiers -----------------------------------------------------------------------------------


def _classifier(name: str, fields: Fields) -> Pooling:
    """The head of a class ``...ForSequenceClassification``."""
    labels = _labels(fields)
    methods: tuple[Method, ...] = ("cls",)
    stages: tuple[Stage, ...]
    if name.startswith("Bert"):
        pooler = Dense("bert.pooler.dense.weight", "bert.pooler.dense.bias", "tanh")
        stages = (pooler, Dense("classifier.weight", "classifier.bias"))
    elif name.startswith(("Roberta", "XLMRoberta")):
        inner = Dense("classifier.dense.weight", "classifier.dense.bias", "tanh")
        stages = (inner, Dense("classifier.out_proj.weight", "classifier.out_proj.bias"))
    elif name.startswith("ModernBert"):
        how = fields.text("classifier_pooling", "cls")
        if how not in ("cls", "mean"):
            raise fields.error("classifier_pooling", f"{how!r:.40} is neither cls nor mean")
        methods = ("mean",) if how == "mean" else ("cls",)
        has_bias = fields.boolean("classifier_bias", False)
        inner = Dense(
            "head.dense.weight",
            "head.dense.bias" if has_bias else None,
            _named_activation(fields, "classifier_activation", "gelu"),
        )
        norm_bias = "head.norm.bias" if fields.boolean("norm_bias", False) else None
        norm = Norm("head.norm.weight", norm_bias, fields.number("norm_eps", 1e-5))
        stages = (inner, norm, Dense("classifier.weight", "classifier.bias"))
    else:
        methods, stages = ("last",), (Dense("score.weight"),)
    return Pooling(
        methods=methods,
        stages=stages,
        normalize=False,
        labels=labels,
        activation=_score_activation(fields, len(labels)),
        source=name,
    )


def _named_activation(fields: Fields, name: str, default: str) -> StageActivation:
    value = fields.text(name, default)
    names: Mapping[str, StageActivation] = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "tanh": "tanh",
    }
    if value not in names:
        raise UnsupportedModelError(
            f"{fields.path} ({name}): {value!r:.60} is not one of {', '.join(names)}"
        )
    return names[value]


def _labels(fields: Fields) -> tuple[str, ...]:
    """The labels by ``id2label``, in the order of their numbers; of a config without any, two."""
    given = fields.table("id2label", {})
    count = len(given) or fields.integer("num_labels", 2, maximum=_MAX_LABELS)
    if not 1 <= count <= _MAX_LABELS:
        raise fields.error("id2label", f"{count} labels, of 1 to {_MAX_LABELS}")
    by_number = {str(number): label for number, label in given.items()}
    labels = [by_number.get(str(number), f"LABEL_{number}") for number in range(count)]
    if not all(isinstance(label, str) for label in labels):
        raise fields.error("id2label", "has a label that is not a text")
    return tuple(labels)


def _score_activation(fields: Fields, num_labels: int) -> ScoreActivation:
    """Return the function that makes scores: as a cross-encoder's config says; else by the kind of
    the problem, as vLLM and sentence-transformers choose it."""
    name = "sbert_ce_default_activation_function"
    own = fields.section("sentence_transformers", {})
    stated = own.text("activation_fn", None) or fields.text(name, None)
    if stated is not None:
        kind = stated.rpartition(".")[2].lower()
        for known in get_args(ScoreActivation):
            if kind == known:
                activation: ScoreActivation = known
                return activation
        raise UnsupportedModelError(
            f"{fields.path} (activation_fn): {stated!r:.80} is none of Identity, Sigmoid, Softmax"
        )
    problem = fields.text("problem_type", None)
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"
