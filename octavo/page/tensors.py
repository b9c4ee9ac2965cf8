"""The weights of a checkpoint for the page's picture of quantization: a table, and slices as
floats.

Only the header is read for the table, and of a weight only the slice, with the scales that its
format needs. ``python -m octavo.page.tensors`` reads a question from its input, ``{path}`` or
``{path, name, down, across}``, and writes the answer. A server runs it as a process of its own,
because a file that is truncated while it is mapped ends the process that reads it, and because some
formats need PyTorch.
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError, ModelError
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.quantization.base import StoredWeight, Weight

MAX_TENSORS = 2000  # of a table; of more, the first
ROWS, COLUMNS = 8, 256  # of a slice: a super-block of GGUF's types in each row


def tensor_table(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return ``{tensors: [{name, shape, format, bytes}], num_left_out}`` from the file's header.

    Where several tensors make up a weight, its shape is null: it is known only when it is read.
    """
    named = checkpoint.tensors.items()
    tensors = [
        {
            "name": name,
            "shape": entry.shape,
            "format": checkpoint.quantization if entry.type is None else entry.type.name,
            "bytes": entry.num_bytes,
        }
        for name, entry in list(named)[:MAX_TENSORS]
    ]
    return {"tensors": tensors, "num_left_out": len(named) - len(tensors)}


def tensor_slice(checkpoint: Checkpoint, name: str, down: float, across: float) -> dict[str, Any]:
    """Return up to `ROWS` x `COLUMNS` weights of a tensor.

    The result is ``{name, shape, format, is_quantized, row, column, rows, columns, float32}``, the
    last in base64, little-endian, row by row.

    Args:
        name: of one of the checkpoint's tensors.
        down, across: place of the slice, from 0, the first rows and columns, to 1, the last.
            Columns begin at multiples of `COLUMNS`, where blocks of all formats do.

    Raises:
        ModelError: it is damaged, or of a format that is not known.
        ConfigError: its format needs PyTorch, which is not installed.
    """
    weight = checkpoint.read(name)
    num_rows, num_columns = prod(weight.shape[:-1]), weight.shape[-1] if weight.shape else 1
    row = round(down * max(0, num_rows - ROWS))
    column = round(across * max(0, num_columns // COLUMNS - 1)) * COLUMNS
    values = _as_matrix(weight).dequantize(row, row + ROWS)[:, column : column + COLUMNS]
    return {
        "name": name,
        "shape": weight.shape,
        "format": weight.format,
        "is_quantized": weight.is_quantized,
        "row": row,
        "column": column,
        "rows": values.shape[0],
        "columns": values.shape[1],
        "float32": b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode(),
    }


def _as_matrix(weight: Weight) -> Weight:
    """Return a vector as one row, and matrices that lie one behind the other (experts) as one
    matrix."""
    if isinstance(weight, StoredWeight) and len(weight.shape) != 2:
        columns = weight.shape[-1] if weight.shape else 1
        return StoredWeight(weight.type, weight.data, (len(weight.data), columns))
    return weight


def _answer(path: Path, name: str | None = None, **place: float) -> dict[str, Any]:
    """Return a table or a slice, or ``{error, status}``."""
    try:
        checkpoint = open_checkpoint(path)
        if name is None:
            return tensor_table(checkpoint)
        if name not in checkpoint.tensors:
            return {"error": f"the model has no tensor {name!r}", "status": 404}
        return tensor_slice(checkpoint, name, **place)
    except (ConfigError, ModelError) as error:
        text = str(error).replace(str(path), path.name)  # clients must not learn the folder
        return {"error": text, "status": 400}


def _main() -> None:
    question = json.load(sys.stdin)
    answer = _answer(Path(question.pop("path")), **question)
    sys.stdout.write(json.dumps(answer, allow_nan=False))


if __name__ == "__main__":
    _main()
