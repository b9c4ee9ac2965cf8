"""Explores the effect of a quantization scheme on some weights, as data to print or plot.

    rows = rows_of("model", "model.layers.0.mlp.down_proj.weight")
    explored = explore(rows, "int4-g64")          named_schemes.py has the names
    explored.snr_db, explored.bits_per_weight, explored.corner.codes
    bits_against_error(rows)                      one point for each scheme

Weights are rounded to nearest. ``pipeline.py`` has the methods that use calibration text;
``octavo quantize --report`` measures whole models, and ``octavo.quality.tradeoffs`` reads it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.base.errors import ConfigError
from octavo.base.json_values import finite_or_none
from octavo.models.checkpoint import open_checkpoint
from octavo.models.parameters import Parameters
from octavo.quantize.named_schemes import SCHEMES, CodedRows, named_scheme

_BINS = 50


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """A histogram: ``counts``, int64 [bins], between ``edges``, float64 [bins + 1]."""

    edges: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """Quantized rows of weights, float32 [n, K], and the errors of their values.

    Args:
        coded: codes, scales, zeros and values of all rows.
        corner: the same of the first rows and columns, to be shown one by one;
            ``corner_weights`` are the weights there.
        errors: histogram of value less weight, in a symmetric range.
        relative_errors: histogram of |error| / |weight|, of weights that are not 0; the last bin
            has 1 (a weight rounded to 0) and more.
        mean_square_error: over all weights.
        snr_db: 10 log10 of the power of weights to that of errors; infinite without errors.
        bits_per_weight: with scales, zeros and offsets, as in files.
    """

    scheme: str
    coded: CodedRows
    corner: CodedRows
    corner_weights: np.ndarray
    errors: Histogram
    relative_errors: Histogram
    mean_square_error: float
    snr_db: float
    bits_per_weight: float

    def as_json(self) -> dict[str, Any]:
        """All fields but ``coded`` as numbers and lists. An infinite ``snr_db`` is None."""
        return {
            "scheme": self.scheme,
            "corner": _lists(self.corner),
            "corner_weights": self.corner_weights.tolist(),
            "errors": _lists(self.errors),
            "relative_errors": _lists(self.relative_errors),
            "mean_square_error": self.mean_square_error,
            "snr_db": finite_or_none(self.snr_db),
            "bits_per_weight": self.bits_per_weight,
        }


@dataclass(frozen=True, slots=True)
class SchemePoint:
    """A point of the curve of bits against error; for its fields see ``Exploration``."""

    scheme: str
    bits_per_weight: float
    mean_square_error: float
    snr_db: float

    def as_json(self) -> dict[str, Any]:
        """The fields as numbers. An infinite ``snr_db`` is None."""
        return {**asdict(self), "snr_db": finite_or_none(self.snr_db)}


def explore(
    rows: np.ndarray, scheme: str, *, search: bool = True, corner: tuple[int, int] = (4, 64)
) -> Exploration:
    """Quantize rows of weights, float32 [n, K], and measure the errors.

    Args:
        scheme: the name of a scheme, see ``named_schemes.py``.
        search: whether scales of least error are searched; else they hold the largest value. Types
            of GGUF files choose scales in their own way.
        corner: the most rows and columns of the corner.

    Raises:
        ConfigError: there is no such scheme; rows are not finite float32 [n, K] of whole groups;
            the corner is empty.
    """
    found = named_scheme(scheme)
    _check(rows, corner)
    coded = found.round(torch.from_numpy(np.ascontiguousarray(rows)), search)
    errors = coded.values.astype(np.float64) - rows
    power, lost = float(np.square(rows, dtype=np.float64).mean()), float(np.square(errors).mean())
    largest = float(np.abs(errors).max())
    is_some = rows != 0
    relative = np.abs(errors[is_some]) / np.abs(rows[is_some])
    return Exploration(
        scheme=scheme,
        coded=coded,
        corner=_corner(coded, *corner),
        corner_weights=rows[: corner[0], : corner[1]],
        errors=_histogram(errors, -largest, largest),
        relative_errors=_histogram(np.minimum(relative, 1.0), 0.0, 1.0),
        mean_square_error=lost,
        snr_db=10 * math.log10(power / lost) if power and lost else math.inf,
        bits_per_weight=found.bits_per_weight(rows.shape[1]),
    )


def bits_against_error(rows: np.ndarray, schemes: Iterable[str] | None = None) -> list[SchemePoint]:
    """Bits and errors of each scheme on rows, float32 [n, K], in ascending order of bits.

    ``schemes``: None for all of ``SCHEMES`` whose groups fill the rows. Raises as ``explore`` does.
    """
    if schemes is None:
        schemes = [name for name in SCHEMES if rows.shape[-1] % named_scheme(name).block == 0]
    explored = [explore(rows, name) for name in schemes]
    points = [
        SchemePoint(e.scheme, e.bits_per_weight, e.mean_square_error, e.snr_db) for e in explored
    ]
    return sorted(points, key=lambda point: point.bits_per_weight)


def rows_of(model: str | Path, name: str, rows: int = 64) -> np.ndarray:
    """Read the first rows of a matrix by its Hugging Face name: float32 [rows, K].

    ``model``: a folder or a GGUF file.

    Raises:
        ConfigError: the model has no such matrix; the message has similar names.
        ModelError: the model cannot be read.
    """
    parameters = Parameters(open_checkpoint(model))
    matrices = [known for known in parameters.names if len(parameters.shape(known)) == 2]
    if name not in matrices:
        near = difflib.get_close_matches(name, matrices, n=3, cutoff=0.0)
        raise ConfigError(f"{model} has no matrix {name!r}; it has {', '.join(near)} and others")
    return parameters.rows(name, 0, rows)


def _check(rows: np.ndarray, corner: tuple[int, int]) -> None:
    if rows.dtype != np.float32 or rows.ndim != 2 or not rows.size:
        raise ConfigError(f"rows must be float32 [n, K], not {rows.dtype} {list(rows.shape)}")
    if not np.isfinite(rows).all():
        raise ConfigError("rows have a value that is not finite")
    if min(corner) < 1:
        raise ConfigError(f"a corner has a row and a column at least, not {corner}")


def _corner(coded: CodedRows, rows: int, columns: int) -> CodedRows:
    """The first rows and columns, with the groups that the columns are in."""
    groups = -(-columns // coded.width)
    return CodedRows(
        codes=coded.codes[:rows, :columns],
        levels=coded.levels[:rows, :columns],
        scales=coded.scales[:rows, :groups],
        zeros=coded.zeros[:rows, :groups],
        offsets=coded.offsets[:rows, :groups],
        values=coded.values[:rows, :columns],
        width=coded.width,
    )


def _histogram(values: np.ndarray, low: float, high: float) -> Histogram:
    counts, edges = np.histogram(values, _BINS, (low, high))
    return Histogram(edges, counts)


def _lists(arrays: CodedRows | Histogram) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in asdict(arrays).items()
    }
