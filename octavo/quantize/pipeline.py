"""Quantizes the linears of a checkpoint, layer by layer.

Every method goes through the linears of a model in the order in which they compute. With
calibration text each layer is run, and a linear continues with its quantized weight, so that inputs
include the errors of all linears before. A *scaling* first multiplies channels of a layer's
matrices so that they round better.

Embeddings and the output head are not linears of a layer, and are left to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from octavo.base.errors import ConfigError, ModelFileError
from octavo.layers.module import Module, named_parameters
from octavo.layers.tensors import with_tensors
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.loader import load_checkpoint
from octavo.models.registry import CausalLM
from octavo.quantize.autoround import LayerSamples, learn_rounding
from octavo.quantize.channel_scaling import LayerScales, Scaling, find_scales
from octavo.quantize.gptq import quantize_gptq
from octavo.quantize.grid import QuantizedMatrix, Scheme, quantize_to_nearest
from octavo.quantize.layerwise_model import (
    InputStatistics,
    LayerwiseModel,
    LinearObserver,
    dense,
    linear_names,
)

RoundingMethod = Literal["rtn", "search", "gptq", "autoround"]
"""``rtn`` rounds to nearest on grids that hold all values; ``search`` on grids of least error,
weighted by E[x^2] with calibration text; ``gptq`` is GPTQ with static act-order; ``autoround`` is
AutoRound, starting from GPTQ."""

# AutoRound's steps for a layer.
STEPS = 128

SchemeOf = Callable[[str], Scheme | None]
"""The scheme of a linear by the name of its parameter, None for one that stays as it is."""


class MatrixReport(NamedTuple):
    """The result for one linear, number ``number`` of ``total``.

    ``weight_error``: sum (w - v)^2 / sum w^2. ``output_error``: the same for outputs on calibration
    text, without a Hessian by E[x^2] alone (as if channels were uncorrelated); None without text.
    ``seconds``: includes an equal share of what is learned for the layer as a whole.
    """

    name: str
    scheme: Scheme
    number: int
    total: int
    weight_error: float
    output_error: float | None
    seconds: float


def quantize_model(
    model: str | Path | Checkpoint,
    scheme: Scheme | SchemeOf,
    method: RoundingMethod = "gptq",
    calibration: Tensor | None = None,
    *,
    scaling: Scaling | None = None,
    steps: int = STEPS,
    done: Mapping[str, QuantizedMatrix] = MappingProxyType({}),
    on_matrix: Callable[[MatrixReport], None] | None = None,
) -> Iterator[tuple[str, QuantizedMatrix | Tensor]]:
    """Quantize the linears of a model's layers, and yield (name of the parameter, matrix).

    With a ``scaling``, norms and biases that it changes are yielded too: float32 [n], a norm's as
    the model multiplies with it, whatever the checkpoint stores.

    Nothing of a layer is kept once its matrices were yielded. Beside the mapped file, the memory is
    that of one layer's activations on all of the text, see ``layerwise_model.py``.

    Args:
        model: a checkpoint of any format that can be loaded, by its path or open.
        scheme: one for all, or a function of the parameter's name.
        calibration: windows of tokens, int64 [W, length]; see ``calibration.py``. Method rtn needs
            none; with them, reports have the error of outputs.
        scaling: scales a layer before its matrices are quantized; see ``channel_scaling.py``.
        steps: AutoRound's steps for each layer.
        done: matrices of an interrupted run, which are used in place of new ones.
        on_matrix: called with each new matrix, before those of the layer are yielded.

    Raises:
        ConfigError: groups do not fill the rows of a linear, which is named; there is no such
            method; it needs calibration text and has none; the text's tokens are not of this model;
            autoround is given no step, or a scheme with float minimums.
        ModelError: the model cannot be loaded; a weight that is not finite is a ModelFileError.
    """
    checkpoint = open_checkpoint(model) if isinstance(model, str | Path) else model
    config = checkpoint.config()
    loaded = load_checkpoint(checkpoint, config)
    scheme_of = (lambda name: scheme) if isinstance(scheme, Scheme) else scheme
    schemes = _schemes(loaded, scheme_of)
    _check_method(method, scaling, calibration, config.vocab_size)
    if method == "autoround":
        assert calibration is not None
        _check_learning(schemes, steps)
        learner = _LearningVisitor(checkpoint.path, method, schemes, done, on_matrix)
        return _with_learning(LayerwiseModel(loaded, calibration), learner, steps)
    quantizer = _QuantizingVisitor(checkpoint.path, method, schemes, done, on_matrix)
    if calibration is None:
        return _without_text(loaded, quantizer)
    return _with_text(LayerwiseModel(loaded, calibration), quantizer, scaling)


def _with_text(
    model: LayerwiseModel, quantizer: _QuantizingVisitor, scaling: Scaling | None
) -> Iterator[tuple[str, QuantizedMatrix | Tensor]]:
    for index in range(model.num_layers):
        scales = LayerScales()
        if scaling is not None:
            scales = find_scales(model, index, quantizer.schemes, scaling)
        model.set_vectors(index, scales.vectors)
        model.run_layer(index, scales.before(quantizer))
        yield from quantizer.take()
        yield from scales.vectors.items()


def _with_learning(
    model: LayerwiseModel, learner: _LearningVisitor, steps: int
) -> Iterator[tuple[str, QuantizedMatrix]]:
    exact = model.hidden  # of the float model; ``model.hidden`` is of the quantized one
    for index in range(model.num_layers):
        with torch.no_grad():
            exact = model.outputs(index, exact, lambda name, x, weight: weight)
        learner.learn(model, index, exact, steps)
        model.run_layer(index, learner)
        yield from learner.take()


def _without_text(
    model: CausalLM, quantizer: _QuantizingVisitor
) -> Iterator[tuple[str, QuantizedMatrix]]:
    assert isinstance(model, Module)
    weights = {name: parameter.value for name, parameter in named_parameters(with_tensors(model))}
    for names in linear_names(model):
        for name in (name for name in names if name in quantizer.schemes):
            quantizer.quantize(name, dense(weights[name]), None)
        yield from quantizer.take()


class _QuantizingVisitor:
    """A visitor that quantizes each linear, and keeps the matrices until they are taken."""

    def __init__(
        self,
        path: Path,
        method: RoundingMethod,
        schemes: Mapping[str, Scheme],
        done: Mapping[str, QuantizedMatrix],
        on_matrix: Callable[[MatrixReport], None] | None,
    ):
        self.schemes, self._path, self._method = schemes, path, method
        self._done, self._on_matrix = done, on_matrix
        self._observer = LinearObserver(hessian=method in ("gptq", "autoround"))
        self._made: dict[str, QuantizedMatrix] = {}
        self._seconds = 0.0  # a matrix's share of what was learned for its layer
        self._number = {name: number for number, name in enumerate(schemes, start=1)}

    def __call__(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        if name not in self.schemes:
            return weight
        statistics = None if name in self._done else self._observer.observe(x)
        return self.quantize(name, weight, statistics).dequantize()

    def take(self) -> Iterator[tuple[str, QuantizedMatrix]]:
        """Yield the matrices that were made since the last call."""
        made, self._made = self._made, {}
        yield from made.items()

    def quantize(
        self, name: str, weight: Tensor, statistics: InputStatistics | None
    ) -> QuantizedMatrix:
        """Quantize a linear, unless an interrupted run has."""
        matrix = self._done.get(name)
        if matrix is None:
            self._check(name, weight)
            begin = time.perf_counter()
            matrix = self._make(name, weight, statistics)
            if self._on_matrix is not None:
                seconds = self._seconds + time.perf_counter() - begin
                self._on_matrix(self._report(name, weight, matrix, statistics, seconds))
        self._made[name] = matrix
        return matrix

    def _make(
        self, name: str, weight: Tensor, statistics: InputStatistics | None
    ) -> QuantizedMatrix:
        scheme = self.schemes[name]
        if self._method == "gptq":
            assert statistics is not None and statistics.hessian is not None
            return quantize_gptq(weight, statistics.hessian, scheme)
        importance = None if statistics is None else statistics.second_moment
        search = self._method == "search"
        return quantize_to_nearest(weight, scheme, search=search, importance=importance)

    def _check(self, name: str, weight: Tensor) -> None:
        if not torch.isfinite(weight).all():
            raise ModelFileError(self._path, "has values that are not finite", field=name)

    def _report(
        self,
        name: str,
        weight: Tensor,
        matrix: QuantizedMatrix,
        statistics: InputStatistics | None,
        seconds: float,
    ) -> MatrixReport:
        error = weight - matrix.dequantize()
        of_outputs = None
        if statistics is not None:
            of_outputs = _output_power(error, statistics) / _output_power(weight, statistics)
        return MatrixReport(
            name,
            matrix.scheme,
            self._number[name],
            len(self._number),
            float(error.square().sum() / weight.square().sum()),
            of_outputs,
            seconds,
        )


class _LearningVisitor(_QuantizingVisitor):
    """A visitor of AutoRound: the matrices of a layer are learned together before it is run."""

    def learn(self, model: LayerwiseModel, index: int, exact: Tensor, steps: int) -> None:
        """Learn the matrices of a layer, whose outputs should be ``exact``, [T, hidden]."""
        begin = time.perf_counter()
        weights: dict[str, Tensor] = {}
        start: dict[str, QuantizedMatrix] = {}

        def begin_with(name: str, x: Tensor, weight: Tensor) -> Tensor:
            if name in self._done or name not in self.schemes:
                return self._settled(name, weight)
            self._check(name, weight)
            hessian = self._observer.observe(x).hessian
            assert hessian is not None
            weights[name], start[name] = weight, quantize_gptq(weight, hessian, self.schemes[name])
            return start[name].dequantize()

        def layer(hidden: Tensor, given: Mapping[str, Tensor]) -> Tensor:
            def visit(name: str, x: Tensor, weight: Tensor) -> Tensor:
                return given[name] if name in given else self._settled(name, weight)

            return model.outputs(index, hidden, visit)

        with torch.no_grad():
            model.outputs(index, model.hidden, begin_with)
        shape = -1, model.length, exact.shape[1]
        windows = LayerSamples(model.hidden.view(shape), exact.view(shape))
        if start:
            self._learned = learn_rounding(layer, windows, weights, start, steps=steps)
        self._seconds = (time.perf_counter() - begin) / max(1, len(start))

    def _settled(self, name: str, weight: Tensor) -> Tensor:
        """The weight of a linear that is not learned: of an interrupted run, or the float one."""
        return self._done[name].dequantize() if name in self._done else weight

    def _make(
        self, name: str, weight: Tensor, statistics: InputStatistics | None
    ) -> QuantizedMatrix:
        return self._learned[name]


def _output_power(weight: Tensor, statistics: InputStatistics) -> float:
    """Mean squared outputs of a matrix, summed over its rows."""
    if statistics.hessian is None:
        return float((weight.square() @ statistics.second_moment).sum())
    return float((weight @ statistics.hessian).mul_(weight).sum() / 2)


def _schemes(model: CausalLM, scheme_of: SchemeOf) -> dict[str, Scheme]:
    """The schemes of the linears that have one, checked against their shapes."""
    assert isinstance(model, Module)
    shapes = {name: parameter.shape for name, parameter in named_parameters(model)}
    schemes = {}
    for name in (name for names in linear_names(model) for name in names):
        scheme = scheme_of(name)
        if scheme is None:
            continue
        try:
            scheme.group_width(shapes[name][1])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        schemes[name] = scheme
    return schemes


def _check_method(
    method: RoundingMethod, scaling: Scaling | None, calibration: Tensor | None, vocab_size: int
) -> None:
    if method == "autoround" and scaling is not None:
        raise ConfigError("method autoround learns its own scales: leave the scaling out")
    if method not in get_args(RoundingMethod):
        raise ConfigError(f"method must be {', '.join(get_args(RoundingMethod))}, not {method!r}")
    if calibration is None:
        if method in ("gptq", "autoround"):
            raise ConfigError(f"method {method} needs calibration text: give some, or use search")
        if scaling is not None:
            raise ConfigError("a scaling of channels needs calibration text: give some")
        return
    if int(calibration.max()) >= vocab_size:
        raise ConfigError(
            f"the calibration text has token {int(calibration.max())}, and the model has "
            f"{vocab_size}: make its windows with the tokenizer of this model"
        )


def _check_learning(schemes: Mapping[str, Scheme], steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"autoround takes one step or more, not {steps}")
    for name, scheme in schemes.items():
        if scheme.float_minimum:
            raise ConfigError(
                f"{name}: autoround needs integer zeros: give a scheme without float_minimum"
            )
