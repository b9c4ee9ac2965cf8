"""Triton kernels without a GPU: run by the interpreter, and compiled for GPUs that are elsewhere.

Triton decides by an environment variable, as it is imported, whether a process interprets or
compiles; and another test may have imported it first. So here jitted functions stay as they are,
and what happens when they are launched is changed for a while: :func:`interpreting` hands them to
the interpreter, :func:`launches` notes them down, so that exactly what a launcher would launch can
be compiled.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

triton = pytest.importorskip("triton")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from quick_interpreter import quick_interpreter  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

ARCHS = (80, 89, 90, 100)  # compute capabilities, times ten
# For parameters of a test: compiled for one of them in every run, and for all with -m long.
EACH_ARCH = [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in ARCHS if arch != 90)]

# Of a block, in bytes, if it asks for it.
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_ROUNDED = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels launched in here run in the interpreter, on tensors of the CPU."""
    with (
        quick_interpreter(),
        mock.patch.object(triton.knobs.runtime, "interpret", True),
        mock.patch.object(interpreter, "_patch_lang_tensor", _patch_tensor),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", _multiply),
        mock.patch.object(interpreter, "_convert_float", _convert),
        mock.patch.object(JITFunction, "run", _interpret),
        mock.patch.object(JITFunction, "__call__", _interpret_inner),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a kernel."""

    registers: int  # of a thread
    spills: int  # bytes of local memory, of a thread
    shared: int  # bytes, of a block
    ptx: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with the arguments that it was to be launched with."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]  # num_warps, num_stages

    @property
    def key(self) -> str:
        """By which Triton knows whether it has compiled this: for another key it compiles again."""
        _, kinds, options = _binder(self.kernel)(**self.arguments, **self.options)
        return f"{self.kernel.__name__} {kinds} {options}"

    def compiled(self, arch: int) -> Compiled:
        """As Triton would for these arguments: it knows which are one, or multiples of 16."""
        signature, constants, aligned = {}, {}, []
        for parameter in self.kernel.params:
            name, value = parameter.name, self.arguments[parameter.name]
            number = value if isinstance(value, int) and not parameter.do_not_specialize else None
            if parameter.is_constexpr or value is None or number == 1:
                constants[name] = value
                continue
            signature[name] = _type_of(value)
            if isinstance(value, torch.Tensor) or (number is not None and number % 16 == 0):
                aligned.append(name)
        return compiled(self.kernel, signature, constants, arch, aligned, **self.options)


def compiled(
    kernel: JITFunction,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: int,
    aligned: Collection[str] = (),
    **options: Any,
) -> Compiled:
    """A kernel compiled for a compute capability, 90 for sm_90.

    ``signature`` has Triton's types of arguments by name ("*bf16", "i32"), ``constexprs`` the
    values of all others; ``aligned`` are those that are multiples of 16, ``options`` are num_warps
    and the like.
    """
    names = list(kernel.arg_names)
    source = ASTSource(
        kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options.setdefault("enable_fp_fusion", True)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = _resources(made.asm["cubin"])
    return Compiled(registers, spills, made.metadata.shared, made.asm["ptx"])


def launches(function: Callable[[], Any]) -> list[Launch]:
    """What a function launches; nothing is run."""
    seen: list[Launch] = []

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: kwargs.pop(name) for name in kernel.arg_names if name in kwargs}
        defaults = {p.name: p.default for p in kernel.params if p.has_default}
        seen.append(Launch(kernel, tuple(grid), {**defaults, **arguments}, kwargs))

    with mock.patch.object(JITFunction, "run", note):
        function()
    return seen


@functools.cache
def _binder(kernel: JITFunction) -> Callable[..., tuple[Any, list[Any], dict[str, Any]]]:
    """What Triton makes of arguments: those by name, of what kind each is, and what is left."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def _interpret(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """What is patched of the language, for the kernel and all that it calls, is put back behind it:
    the next kernel may be one to compile."""
    language = triton.language
    patched = interpreter._patch_lang(
        SimpleNamespace(__globals__={"tl": language, "core": language.core})
    )
    try:
        _interpreted(kernel.fn).run(*args, grid=grid, warmup=warmup, **kwargs)
    finally:
        patched.restore()


def _interpret_inner(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """A jitted function called by another one. Triton itself would patch the language each time."""
    return _interpreted(function.fn).rewrite()(*args, **kwargs)


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Any:
    return interpreter.InterpretedFunction(function)


def _patch_tensor(tensor: Any, scope: Any, *, patch: Any = interpreter._patch_lang_tensor) -> None:
    """Triton 3.6 makes ranges of arrays of one number, which NumPy no longer takes for numbers."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert(
    x: np.ndarray, of: Any, to: Any, mode: Any, *, convert: Any = interpreter._convert_float
) -> np.ndarray:
    """To the nearest, as GPUs do; Triton's interpreter cuts off what float32 has more."""
    if of != tl.float32 or to not in _ROUNDED:
        return convert(x, of, to, mode)
    rounded = torch.from_numpy(np.array(x).view(np.float32)).to(_ROUNDED[to])
    return rounded.view(torch.uint16 if to == tl.bfloat16 else torch.uint8).numpy()


def _multiply(builder: Any, a: Any, b: Any, added: Any, *precision: Any) -> Any:
    """``tl.dot`` as tensor cores have it. Triton's interpreter would multiply the bits of bfloat16
    as integers; and BLAS rounds a row by its place among the others, so each is one product."""
    a_data, b_data = _widened(a), _widened(b)
    product = np.matmul(a_data[..., None, :], b_data[..., None, :, :], dtype=added.data.dtype)
    return interpreter.TensorHandle(product[..., 0, :] + added.data, added.dtype.scalar)


def _widened(operand: Any) -> np.ndarray:
    """float32 for floats that NumPy has not."""
    type_ = operand.dtype.scalar
    if not type_.is_floating() or operand.data.dtype.kind == "f":
        return operand.data
    return interpreter._convert_float(operand.data, type_, tl.float32, None).view(np.float32)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [_BINARIES / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found, said
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
