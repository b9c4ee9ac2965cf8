"""The weights of a checkpoint as the page's picture of quantization shows them: which there are,
and a few of one as floats.

Only the header is read for the table, and of a weight only what is shown, with what its format
needs to tell it (scales). ``python -m octavo.page.tensors`` reads a question from its input,
``{path}`` or ``{path, name, down, across}``, and writes the answer: a server has it run so, as a
file that is truncated while it is mapped ends the process that reads it, and some formats take
PyTorch.
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
    """``{tensors: [{name, shape, format, bytes}], num_left_out}``, of the file's header alone:
    where several tensors make up a weight, its shape is null, and is known when it is read."""
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
    """Up to `ROWS` x `COLUMNS` weights: ``{name, shape, format, is_quantized, row, column, rows,
    columns, float32}``, the last in base64, little-endian, row by row.

    Args:
        name: one of the checkpoint's.
        down, across: where in it, from 0, its first rows and columns, to 1, its last. Columns begin
            at multiples of `COLUMNS`, where blocks of all formats do.

    Raises:
        ModelError: it is damaged, or of a format that is not known.
        ConfigError: its format takes PyTorch, which is not there.
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
    """A vector as one row; matrices that lie one behind the other (of experts) as one."""
    if isinstance(weight, StoredWeight) and len(weight.shape) != 2:
        columns = weight.shape[-1] if weight.shape else 1
        return StoredWeight(weight.type, weight.data, (len(weight.data), columns))
    return weight


def _answer(path: Path, name: str | None = None, **place: float) -> dict[str, Any]:
    """A table or a slice, or ``{error, status}``."""
    try:
        checkpoint = open_checkpoint(path)
        if name is None:
            return tensor_table(checkpoint)
        if name not in checkpoint.tensors:
            return {"error": f"the model has no tensor {name!r}", "status": 404}
        return tensor_slice(checkpoint, name, **place)
    except (ConfigError, ModelError) as error:
        text = str(error).replace(str(path), path.name)  # clients need not know where files lie
        return {"error": text, "status": 400}


def _main() -> None:
    question = json.load(sys.stdin)
    answer = _answer(Path(question.pop("path")), **question)
    sys.stdout.write(json.dumps(answer, allow_nan=False))


if __name__ == "__main__":
    _main()
