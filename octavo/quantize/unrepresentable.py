"""Finds values of a model that no smaller type can hold, before the work begins."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from octavo.base.errors import ConfigError
from octavo.models.parameters import Parameters

LARGEST_FLOAT16 = 65504.0
_CHUNK_VALUES = 1 << 22  # in memory at once as float32


def check_values(
    parameters: Parameters,
    limit_of: Callable[[str], float],
    progress: Callable[[int, int], None],
) -> None:
    """Check every value of a model.

    Args:
        limit_of: the largest magnitude that a parameter may have, by its name.

    Raises:
        ConfigError: names the tensor, the place and the value of one that is not finite or larger.
    """
    names = list(parameters.names)
    for number, name in enumerate(names, start=1):
        shape, limit = parameters.shape(name), limit_of(name)
        step = max(1, _CHUNK_VALUES // max(1, prod(shape[1:])))
        for start in range(0, shape[0], step):
            _check(parameters, name, start, parameters.rows(name, start, start + step), limit)
        progress(number, len(names))


def _check(parameters: Parameters, name: str, start: int, rows: np.ndarray, limit: float) -> None:
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(rows) <= min(limit, np.finfo(np.float32).max))
    if not bad.any():
        return
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    value = float(rows[place])
    row, columns = start + place[0], place[1:]
    where = f"row {row}, column {columns[-1]}" if columns else f"value {row}"
    count = int(bad.sum())
    more = f" (and {count - 1:,} more near it)" if count > 1 else ""
    what = f"{parameters.checkpoint.path}: {name}, {where}, is {value:g}{more}"
    if np.isfinite(value):
        raise ConfigError(
            f"{what}: scales of 16 bits reach {LARGEST_FLOAT16:,.0f}, so it would be clipped. "
            "Mend the checkpoint, or keep its weights in bfloat16: --method gguf --type BF16"
        )
    raise ConfigError(f"{what}, which is no weight: the checkpoint is damaged, get it again")
