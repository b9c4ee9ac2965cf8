"""Measured size, quality and speed of quantized models, as points that can be drawn.

    points = read_tradeoffs("compared.json")     what octavo quantize --compare ... --json printed
    [(point.bits_per_weight, point.kl) for point in points]

Plain numbers; nothing is imported to read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from octavo.base.errors import BenchmarkError


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """One quantized model beside the one that it was made of.

    ``name``: of its folder or file. ``bits_per_weight``: of all tensors. ``kl``: the mean KL
    divergence from the original in nats, of ``tokens`` of ``text``; ``base_...``: of the original.
    Speeds are tokens/s of one stream.
    """

    name: str
    method: str
    format: str
    bits_per_weight: float
    num_bytes: int
    kl: float
    perplexity: float
    base_perplexity: float
    decode_tps: float
    base_decode_tps: float
    text: str
    tokens: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_tradeoffs(path: str | Path) -> list[Tradeoff]:
    """Read the points of a file with the output of ``octavo quantize --report`` or ``--compare``
    with ``--json``.

    Raises:
        BenchmarkError: the file has other contents; it is named.
    """
    try:
        return tradeoffs(json.loads(Path(path).read_text("utf-8")))
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # JSON's own, and that of UTF-8
        raise BenchmarkError(f"{path} is not JSON: {error}") from error
    except BenchmarkError as error:
        raise BenchmarkError(f"{path}: {error}") from error


def tradeoffs(document: Any) -> list[Tradeoff]:
    """Return the points of such a document: one row, or all ``rows`` of a comparison.

    Raises:
        BenchmarkError: a field is missing, or nothing was measured; the row is named.
    """
    if not isinstance(document, Mapping):
        raise BenchmarkError("is not what octavo quantize prints with --json")
    rows = document.get("rows", [document])
    if not isinstance(rows, list) or not rows:
        raise BenchmarkError("has no rows, as octavo quantize --compare prints them with --json")
    numbered = list(enumerate(rows, start=1))
    if document.get("failed"):  # a comparison of which some could not be judged
        judged = [(n, row) for n, row in numbered if isinstance(row, Mapping) and row.get("report")]
        numbered = judged or numbered
    return [_point(row, number) for number, row in numbered]


def _point(row: Any, number: int) -> Tradeoff:
    report = row.get("report") if isinstance(row, Mapping) else None
    if not isinstance(report, Mapping):
        raise BenchmarkError(f"row {number} has no report: run octavo quantize with --report")
    kinds = {"str": str, "int": int, "float": float}
    try:
        values = {
            **row,
            **report,
            "name": Path(row["out"]).name,
            "num_bytes": row["bytes"],
            "kl": report["kl_mean"],
        }
        return Tradeoff(
            **{each.name: kinds[str(each.type)](values[each.name]) for each in fields(Tradeoff)}
        )
    except KeyError as error:
        raise BenchmarkError(f"row {number} has no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise BenchmarkError(f"row {number}: {error}") from error
