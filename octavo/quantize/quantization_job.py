"""Quantizes a model on disk, and writes a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.config import EMBEDDING, HEAD, ModelConfig
from octavo.models.footprint import choosable, shapes
from octavo.models.gguf_export import ExportedMatrix, export_gguf
from octavo.models.hf_writer import float_tensor, write_hf_folder
from octavo.models.loader import load_checkpoint
from octavo.models.parameters import Parameters
from octavo.models.registry import family_of
from octavo.models.safetensors_writer import NewTensor
from octavo.quantization.base import float_bytes
from octavo.quantization.coded import CodedWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_formats import FLOAT_DTYPES
from octavo.quantization.gguf_mixes import ModelFacts, file_type, type_of, wanted_type_of
from octavo.quantization.gguf_quantize import quantize_to_blocks
from octavo.quantize.awq import AWQ
from octavo.quantize.calibration import WINDOW, calibration_windows
from octavo.quantize.channel_scaling import Scaling
from octavo.quantize.code_tables import to_fp8_blocks
from octavo.quantize.grid import QuantizedMatrix, Scheme
from octavo.quantize.layerwise_model import observe
from octavo.quantize.methods import METHODS, QuantizeRequest
from octavo.quantize.mixed_precision import MixedPrecision, MixedPrecisionSearch
from octavo.quantize.pipeline import MatrixReport, RoundingMethod, quantize_model
from octavo.quantize.qat import QatStepReport, train_model
from octavo.quantize.resume import KeptMatrices
from octavo.quantize.rotation import RotatedCheckpoint
from octavo.quantize.sensitivity import Sensitivity
from octavo.quantize.size_warnings import (
    TypeFit,
    warn_of_embeddings,
    warn_of_rows,
)
from octavo.quantize.smoothquant import SMOOTHQUANT
from octavo.quantize.unrepresentable import LARGEST_FLOAT16, check_values
from octavo.quantize.writers.base import Writer
from octavo.text.tokenizer import Tokenizer

_TOKENS = {
    "gptq": 128 * WINDOW,
    "awq": 128 * WINDOW,
    "autoround": 32 * WINDOW,
    "qat": 1024 * WINDOW,
    "smoothquant": 32 * WINDOW,
    "rtn": 32 * WINDOW,
    "gguf": 32 * WINDOW,
    "fp8": 32 * WINDOW,
    "nf4": 32 * WINDOW,
}
_ROUNDINGS: dict[str, RoundingMethod] = {  # the other methods use search
    "gptq": "gptq",
    "autoround": "autoround",
    "fp8": "gptq",
    "nf4": "gptq",
}
_SCALINGS = {"awq": AWQ, "smoothquant": SMOOTHQUANT}

# Returns the windows of calibration text, int64 [W, length], made at the first call; None without
# calibration.
CalibrationText = Callable[[], Tensor | None]

# Called with the name of the work, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """A quantized model on disk.

    ``bits_per_weight``: over all tensors, embedding and head included. Weights are counted in the
    original model, so that a head which is written beside a tied embedding costs its bytes.
    ``choice``: the mix, if there was a target of bits per weight.
    """

    out: Path
    method: str
    format: str
    bits_per_weight: float
    num_bytes: int
    elapsed_s: float
    choice: MixedPrecision | None = None

    def as_json(self) -> dict[str, Any]:
        """The result of ``octavo quantize --json``; ``choice`` is there for a mix alone."""
        choice = {} if self.choice is None else {"choice": self.choice.as_json()}
        return {
            "out": str(self.out),
            "method": self.method,
            "format": self.format,
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.num_bytes,
            "elapsed_s": self.elapsed_s,
            **choice,
        }


def make(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    out: Path,
    wanted: QuantizeRequest,
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda warning: None,
) -> QuantizeResult:
    """Quantize a model, and write it to ``out``, completely or not at all.

    Methods that take long keep the finished matrices of a folder beside ``out``: if the run is
    interrupted, the next one with the same settings continues it. See ``resume.py``.

    Args:
        say: called before the work with warnings, such as of a larger size than asked for.

    Raises:
        ConfigError: the model is quantized already, one of its values is not finite or too large,
            a format cannot hold its matrices, no mix has the target's size, the calibration text
            cannot be used, or ``out`` exists or cannot be written.
        ModelError: the model cannot be read.
    """
    begin = time.perf_counter()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already: give another name, or remove it")
    if wanted.method == "gguf" and out.exists():
        raise ConfigError(f"{out} is a folder, and a GGUF file is to be written: give another name")
    parameters = Parameters(checkpoint)
    _refuse_latent_attention(parameters, wanted)
    _refuse_experts(parameters, wanted)
    if wanted.method != "gguf":
        _refuse_shared_tensors(parameters)
    if not wanted.requantize:
        _refuse_quantized(parameters)
    warning_of = _warning_of_file if wanted.method == "gguf" else _warning_of_folder
    if (warning := warning_of(parameters, wanted)) is not None:
        say(f"warning: {warning}")
    _check_values(parameters, wanted, progress)
    source = Parameters(RotatedCheckpoint(checkpoint)) if wanted.rotate else parameters
    make_model = _make_gguf if wanted.method == "gguf" else _make_folder
    text = cache(lambda: _windows(tokenizer, wanted))
    choice = make_model(source, text, out, wanted, progress)
    num_bytes = sum(entry.num_bytes for entry in open_checkpoint(out).tensors.values())
    num_weights = sum(prod(parameters.shape(name)) for name in parameters.names)
    return QuantizeResult(
        out,
        wanted.method,
        wanted.format_name,
        num_bytes * 8 / num_weights,
        num_bytes,
        time.perf_counter() - begin,
        choice,
    )


def _check_values(parameters: Parameters, wanted: QuantizeRequest, progress: Progress) -> None:
    """Raise a ConfigError for values that are not finite, or that float16 scales would clip."""
    if wanted.method == "gguf":
        is_wide = wanted.target_bpw is None and wanted.target in ("F32", "BF16")
        narrow = set() if is_wide else {n for n in parameters.names if len(parameters.shape(n)) > 1}
    elif _float_type(parameters) == GGMLType.BF16:
        narrow = {shape.name for shape in choosable(parameters.config)}
    else:
        narrow = set(parameters.names)
    check_values(
        parameters,
        lambda name: LARGEST_FLOAT16 if name in narrow else inf,
        lambda done, total: progress("checking values", done, total),
    )


def _warning_of_folder(parameters: Parameters, wanted: QuantizeRequest) -> str | None:
    bits = wanted.scheme(shape.k for shape in choosable(parameters.config)).bits
    return warn_of_embeddings(parameters, bits, wanted.target_bpw)


def _warning_of_file(parameters: Parameters, wanted: QuantizeRequest) -> str | None:
    if wanted.target_bpw is not None:  # a mix has only types that fit
        return None
    facts = _facts(parameters.config, has_importance=wanted.calibrate)
    fits = []
    for tensor in Parameters(parameters.checkpoint, layout="gguf").tensors:
        if len(tensor.shape) < 2 or tensor.parts[0] in parameters.exact:
            continue
        asked = tensor.name, tensor.shape[-2:], wanted.target, facts
        rows, columns = tensor.shape[-2:]
        shape = prod(tensor.shape[:-2]) * rows, columns
        fits.append(TypeFit(tensor.name, shape, wanted_type_of(*asked), type_of(*asked)))
    return warn_of_rows(wanted.target, fits)


def _facts(config: ModelConfig, has_importance: bool) -> ModelFacts:
    return ModelFacts(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        is_tied=config.tie_embeddings,
        has_importance=has_importance,
    )


def _refuse_latent_attention(parameters: Parameters, wanted: QuantizeRequest) -> None:
    """Raise a ConfigError for latent attention, unless types of GGUF files are asked for.

    Scales and rotations cannot be folded into its matrices, and one of these is multiplied in
    parts, without calling a visitor.
    """
    config = parameters.config
    if config.latent is not None and (wanted.method != "gguf" or wanted.rotate):
        raise ConfigError(
            f"{config.name} has latent attention, whose matrices can be quantized to types of GGUF "
            "files only: say --method gguf, without a rotation"
        )


def _refuse_experts(parameters: Parameters, wanted: QuantizeRequest) -> None:
    """Raise a ConfigError for experts, unless matrices are quantized by themselves: visitors,
    gradients and folding work on linears."""
    by_itself = wanted.method == "gguf" or wanted.format_name == "fp8"
    looks = not by_itself or wanted.rotate or wanted.target_bpw is not None
    if parameters.config.experts is not None and looks:
        raise ConfigError(
            f"{parameters.checkpoint.path} has experts, which can be quantized to types of GGUF "
            "files and blocks of FP8 only: say --method gguf, with a type and without a rotation"
        )


def _refuse_shared_tensors(parameters: Parameters) -> None:
    architecture = parameters.config.architecture
    if not family_of(architecture).has_plain_folders:
        raise ConfigError(
            f"{parameters.checkpoint.path}: a folder of a {architecture} has several matrices in "
            "one tensor, or under names of its own, and is not written with quantized weights. "
            "Say --method gguf"
        )


def _refuse_quantized(parameters: Parameters) -> None:
    for name in parameters.names:
        weight = parameters.weight(name)
        if weight.is_quantized:
            raise ConfigError(
                f"{parameters.checkpoint.path} is quantized already ({weight.format}, {name}): "
                "errors add up, and where a format has the same grid they seem to be none. Start "
                "from the 16-bit model, or say --requantize"
            )


def _windows(tokenizer: Tokenizer, wanted: QuantizeRequest) -> Tensor | None:
    if not wanted.calibrate:
        return None
    max_tokens = wanted.calibration_tokens or _TOKENS[wanted.method]
    return calibration_windows(tokenizer, wanted.calibration, max_tokens=max_tokens)


def _sensitivity(
    search: MixedPrecisionSearch,
    parameters: Parameters,
    text: CalibrationText,
    wanted: QuantizeRequest,
    progress: Progress,
) -> Sensitivity:
    """Measure the cost of each candidate of each matrix."""
    windows = text()
    assert windows is not None
    config = parameters.checkpoint.config()
    gptq_scheme = None
    if METHODS[wanted.method].trains or _ROUNDINGS.get(wanted.method) in ("gptq", "autoround"):
        gptq_scheme = wanted.scheme(shape.k for shape in choosable(config))
    return search.measure(
        load_checkpoint(parameters.checkpoint, config),
        windows,
        is_tied=config.tie_embeddings,
        gptq_scheme=gptq_scheme,
        progress=lambda done, total: progress("measuring sensitivity", done, total),
    )


# -- Hugging Face folders ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FolderPlan:
    """The schemes of a folder's matrices by parameter; others stay as they are."""

    schemes: Mapping[str, Scheme]
    writer: Writer
    config: Mapping[str, Any]
    mix: MixedPrecision | None = None


def _make_folder(
    parameters: Parameters,
    text: CalibrationText,
    out: Path,
    wanted: QuantizeRequest,
    progress: Progress,
) -> MixedPrecision | None:
    plan = (
        _one_scheme(parameters, wanted)
        if wanted.target_bpw is None
        else _mixed(parameters, wanted.target_bpw, text, wanted, progress)
    )
    kept = _kept(parameters, out, wanted, plan)
    write_hf_folder(
        out,
        parameters.checkpoint,
        _tensors(parameters, text, wanted, plan, kept, progress),
        dtype=_float_type(parameters),
        quantization_config=plan.config,
    )
    if kept is not None:
        kept.remove()
    return plan.mix


def _kept(
    parameters: Parameters, out: Path, wanted: QuantizeRequest, plan: _FolderPlan
) -> KeptMatrices | None:
    """The kept matrices of an interrupted run; None for methods that keep none: fast ones, and
    those that scale channels, whose norms would be found anew."""
    takes_long = wanted.method in _ROUNDINGS and wanted.calibrate and wanted.format != "fp8"
    if not takes_long or wanted.method in _SCALINGS:
        return None
    return KeptMatrices(out, parameters.checkpoint, wanted, plan.schemes)


def _one_scheme(parameters: Parameters, wanted: QuantizeRequest) -> _FolderPlan:
    layers = choosable(parameters.config)
    scheme, writer = wanted.scheme(shape.k for shape in layers), wanted.writer()
    for shape in layers:
        try:
            writer.check((shape.n, shape.k), scheme)
            scheme.group_width(shape.k)
        except ConfigError as error:
            raise ConfigError(f"{shape.name}: {error}") from None
    config = writer.config(scheme, [_module(HEAD)])
    return _FolderPlan(dict.fromkeys((shape.name for shape in layers), scheme), writer, config)


def _mixed(
    parameters: Parameters,
    target_bpw: float,
    text: CalibrationText,
    wanted: QuantizeRequest,
    progress: Progress,
) -> _FolderPlan:
    widths = [shape.k for shape in choosable(parameters.config)]
    writer, schemes = wanted.mixed_writer(), wanted.schemes(widths)
    search = MixedPrecisionSearch.of_folder(parameters, target_bpw, schemes, writer)
    sensitivity = _sensitivity(search, parameters, text, wanted, progress)
    mix = search.choose(sensitivity.costs)
    chosen = mix.schemes()
    left_out = [*(name for name in mix.chosen if name not in chosen), HEAD]
    config = writer.mixed_config(
        {_module(name): scheme for name, scheme in chosen.items()}, [*map(_module, left_out)]
    )
    return _FolderPlan(chosen, writer, config, mix)


def _tensors(
    parameters: Parameters,
    text: CalibrationText,
    wanted: QuantizeRequest,
    plan: _FolderPlan,
    kept: KeptMatrices | None,
    progress: Progress,
) -> Iterator[NewTensor]:
    """Yield all tensors of the folder: quantized ones first, layer by layer."""
    done = set()
    for name, weight in _quantized(parameters, text, wanted, plan.schemes, kept, progress):
        done.add(name)
        if isinstance(weight, Tensor):
            yield _vector(parameters, name, weight)
            continue
        for part, (dtype, data) in plan.writer.parts(weight, plan.schemes[name]).items():
            bytes_of_part = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            yield NewTensor(f"{_module(name)}.{part}", dtype, data.shape, [bytes_of_part])
    for name in parameters.names:
        if name not in done:
            yield float_tensor(parameters, name, _float_type(parameters))


def _quantized(
    parameters: Parameters,
    text: CalibrationText,
    wanted: QuantizeRequest,
    schemes: Mapping[str, Scheme],
    kept: KeptMatrices | None,
    progress: Progress,
) -> Iterator[tuple[str, CodedWeight | Tensor]]:
    """Yield the quantized matrices of all layers by name, in the layout of Hugging Face, and the
    norms and biases that a scaling has changed, as the model computes with them."""
    if wanted.format_name == "fp8":  # scales of blocks need no calibration
        names = [shape.name for shape in choosable(parameters.config)]
        for number, name in enumerate(names, start=1):
            rows = torch.from_numpy(parameters.rows(name))
            yield name, to_fp8_blocks(rows)
            progress("quantizing", number, len(names))
        return

    def say(report: MatrixReport) -> None:
        progress("quantizing", report.number, report.total)

    def say_step(report: QatStepReport) -> None:
        what = f"training, KL {report.divergence:.3f} (held out {report.held_out:.3f})"
        progress(what, report.number, report.total)

    windows = text()
    matrices: Iterable[tuple[str, QuantizedMatrix | Tensor]]
    if METHODS[wanted.method].trains:
        assert windows is not None
        trained = train_model(
            parameters.checkpoint,
            schemes.get,
            windows,
            codes=wanted.train_codes,
            tokens=wanted.train_tokens,
            on_matrix=say,
            on_step=say_step,
        )
        matrices = trained.items()
    else:
        matrices = quantize_model(
            parameters.checkpoint,
            schemes.get,
            _ROUNDINGS.get(wanted.method, "search") if wanted.calibrate else "search",
            windows,
            scaling=_scaling(parameters, wanted),
            done={} if kept is None else kept,
            on_matrix=say,
        )
    for name, matrix in matrices:
        if isinstance(matrix, Tensor):
            yield name, matrix
            continue
        if kept is not None:
            kept.keep(name, matrix)
        weight = matrix.coded(wanted.method)
        order = parameters.order(name)
        yield name, weight if order is None else weight.select(order)


def _scaling(parameters: Parameters, wanted: QuantizeRequest) -> Scaling | None:
    """The method's scaling, which rounds norms as the file will store them; None without one."""
    scaling = _SCALINGS.get(wanted.method)
    if scaling is None:
        return None
    dtype = FLOAT_DTYPES[_float_type(parameters)]

    def as_stored(name: str, values: Tensor) -> Tensor:
        plus = parameters.plus(name)
        return (values - plus).to(dtype).float() + plus

    return replace(scaling, as_stored=as_stored)


def _module(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _vector(parameters: Parameters, name: str, values: Tensor) -> NewTensor:
    """A tensor of the file for a norm or bias as the model computes with it, float32 [n]."""
    dtype = _float_type(parameters)
    stored = (values - parameters.plus(name)).numpy()
    return NewTensor(name, dtype.name, stored.shape, [float_bytes(stored, dtype)])


def _float_type(parameters: Parameters) -> GGMLType:
    """The type of tensors that are not quantized: bfloat16 if the model has it, or if activations
    need its range."""
    is_wide = family_of(parameters.config.architecture).exceeds_float16
    came_so = any(parameters.type(name) == GGMLType.BF16 for name in parameters.names)
    return GGMLType.BF16 if is_wide or came_so else GGMLType.F16


# -- GGUF files -----------------------------------------------------------------------------------


def _make_gguf(
    parameters: Parameters,
    text: CalibrationText,
    out: Path,
    wanted: QuantizeRequest,
    progress: Progress,
) -> MixedPrecision | None:
    checkpoint, mix = parameters.checkpoint, None
    config = checkpoint.config()
    target_bpw = wanted.target_bpw
    search = None if target_bpw is None else MixedPrecisionSearch.of_gguf(parameters, target_bpw)
    importance = _importance(checkpoint, text, progress)
    if search is not None:
        sensitivity = _sensitivity(search, parameters, text, wanted, progress)
        mix = search.choose(sensitivity.costs)
        importance[EMBEDDING if config.tie_embeddings else HEAD] = sensitivity.head_importance
    facts = _facts(config, has_importance=bool(importance))
    coded = (shape for shape in shapes(config) if not (shape.is_exact or shape.is_latent))
    total, done = sum(shape.n for shape in coded), 0

    def choose(matrix: ExportedMatrix) -> GGMLType:
        is_copy = config.tie_embeddings and matrix.parameter == HEAD
        parameter = EMBEDDING if is_copy else matrix.parameter
        if mix is not None and parameter in mix.chosen:
            return mix.type(parameter)
        return type_of(matrix.name, matrix.shape, wanted.target, facts)

    def encode(type: GGMLType, rows: np.ndarray, parameter: str) -> np.ndarray:
        nonlocal done
        blocks = quantize_to_blocks(type, torch.from_numpy(rows), importance.get(parameter))
        done += len(rows)
        progress("quantizing", min(done, total), total)
        return blocks.numpy()

    # The file type of a mix is that of most of its weights.
    of_target = file_type(wanted.target) if mix is None else None
    export_gguf(out, checkpoint, choose, encode, file_type=of_target)
    return mix


def _importance(
    checkpoint: Checkpoint, text: CalibrationText, progress: Progress
) -> dict[str, Tensor]:
    """The importance E[x^2] of the inputs of each linear, by parameter; empty without text."""
    windows = text()
    if windows is None:
        return {}
    progress("running calibration text", 0, 1)
    statistics = observe(load_checkpoint(checkpoint, checkpoint.config()), windows)
    progress("running calibration text", 1, 1)
    return {name: found.second_moment for name, found in statistics.items()}


assert set(METHODS) == set(_TOKENS)
