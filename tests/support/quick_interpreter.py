"""Triton's interpreter without what it does over and over to no end: the same results, in about
half of the time.

Tensors of a kernel under test are small, so nearly all of an operation's time goes to types and
shapes. They are the same few, and are made once here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Kernels that are interpreted in here are so sooner."""
    # Whether sums of integers overflow is worked out in int64, and then nobody is told.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with ExitStack() as patches:
        for of, name, value in (
            (interpreter.interpreter_builder, "options", options),
            (interpreter, "_get_np_dtype", _numpy_type),
            (tl.block_type, "__init__", _make_block),
            (tl.tensor, "__init__", _make_tensor),
            (TritonSemantic, "broadcast_impl_value", _broadcast),
        ):
            patches.enter_context(mock.patch.object(of, name, value))
        yield


def _numpy_type(type_: tl.dtype) -> np.dtype[Any]:
    scalar = type_.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_scalar(scalar)


_numpy_scalar = functools.cache(interpreter._get_np_dtype)


def _make_block(
    block: tl.block_type, scalar: tl.dtype, shape: Any, *, make: Any = tl.block_type.__init__
) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if sizes not in _BLOCKS:
        make(block, scalar, shape)
        _BLOCKS[sizes] = block
    block.element_ty, block.name = scalar, f"<{sizes}, {scalar}>"
    block.shape, block.numel = _BLOCKS[sizes].shape, _BLOCKS[sizes].numel


_BLOCKS: dict[tuple[int, ...], tl.block_type] = {}


def _make_tensor(
    tensor: tl.tensor, handle: Any, type_: tl.dtype, *, make: Any = tl.tensor.__init__
) -> None:
    sizes = tuple(type_.shape) if type_.is_block() else ()
    if sizes not in _TENSORS:
        make(tensor, handle, type_)
        _TENSORS[sizes] = tensor.shape, tensor.numel
    tensor.handle, tensor.type, tensor.dtype = handle, type_, type_.scalar
    tensor.shape, tensor.numel = _TENSORS[sizes]


_TENSORS: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _broadcast(
    semantic: TritonSemantic,
    a: Any,
    b: Any,
    *,
    broadcast: Any = TritonSemantic.broadcast_impl_value,
) -> tuple[Any, Any]:
    """As it is, where there is nothing to do."""
    if a.type.is_block() and b.type.is_block() and a.type.shape is b.type.shape:
        return a, b
    return broadcast(semantic, a, b)
