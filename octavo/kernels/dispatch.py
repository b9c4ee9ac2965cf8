"""The table of ops that models call, and why the native kernels cannot run them on a device.

Models call ops only through an :class:`Ops` table that they are given, so that a table can be put
together for each device. Between two ops a model only calls ``view`` on a tensor.

The native CPU kernels run a whole step at once. Their ops compute nothing when they are called:
they record (``recorder.py``), and ``runtime/op_program.py`` makes a program of the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import Any

from octavo.kernels.cpu import library

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one device; shapes and semantics are in :mod:`octavo.kernels.reference`."""

    name: str  # the module in this package that they are of
    dtype: str  # of activations, as torch calls it: "float32"
    embed: Op
    rmsnorm: Op
    linear: Op
    rope: Op
    store_kv: Op
    plan_attention: Op
    paged_attention: Op
    silu_mul: Op
    gelu_mul: Op
    add: Op
    softcap: Op
    lm_head: Op
    store_latents: Op
    latent_attention: Op
    short_conv: Op
    selective_scan: Op
    delta_rule: Op
    gated_norm: Op
    layernorm: Op
    activate: Op
    scale: Op
    embed_positions: Op
    embed_types: Op
    moe: Op
    sigmoid_mul: Op


OP_NAMES = tuple(f.name for f in fields(Ops) if f.name not in ("name", "dtype"))


def create_ops(dtype: str = "float32", name: str = "reference") -> Ops:
    """Create the table of the ops of ``reference`` or ``recorder``, for activations of ``dtype``.

    The module is imported by its name: the reference imports torch.
    """
    module = import_module(f"octavo.kernels.{name}")
    ops = {op: getattr(module, op) for op in OP_NAMES}
    for op in ("embed", "embed_positions", "embed_types"):
        ops[op] = partial(ops[op], dtype=dtype)
    return Ops(name=name, dtype=dtype, **ops)


def why_not_native(device: str, dtype: str = "float32") -> str | None:
    """Return why the native kernels do not run on a device with activations of ``dtype``, None if
    they do; both have torch's names: ``cuda:0``, ``bfloat16``."""
    if device != "cpu":
        return "these kernels are for the CPU"
    if dtype != "float32":
        return "activations between native ops are float32"
    try:
        library.load()
    except library.Unavailable as unavailable:
        return unavailable.reason
    return None
