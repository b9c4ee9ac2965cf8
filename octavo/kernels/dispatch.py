"""Choice of an implementation for each op on a device, with the reasons against better ones.

Models call ops only through an :class:`Ops` table that they are given, so that a table can be put
together for each device. Between two ops a model only calls ``view`` on a tensor.

The native CPU kernels run a whole step at once. Their ops compute nothing when they are called:
they record (``recorder.py``), and ``runtime/op_program.py`` makes a program of the recording. Such
a table is for that use only, so :func:`create_ops` does not choose it by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from octavo.kernels.cpu import library

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one device; shapes and semantics are in :mod:`octavo.kernels.reference`."""

    name: str  # the implementations in use, joined by "+"
    isa: str | None  # the instruction set of native CPU kernels, None without them
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
    moe: Op
    sigmoid_mul: Op


OP_NAMES = tuple(f.name for f in fields(Ops) if f.name not in ("name", "isa", "dtype"))

# A plan can only be used by the backend that made it.
_CHOSEN_WITH = {"plan_attention": "paged_attention"}


@dataclass(frozen=True, slots=True, eq=False)
class OpBackend:
    """One implementation of some or all ops.

    Devices and dtypes have torch's names as strings: ``cuda:0``, ``bfloat16``.
    ``refuses(op, device, dtype)`` returns why the backend cannot run an op there, or None.
    ``isa()`` returns the instruction set of its kernels, if they are for one.
    """

    name: str
    ops: Mapping[str, Op]
    refuses: Callable[[str, str, str], str | None]
    isa: Callable[[], str | None] = lambda: None


class OpChoice(NamedTuple):
    """The backend that runs an op, and each better one that was refused, with the reason."""

    op: str
    chosen: str
    refused: tuple[tuple[str, str], ...]


def _refuses_nothing(op: str, device: str, dtype: str) -> str | None:
    return None


def _native_refuses(op: str, device: str, dtype: str) -> str | None:
    if device != "cpu":
        return "these kernels are for the CPU"
    if dtype != "float32":
        return "activations between native ops are float32"
    try:
        library.load()
    except library.Unavailable as unavailable:
        return unavailable.reason
    return None


class _OpsOf(Mapping[str, Op]):
    """All ops of a module, which is imported when the first of them is looked up: the reference
    imports torch."""

    def __init__(self, module: str):
        self._module = module

    def __getitem__(self, op: str) -> Op:
        if op not in OP_NAMES:
            raise KeyError(op)
        found: Op = getattr(import_module(self._module), op)
        return found

    def __contains__(self, op: object) -> bool:
        return op in OP_NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(OP_NAMES)

    def __len__(self) -> int:
        return len(OP_NAMES)


REFERENCE = OpBackend("reference", _OpsOf("octavo.kernels.reference"), _refuses_nothing)
NATIVE = OpBackend(
    "native", _OpsOf("octavo.kernels.recorder"), _native_refuses, lambda: library.load().isa
)

# For recording a model's ops, whatever device it will run on.
RECORDER = OpBackend("recorder", NATIVE.ops, _refuses_nothing)

# In order of preference; the reference supports everything and is last.
CANDIDATES: tuple[OpBackend, ...] = (NATIVE, REFERENCE)
# Those whose ops compute when they are called.
EAGER: tuple[OpBackend, ...] = (REFERENCE,)


def create_ops(
    device: str,
    dtype: str = "float32",
    candidates: tuple[OpBackend, ...] = EAGER,
) -> Ops:
    """Create the table of the best implementation of every op for activations of ``dtype`` on
    ``device``."""
    chosen = _choose(device, dtype, candidates)
    ops = {op: candidate.ops[op] for op, (candidate, _) in chosen.items()}
    for op in ("embed", "embed_positions"):
        ops[op] = partial(ops[op], dtype=dtype)
    used = list(dict.fromkeys(candidate for candidate, _ in chosen.values()))
    return Ops(
        name="+".join(candidate.name for candidate in used),
        isa=next((isa for candidate in used if (isa := candidate.isa())), None),
        dtype=dtype,
        **ops,
    )


def explain(
    device: str,
    dtype: str = "float32",
    candidates: tuple[OpBackend, ...] = CANDIDATES,
) -> list[OpChoice]:
    """Return what :func:`create_ops` chooses for every op, and why not a better candidate."""
    chosen = _choose(device, dtype, candidates)
    return [OpChoice(op, candidate.name, refused) for op, (candidate, refused) in chosen.items()]


class _Choice(NamedTuple):
    candidate: OpBackend
    refused: tuple[tuple[str, str], ...]


def _choose(device: str, dtype: str, candidates: tuple[OpBackend, ...]) -> dict[str, _Choice]:
    return {op: _choose_one(_CHOSEN_WITH.get(op, op), device, dtype, candidates) for op in OP_NAMES}


def _choose_one(op: str, device: str, dtype: str, candidates: tuple[OpBackend, ...]) -> _Choice:
    refused: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = (
            candidate.refuses(op, device, dtype) if op in candidate.ops else "does not have this op"
        )
        if reason is None:
            return _Choice(candidate, tuple(refused))
        refused.append((candidate.name, reason))
    raise AssertionError(f"no candidate runs {op} on {device}: {refused}")
