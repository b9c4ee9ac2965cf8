"""From a model to a smaller one on disk: a Hugging Face folder, or a GGUF file."""

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
from octavo.models.config import ModelConfig
from octavo.models.family import EMBEDDING, HEAD
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
from octavo.quantization.gguf_mixes import ModelFacts, file_type, type_of, wanted_type_of
from octavo.quantization.gguf_quantize import quantize
from octavo.quantize.awq import AWQ
from octavo.quantize.calibration import WINDOW, calibration_windows
from octavo.quantize.estimates import (
    Fit,
    bits_of_embeddings,
    rows_that_do_not_fit,
)
from octavo.quantize.grid import QuantizedMatrix, Scheme
from octavo.quantize.mixture import Mixing, Mixture
from octavo.quantize.observers import observe
from octavo.quantize.pipeline import MatrixReport, Method, quantize_model
from octavo.quantize.qat import QatStepReport, train_model
from octavo.quantize.recipes import METHODS, QuantizeRequest
from octavo.quantize.resume import KeptMatrices
from octavo.quantize.rotation import RotatedCheckpoint
from octavo.quantize.scaling import Scaling
from octavo.quantize.sensitivity import Sensitivity
from octavo.quantize.smoothquant import SMOOTHQUANT
from octavo.quantize.tables import to_fp8_blocks
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
_ROUNDINGS: dict[str, Method] = {  # of others: search
    "gptq": "gptq",
    "autoround": "autoround",
    "fp8": "gptq",
    "nf4": "gptq",
}
_SCALINGS = {"awq": AWQ, "smoothquant": SMOOTHQUANT}
_TORCH_TYPES = {GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}

# The windows that are looked at, int64 [W, length], made when they are first asked for; None if no
# text is looked at.
Text = Callable[[], Tensor | None]

# What has been done of how much, and what it is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """A model on disk.

    ``bits_per_weight``: of all tensors, embedding and head included; the weights are counted in the
    model that it was made of, so that a head which is written beside the embedding costs its bytes.
    ``choice``: what each matrix became, where that was chosen for a target.
    """

    out: Path
    method: str
    format: str
    bits_per_weight: float
    num_bytes: int
    elapsed_s: float
    choice: Mixture | None = None

    def as_json(self) -> dict[str, Any]:
        """``choice`` only where there is one."""
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
    """Quantize a model into ``out``, which is there whole or not at all.

    Of methods that take long, what is made of a folder is kept beside it meanwhile: if the run is
    ended, the next one with the same settings goes on from there. See ``resume.py``.

    Args:
        say: told, before the work, what will not be as one may think.

    Raises:
        ConfigError: the model is quantized already, a value of it is not finite or too large, a
            format has no room for its matrices, no mix
            of its types or bits has the target's size, the text for calibration is no good, ``out``
            cannot be written or is there already.
        ModelError: the model cannot be read.
    """
    begin = time.perf_counter()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give another name, or remove it")
    if wanted.method == "gguf" and out.exists():
        raise ConfigError(f"{out} is a folder, and is to be a GGUF file: give another name")
    parameters = Parameters(checkpoint)
    _refuse_latent_attention(parameters, wanted)
    _refuse_experts(parameters, wanted)
    if wanted.method != "gguf":
        _refuse_shared_tensors(parameters)
    if not wanted.requantize:
        _refuse_quantized(parameters)
    forewarn = _forewarn_of_file if wanted.method == "gguf" else _forewarn_of_folder
    if (warning := forewarn(parameters, wanted)) is not None:
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
    """ConfigError for what no quantized model can hold, or would clip without a word."""
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
        lambda done, total: progress("looking at values", done, total),
    )


def _forewarn_of_folder(parameters: Parameters, wanted: QuantizeRequest) -> str | None:
    bits = wanted.scheme(shape.k for shape in choosable(parameters.config)).bits
    return bits_of_embeddings(parameters, bits, wanted.target_bpw)


def _forewarn_of_file(parameters: Parameters, wanted: QuantizeRequest) -> str | None:
    if wanted.target_bpw is not None:  # whose types are chosen of those that fit
        return None
    facts = _facts(parameters.config, has_importance=wanted.calibrate)
    fits = []
    for tensor in Parameters(parameters.checkpoint, layout="gguf").tensors:
        if len(tensor.shape) < 2 or tensor.parts[0] in parameters.exact:
            continue
        asked = tensor.name, tensor.shape[-2:], wanted.target, facts
        rows, columns = tensor.shape[-2:]
        shape = prod(tensor.shape[:-2]) * rows, columns
        fits.append(Fit(tensor.name, shape, wanted_type_of(*asked), type_of(*asked)))
    return rows_that_do_not_fit(wanted.target, fits)


def _facts(config: ModelConfig, has_importance: bool) -> ModelFacts:
    return ModelFacts(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        is_tied=config.tie_embeddings,
        has_importance=has_importance,
    )


def _refuse_latent_attention(parameters: Parameters, wanted: QuantizeRequest) -> None:
    """Its matrices are not those that methods know how to fold scales and rotations into, and one
    is multiplied with in parts, which no visitor of linears sees."""
    config = parameters.config
    if config.latent is not None and (wanted.method != "gguf" or wanted.rotate):
        raise ConfigError(
            f"{config.name} has latent attention, whose matrices are made smaller in types of GGUF "
            "files only: say --method gguf, without a rotation"
        )


def _refuse_experts(parameters: Parameters, wanted: QuantizeRequest) -> None:
    """What looks at inputs and gradients of linears, or folds things into them, sees no experts."""
    by_itself = wanted.method == "gguf" or wanted.format_name == "fp8"
    looks = not by_itself or wanted.rotate or wanted.target_bpw is not None
    if parameters.config.experts is not None and looks:
        raise ConfigError(
            f"{parameters.checkpoint.path} has experts, which are made smaller in types of GGUF "
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
    mixing: Mixing,
    parameters: Parameters,
    text: Text,
    wanted: QuantizeRequest,
    progress: Progress,
) -> Sensitivity:
    """What each matrix would cost in each way that a mix has for it."""
    windows = text()
    assert windows is not None
    config = parameters.checkpoint.config()
    gptq_scheme = None
    if METHODS[wanted.method].trains or _ROUNDINGS.get(wanted.method) in ("gptq", "autoround"):
        gptq_scheme = wanted.scheme(shape.k for shape in choosable(config))
    return mixing.measure(
        load_checkpoint(parameters.checkpoint, config),
        windows,
        is_tied=config.tie_embeddings,
        gptq_scheme=gptq_scheme,
        progress=lambda done, total: progress("measuring sensitivity", done, total),
    )


# -- Hugging Face folders ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which scheme each matrix of a folder has, by parameter; those that have none stay."""

    schemes: Mapping[str, Scheme]
    writer: Writer
    config: Mapping[str, Any]
    mixture: Mixture | None = None


def _make_folder(
    parameters: Parameters, text: Text, out: Path, wanted: QuantizeRequest, progress: Progress
) -> Mixture | None:
    planned = (
        _one_scheme(parameters, wanted)
        if wanted.target_bpw is None
        else _mixed(parameters, wanted.target_bpw, text, wanted, progress)
    )
    kept = _kept(parameters, out, wanted, planned)
    write_hf_folder(
        out,
        parameters.checkpoint,
        _tensors(parameters, text, wanted, planned, kept, progress),
        dtype=_float_type(parameters),
        quantization_config=planned.config,
    )
    if kept is not None:
        kept.remove()
    return planned.mixture


def _kept(
    parameters: Parameters, out: Path, wanted: QuantizeRequest, planned: _Plan
) -> KeptMatrices | None:
    """What a run before has left, of methods that take long for a matrix. Where channels are
    scaled, matrices belong to norms that would be found anew, and are not kept."""
    takes_long = wanted.method in _ROUNDINGS and wanted.calibrate and wanted.format != "fp8"
    if not takes_long or wanted.method in _SCALINGS:
        return None
    return KeptMatrices(out, parameters.checkpoint, wanted, planned.schemes)


def _one_scheme(parameters: Parameters, wanted: QuantizeRequest) -> _Plan:
    layers = choosable(parameters.config)
    scheme, writer = wanted.scheme(shape.k for shape in layers), wanted.writer()
    for shape in layers:
        try:
            writer.check((shape.n, shape.k), scheme)
            scheme.group_width(shape.k)
        except ConfigError as error:
            raise ConfigError(f"{shape.name}: {error}") from None
    config = writer.config(scheme, [_module(HEAD)])
    return _Plan(dict.fromkeys((shape.name for shape in layers), scheme), writer, config)


def _mixed(
    parameters: Parameters,
    target_bpw: float,
    text: Text,
    wanted: QuantizeRequest,
    progress: Progress,
) -> _Plan:
    widths = [shape.k for shape in choosable(parameters.config)]
    writer, schemes = wanted.mixed_writer(), wanted.schemes(widths)
    mixing = Mixing.of_folder(parameters, target_bpw, schemes, writer)
    sensitivity = _sensitivity(mixing, parameters, text, wanted, progress)
    mixture = mixing.choose(sensitivity.costs)
    chosen = mixture.schemes()
    left_out = [*(name for name in mixture.chosen if name not in chosen), HEAD]
    config = writer.mixed_config(
        {_module(name): scheme for name, scheme in chosen.items()}, [*map(_module, left_out)]
    )
    return _Plan(chosen, writer, config, mixture)


def _tensors(
    parameters: Parameters,
    text: Text,
    wanted: QuantizeRequest,
    planned: _Plan,
    kept: KeptMatrices | None,
    progress: Progress,
) -> Iterator[NewTensor]:
    """All tensors of the folder: what is quantized first, layer by layer."""
    done = set()
    for name, weight in _quantized(parameters, text, wanted, planned.schemes, kept, progress):
        done.add(name)
        if isinstance(weight, Tensor):
            yield _vector(parameters, name, weight)
            continue
        for part, (dtype, data) in planned.writer.parts(weight, planned.schemes[name]).items():
            bytes_of_part = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            yield NewTensor(f"{_module(name)}.{part}", dtype, data.shape, [bytes_of_part])
    for name in parameters.names:
        if name not in done:
            yield float_tensor(parameters, name, _float_type(parameters))


def _quantized(
    parameters: Parameters,
    text: Text,
    wanted: QuantizeRequest,
    schemes: Mapping[str, Scheme],
    kept: KeptMatrices | None,
    progress: Progress,
) -> Iterator[tuple[str, CodedWeight | Tensor]]:
    """The matrices of all layers by name, in the layout of Hugging Face; and norms and biases that
    are others than they were, as the model computes with them."""
    if wanted.format_name == "fp8":  # whose scales are not of rows
        names = [shape.name for shape in choosable(parameters.config)]
        for number, name in enumerate(names, start=1):
            rows = torch.from_numpy(parameters.rows(name))
            yield name, to_fp8_blocks(rows)
            progress("quantizing", number, len(names))
        return

    def say(report: MatrixReport) -> None:
        progress("quantizing", report.number, report.total)

    def say_step(report: QatStepReport) -> None:
        what = f"training, KL {report.divergence:.3f} (of other text {report.held_out:.3f})"
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
    """That of the method, told of what the file makes of a norm."""
    scaling = _SCALINGS.get(wanted.method)
    if scaling is None:
        return None
    dtype = _TORCH_TYPES[_float_type(parameters)]

    def as_stored(name: str, values: Tensor) -> Tensor:
        plus = parameters.plus(name)
        return (values - plus).to(dtype).float() + plus

    return replace(scaling, as_stored=as_stored)


def _module(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _vector(parameters: Parameters, name: str, values: Tensor) -> NewTensor:
    """A norm or a bias that the model computes with, float32 [n]."""
    dtype = _float_type(parameters)
    stored = (values - parameters.plus(name)).numpy()
    return NewTensor(name, dtype.name, stored.shape, [float_bytes(stored, dtype)])


def _float_type(parameters: Parameters) -> GGMLType:
    """Of what stays as it is: bfloat16 if it came so, or if activations need its range."""
    is_wide = family_of(parameters.config.architecture).exceeds_float16
    came_so = any(parameters.type(name) == GGMLType.BF16 for name in parameters.names)
    return GGMLType.BF16 if is_wide or came_so else GGMLType.F16


# -- GGUF files -----------------------------------------------------------------------------------


def _make_gguf(
    parameters: Parameters, text: Text, out: Path, wanted: QuantizeRequest, progress: Progress
) -> Mixture | None:
    checkpoint, mixture = parameters.checkpoint, None
    config = checkpoint.config()
    target_bpw = wanted.target_bpw
    mixing = None if target_bpw is None else Mixing.of_gguf(parameters, target_bpw)
    importance = _importance(checkpoint, text, progress)
    if mixing is not None:
        sensitivity = _sensitivity(mixing, parameters, text, wanted, progress)
        mixture = mixing.choose(sensitivity.costs)
        importance[EMBEDDING if config.tie_embeddings else HEAD] = sensitivity.head_importance
    facts = _facts(config, has_importance=bool(importance))
    coded = (shape for shape in shapes(config) if not (shape.is_exact or shape.is_latent))
    total, done = sum(shape.n for shape in coded), 0

    def choose(matrix: ExportedMatrix) -> GGMLType:
        is_copy = config.tie_embeddings and matrix.parameter == HEAD
        parameter = EMBEDDING if is_copy else matrix.parameter
        if mixture is not None and parameter in mixture.chosen:
            return mixture.type(parameter)
        return type_of(matrix.name, matrix.shape, wanted.target, facts)

    def encode(type: GGMLType, rows: np.ndarray, parameter: str) -> np.ndarray:
        nonlocal done
        blocks = quantize(type, torch.from_numpy(rows), importance.get(parameter))
        done += len(rows)
        progress("quantizing", min(done, total), total)
        return blocks.numpy()

    # The file type of a mix is that of most of its weights.
    of_target = file_type(wanted.target) if mixture is None else None
    export_gguf(out, checkpoint, choose, encode, file_type=of_target)
    return mixture


def _importance(checkpoint: Checkpoint, text: Text, progress: Progress) -> dict[str, Tensor]:
    """E[x^2] of the inputs of each linear of a layer, by parameter."""
    windows = text()
    if windows is None:
        return {}
    progress("looking at a text", 0, 1)
    statistics = observe(load_checkpoint(checkpoint, checkpoint.config()), windows)
    progress("looking at a text", 1, 1)
    return {name: found.second_moment for name, found in statistics.items()}


assert set(METHODS) == set(_TOKENS)
