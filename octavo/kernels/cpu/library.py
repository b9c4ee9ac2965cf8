"""Choice and loading of the native library for this processor.

    library = load()                    the best level that was built and runs here
    with Pool(library, 2) as pool:
        library.check(library.lib.oct_linear(pool, byref(args)))

``OCTAVO_ISA`` forces a level (``scalar``, ``avx2``, ...); ``none`` or ``reference`` disables native
kernels. If none can be used, ``Unavailable`` says why.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import json
import os
import weakref
from pathlib import Path
from types import TracebackType

from octavo.base.errors import ConfigError, EngineError, PeerEndedError, StepAbortedError
from octavo.kernels.cpu import abi
from octavo.system import machine

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512_vnni")
# CPU features that each level needs; the best level first. csrc/build.py has compiler flags.
LEVELS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*_AVX512, "avx512_bf16"),
    "avx512vnni": _AVX512,
    "avxvnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
    "neoni8mm": ("asimddp", "i8mm", "bf16"),
    "neon": ("asimddp",),
    "scalar": (),
}
_NO_NATIVE = ("none", "reference")


class Unavailable(ConfigError):
    """Raised where no native kernels can be used. ``reason`` says why, and what would help."""

    def __init__(self, reason: str):
        super().__init__(f"no native CPU kernels: {reason}")
        self.reason = reason


class Library:
    """A loaded library. ``lib`` has the functions of csrc/octavo.h, ``missing`` those it lacks."""

    def __init__(self, isa: str, path: Path):
        try:
            self.lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path} cannot be loaded: {error}. {_REINSTALL}") from error
        self.isa = isa
        self.path = path
        self.missing = abi.bind(self.lib)
        self._refuse_another_build()

    def __repr__(self) -> str:
        return f"<Library {self.isa}>"

    def _refuse_another_build(self) -> None:
        """Refuse a library with other structs, whose calls would write out of bounds."""
        version = self.lib.oct_abi_version() if "oct_abi_version" not in self.missing else None
        if version != abi.OCT_ABI_VERSION:
            raise Unavailable(
                f"{self.path} has version {version} of the interface, this octavo needs "
                f"{abi.OCT_ABI_VERSION}. {_REINSTALL}"
            )
        if self.missing:
            raise Unavailable(f"{self.path} lacks {', '.join(self.missing)}. {_REINSTALL}")
        sizes = abi.struct_sizes(self.lib)
        for name, struct in abi.STRUCTS.items():
            if sizes.get(name) != (size := ctypes.sizeof(struct)):
                raise Unavailable(
                    f"{self.path} is of another build: {name} has {sizes.get(name)} bytes there, "
                    f"{size} here. {_REINSTALL}"
                )

    def last_error(self) -> str:
        """Message of the last failed call of this thread."""
        return self.lib.oct_last_error().decode(errors="replace")

    def check(self, code: int) -> int:
        """Return the code of a call if it is not an error, and raise the error otherwise."""
        if code >= 0:
            return code
        if code == abi.OCT_ERR_ABORTED:
            raise StepAbortedError("the native call was aborted")
        if code == abi.OCT_ERR_PEER:
            raise PeerEndedError(self.last_error())
        if code == abi.OCT_ERR_MEMORY:
            raise MemoryError(self.last_error())
        raise EngineError(f"native kernels ({self.isa}): {self.last_error()}")


class Pool:
    """Threads for native calls; passes as the ``oct_pool*`` of ctypes functions.

    It survives a fork: the child starts threads of its own. Between two calls, threads spin for
    ``spin_us`` microseconds before they sleep.
    """

    def __init__(self, library: Library, num_threads: int | None = None, spin_us: int = 200):
        self.size = usable_threads() if num_threads is None else num_threads
        handle = library.lib.oct_pool_new(self.size, spin_us)
        if not handle:
            raise EngineError(f"native thread pool: {library.last_error()}")
        self._library = library
        self._as_parameter_ = ctypes.c_void_p(handle)
        self._free = weakref.finalize(self, library.lib.oct_pool_free, self._as_parameter_)

    def abort(self) -> None:
        """Make the running call, if any, fail soon; callable from any thread."""
        self._library.lib.oct_abort(self)

    def close(self) -> None:
        """End the threads, after the running call, if any."""
        self._free()
        self._as_parameter_ = ctypes.c_void_p(None)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def usable_threads() -> int:
    """Number of threads that get a core each here, within affinity and control group."""
    return machine.cpu().usable_cores


def folder() -> Path:
    """Folder of the libraries; ``OCTAVO_LIBRARY_DIR`` is for other builds, as with sanitizers."""
    return Path(os.environ.get("OCTAVO_LIBRARY_DIR") or Path(__file__).parent / "lib")


def built() -> list[str]:
    """Levels that were built, best first."""
    return [isa for isa in LEVELS if _file(isa).is_file()]


def runnable(cpu: machine.Cpu | None = None) -> list[str]:
    """Levels that were built and run on a processor (by default this one), best first."""
    present = set((cpu or _this_cpu()).isa)
    return [isa for isa in built() if present.issuperset(LEVELS[isa])]


@functools.cache
def _this_cpu() -> machine.Cpu:
    """This processor; cached, since it is asked for at every op and read from a long file."""
    return machine.cpu()


def choose(cpu: machine.Cpu | None = None) -> str:
    """The level to use: the best runnable one, or what ``OCTAVO_ISA`` says."""
    forced = os.environ.get("OCTAVO_ISA", "").strip().lower()
    if forced in _NO_NATIVE:
        raise Unavailable(f"OCTAVO_ISA={forced} asks for the reference kernels")
    if forced:
        return _forced(forced, cpu or _this_cpu())
    possible = runnable(cpu)
    if not possible:
        if built():
            raise Unavailable(f"this processor can run none of {', '.join(built())}. {_REINSTALL}")
        raise Unavailable(_why_nothing_was_built())
    return possible[0]


def load(isa: str | None = None) -> Library:
    """Load the library of a level, by default of the one that :func:`choose` returns; cached."""
    if isa is None:
        isa = choose()
    elif isa not in LEVELS:
        raise Unavailable(f"there is no level {isa!r}; {_known()}")
    elif not _file(isa).is_file():
        raise Unavailable(_why_not_built(isa))
    return _load(isa, _file(isa))


def report_bus_errors() -> None:
    """Let a SIGBUS report the mapped file that has lost its contents before it ends the process.

    Without a native library, Python reports the function that was running.
    """
    levels = runnable()
    if levels:
        load(levels[0]).lib.oct_report_bus_errors()
    elif not faulthandler.is_enabled():
        faulthandler.enable()


@functools.cache
def _load(isa: str, path: Path) -> Library:
    return Library(isa, path)


_REINSTALL = "Install octavo again to build what is missing"


def _file(isa: str) -> Path:
    return folder() / f"liboctavo_{isa}.so"


def _known() -> str:
    return f"known: {', '.join((*LEVELS, *_NO_NATIVE))}"


def _forced(isa: str, cpu: machine.Cpu) -> str:
    if isa not in LEVELS:
        raise Unavailable(f"OCTAVO_ISA={isa} is no level; {_known()}")
    if isa not in built():
        raise Unavailable(f"OCTAVO_ISA={isa}: {_why_not_built(isa)}")
    lacking = [feature for feature in LEVELS[isa] if feature not in cpu.isa]
    if lacking:
        raise Unavailable(f"OCTAVO_ISA={isa}: this processor lacks {', '.join(lacking)}")
    return isa


def _record() -> dict[str, str]:
    """Reasons why levels were not built, as csrc/build.py noted them."""
    try:
        return dict(json.loads((folder() / "build.json").read_text())["skipped"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _why_nothing_was_built() -> str:
    reason = _record().get("all")
    if reason is None:
        reason = f"there are no libraries in {folder()}"
    return f"{reason}. {_REINSTALL}"


def _why_not_built(isa: str) -> str:
    if not built():
        return _why_nothing_was_built()
    reason = _record().get(isa, "it was left out when octavo was installed")
    return f"the level {isa} was not built: {reason}. Built: {', '.join(built())}"
