"""Compile the native CPU kernels: one shared library for each instruction set level.

    python csrc/build.py                                  all levels, into octavo/kernels/cpu/lib
    python csrc/build.py --isa avx512bf16,scalar          only these
    python csrc/build.py --isa native                     only the best one for this processor
    python csrc/build.py --sanitize --into build/sanitized

setup.py calls ``build`` when octavo is installed; scripts/test calls it before each run. It needs
the standard library, and a C++17 compiler: ``$CXX``, or g++, clang++ or c++. What was compiled
stays in build/native, and is compiled anew when its source, a header, flags or the compiler change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parent
LIBRARIES = ROOT / "octavo" / "kernels" / "cpu" / "lib"
CACHE = ROOT / "build" / "native"
# What was built with what, and why the rest was not: octavo/kernels/cpu/library.py reads it.
RECORD = "build.json"

FLAGS = ["-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden"]
FLAGS += ["-fno-math-errno", "-Wall", "-Wextra"]
OPTIMIZED = ["-O3"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
SANITIZED += ["-fno-sanitize-recover=undefined", "-fno-var-tracking"]


# Sources that take nearly all the time, by name.
LONGEST = ("attention", "latent", "linear_coded", "linear_int8")


@dataclass(frozen=True)
class Level:
    """An instruction set: the flags for it, and a line of code that needs them all.

    ``takes``: sources, by name, that have no use for what the level has beyond the one ``below``
    it, so that its flags make the same object. They are compiled once for both.
    """

    name: str
    machine: str  # as in the compiler's target; "" is any
    flags: tuple[str, ...]
    probe: str
    below: str = ""
    takes: tuple[str, ...] = ()


# Features by name, not -march=x86-64-v3 and the like: g++ 10 does not know those, and the features
# are the very ones that library.py looks for in the processor.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# GCC would move loads ahead, which these processors do by themselves, before it assigns registers,
# until sums have none. clang does not; the second flag keeps it from saying so for each file.
_NEON = ("-fno-schedule-insns", "-Wno-ignored-optimization-argument")
# Sources without products of pairs or quads of numbers; with those of bfloat16, and none of int8;
# with those of int8, and none of bfloat16.
_PLAIN = (
    *("attention_plan", "bus_error", "conv", "epilogue", "experts", "group", "kv_move"),
    *("linear_coded", "logprobs", "lora", "pack", "pack_gguf", "pool", "positions", "program"),
    *("recurrence", "rows", "sample", "shared_prefix"),
)
_OF_BF16 = ("activations", "kv_write", "latent", "linear_float")
_OF_INT8 = ("linear", "linear_int8")
_X86 = "#include <immintrin.h>\n"
_ARM = "#include <arm_neon.h>\n"
LEVELS = (
    Level("scalar", "", (), "int f(int a) { return a; }"),
    Level(
        "avx2", "x86_64", _AVX2,
        _X86 + "__m256 f(__m256 a, __m128i h) { return _mm256_fmadd_ps(a, a, _mm256_cvtph_ps(h));}",
    ),
    Level(
        "avxvnni", "x86_64", (*_AVX2, "-mavxvnni"),
        _X86 + "__m256i f(__m256i a) { return _mm256_dpbusd_avx_epi32(a, a, a); }",
        "avx2", (*_PLAIN, *_OF_BF16),
    ),
    Level(
        "avx512vnni", "x86_64", _AVX512,
        _X86 + "__m512i f(__m512i a) { return _mm512_dpbusd_epi32(a, a, a); }",
    ),
    Level(
        "avx512bf16", "x86_64", (*_AVX512, "-mavx512bf16"),
        _X86 + "__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }",
        "avx512vnni", (*_PLAIN, *_OF_INT8),
    ),
    Level(
        "neon", "aarch64", ("-march=armv8.2-a+dotprod", *_NEON),
        _ARM + "int32x4_t f(int32x4_t a, int8x16_t b) { return vdotq_s32(a, b, b); }",
    ),
    Level(
        "neoni8mm", "aarch64", ("-march=armv8.2-a+dotprod+i8mm+bf16", *_NEON),
        _ARM + "int32x4_t f(int32x4_t a, int8x16_t b) { return vmmlaq_s32(a, b, b); }\n"
        "float32x4_t g(float32x4_t a, bfloat16x8_t b) { return vbfmmlaq_f32(a, b, b); }",
    ),
)  # fmt: skip


class BuildError(Exception):
    """A source does not compile, or does not link. The message has the compiler's words."""


@dataclass
class Result:
    """What came of it: the levels that were built, why others were not, and with what."""

    built: list[str]
    skipped: dict[str, str]
    compiler: str | None

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=1) + "\n"


def find_compiler() -> list[str] | None:
    """The command, which may be several words as in ``ccache g++``."""
    for command in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words
    return None


def build(
    into: Path = LIBRARIES,
    isa: list[str] | None = None,
    sanitize: bool = False,
    only: list[str] | None = None,
    keep_going: bool = False,
) -> Result:
    """Build the levels that the compiler knows, or those of them in ``isa``, into a folder.

    ``isa`` None is what ``OCTAVO_BUILD_ISA`` says: names of levels with commas between them, of
    which "native" is the best one for this processor, and "all", as if it is not set, are all.

    A source that does not compile raises ``BuildError``; with ``keep_going`` it costs its level.
    That there is no compiler, or one that does not know a level, is told in the result. ``only``:
    the sources to build from, by name.
    """
    if isa is None:
        isa = isa_from_environment()
    if os.environ.get("OCTAVO_NATIVE") == "0":
        return no_libraries(into, "OCTAVO_NATIVE=0 was set when octavo was installed")
    if os.name != "posix":
        return no_libraries(into, f"there are no native kernels for {sys.platform} yet")
    compiler = find_compiler()
    if compiler is None:
        reason = "no C++ compiler was found when octavo was installed"
        return no_libraries(into, f"{reason} (Debian, Ubuntu: apt-get install g++)")
    into.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE):
        result = _Build(compiler, into, sanitize, only).run(isa, keep_going)
    if isa is None:  # a restricted build leaves the other levels of an earlier one
        _remove(into, keep=result.built)
    _write(into / RECORD, result.to_json().encode())
    return result


def no_libraries(into: Path, reason: str) -> Result:
    """Leave no library in the folder, but a note why."""
    into.mkdir(parents=True, exist_ok=True)
    result = Result([], {"all": reason}, None)
    _remove(into, keep=[])
    _write(into / RECORD, result.to_json().encode())
    return result


def _remove(into: Path, keep: list[str]) -> None:
    for file in into.glob("liboctavo_*.so"):
        if file.stem.removeprefix("liboctavo_") not in keep:
            file.unlink()


def isa_from_environment(default: list[str] | None = None) -> list[str] | None:
    """The levels that ``OCTAVO_BUILD_ISA`` names, None for all, or the default if it is not set."""
    names = [name for name in os.environ.get("OCTAVO_BUILD_ISA", "").split(",") if name]
    known = [*(level.name for level in LEVELS), "native", "all"]
    if unknown := sorted(set(names).difference(known)):
        raise BuildError(
            f"OCTAVO_BUILD_ISA: no level {', '.join(unknown)}; known: {', '.join(known)}"
        )
    if not names:
        return default
    return None if "all" in names else names


class _Build:
    """One run. All compilers together are at most as many as there are cores."""

    def __init__(
        self, compiler: list[str], into: Path, sanitize: bool, only: list[str] | None
    ) -> None:
        self.compiler = compiler
        self.into = into
        self.flags = FLAGS + (SANITIZED if sanitize else OPTIMIZED)
        self.sanitize = sanitize
        self.identity = self._ask("--version")
        self.target = self._ask("-dumpmachine")
        self.cache = CACHE / f"{self.target}{'-sanitized' if sanitize else ''}"
        # What takes longest first: what is left to the end is short.
        self.sources = sorted(
            SOURCES.glob("*.cpp"), key=lambda file: (file.stem not in LONGEST, file.name)
        )
        if only:
            self.sources = [source for source in self.sources if source.name in only]

    def run(self, isa: list[str] | None, keep_going: bool) -> Result:
        machine = "aarch64" if "arm64" in self.target else self.target.partition("-")[0]
        wanted = [level for level in LEVELS if level.machine in ("", machine)]
        if isa is not None:
            best = self._best_here(wanted).name if "native" in isa else None
            wanted = [level for level in wanted if level.name in isa or level.name == best]
        result = Result([], {}, self.identity.partition("\n")[0])
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            known = list(threads.map(self._knows, wanted))
            able = [level for level, knows in zip(wanted, known, strict=True) if knows]
            jobs: dict[tuple[Level, Path], Future[Path]] = {}
            for source in self.sources:
                for maker in dict.fromkeys(_maker(level, source) for level in able):
                    jobs[maker, source] = threads.submit(self._object, maker, source)
        # All of them ran to the end, so that one broken source does not cost the others' work.
        for level in wanted:
            if level not in able:
                reason = f"{result.compiler} does not know {' '.join(level.flags)}"
                result.skipped[level.name] = reason
                continue
            try:
                objects = [jobs[_maker(level, source), source] for source in self.sources]
                self._link(level, [job.result() for job in objects])
                result.built.append(level.name)
            except BuildError as error:
                if not keep_going:
                    raise
                print(error, file=sys.stderr)
                result.skipped[level.name] = "its sources did not compile"
        return result

    def _ask(self, option: str) -> str:
        return self._call([*self.compiler, option]).strip()

    def _call(self, command: list[str], text: str | None = None) -> str:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(command)}\n{done.stderr}")
        if done.stderr:  # warnings: there should be none
            print(done.stderr, file=sys.stderr)
        return done.stdout

    def _key(self, *parts: str | bytes) -> str:
        text = [self.identity, *self.flags, *parts]
        joined = b"\0".join(part.encode() if isinstance(part, str) else part for part in text)
        return hashlib.sha256(joined).hexdigest()[:24]

    def _best_here(self, levels: list[Level]) -> Level:
        """The last of the levels whose instructions this processor has, as the compiler sees it."""

        def macros(*flags: str) -> set[str]:
            try:
                found = self._call([*self.compiler, *flags, "-dM", "-E", "-xc++", "-"], text="")
            except BuildError:
                return set()  # it does not know the level, or cannot tell the processor
            return set(re.findall(r"^#define (\w+)", found, re.MULTILINE))

        plain, here = macros(), macros("-march=native")
        # What a level's flags define, beside what is always defined, are its instructions.
        defined = {level: macros(*level.flags) for level in levels}
        return [level for level in levels if defined[level] and defined[level] - plain <= here][-1]

    def _knows(self, level: Level) -> bool:
        folder = self._folder(level)
        answer = folder / f"probe-{self._key(*level.flags, level.probe)}"
        if not answer.exists():
            command = [
                *self.compiler,
                *level.flags,
                "-xc++",
                "-c",
                "-",
                "-o",
                str(folder / "probe"),
            ]
            try:
                self._call(command, text=level.probe)
                answer.write_text("yes")
            except BuildError:
                answer.write_text("no")
        return answer.read_text() == "yes"

    def _folder(self, level: Level) -> Path:
        folder = self.cache / level.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _object(self, level: Level, source: Path) -> Path:
        made = self._object_file(level, source)
        if not made.exists():
            partial = made.with_suffix(".partial")
            defines = [f"-DOCT_ISA_NAME={level.name}"]
            self._call([*self.compiler, *self.flags, *level.flags, *defines,
                        "-c", str(source), "-o", str(partial)])  # fmt: skip
            if self._object_file(level, source) != made:  # edited meanwhile: which was compiled?
                return self._object(level, source)
            for old in made.parent.glob(f"{source.stem}-*.o"):
                old.unlink()
            partial.rename(made)
        return made

    def _object_file(self, level: Level, source: Path) -> Path:
        read = _with_headers(source)
        key = self._key(*level.flags, source.name, *(file.read_bytes() for file in read))
        return self._folder(level) / f"{source.stem}-{key}.o"

    def _link(self, level: Level, objects: list[Path]) -> None:
        stamp = self._folder(level) / "linked"
        library = stamp.with_name(f"liboctavo_{level.name}.so")
        key = self._key(*(made.name for made in objects))
        if not (library.exists() and stamp.exists() and stamp.read_text() == key):
            # A sanitizer's own functions come from the program that loads the library.
            lenient = self.sanitize or "linux" not in self.target
            strict = [] if lenient else ["-Wl,-z,defs"]
            self._call([*self.compiler, *self.flags, "-shared", *strict, *map(str, objects),
                        "-o", str(library)])  # fmt: skip
            stamp.write_text(key)
        _write(self.into / library.name, library.read_bytes())


def _maker(level: Level, source: Path) -> Level:
    """The level whose object of a source another one has."""
    if source.stem not in level.takes:
        return level
    return next(other for other in LEVELS if other.name == level.below)


def _with_headers(source: Path) -> list[Path]:
    """A source and all files in its folder that it includes, directly or not."""
    found = [source]
    for file in found:  # grows
        for name in re.findall(r'^#include "(\S+)"', file.read_text(), re.MULTILINE):
            header = source.parent / name
            if header not in found and header.exists():
                found.append(header)
    return found


def _write(path: Path, content: bytes) -> None:
    """Replace a file, not its content: a program that has it loaded keeps what it has."""
    if path.exists() and path.read_bytes() == content:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.rename(path)


class _locked:
    """One build at a time, as all share the cache."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "lock"

    def __enter__(self) -> None:
        import fcntl  # not on Windows, where nothing is built

        self.handle = self.file.open("w")
        fcntl.flock(self.handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.handle.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=LIBRARIES, help="the folder of the libraries")
    parser.add_argument(
        "--isa",
        help="levels, with commas between them; native: the best one here; all: that are possible",
    )
    parser.add_argument("--only", help="sources in csrc, with commas between them; all")
    parser.add_argument("--sanitize", action="store_true", help="with checks of memory accesses")
    parser.add_argument("--quiet", action="store_true", help="say nothing but warnings and errors")
    options = parser.parse_args()
    if options.isa:
        os.environ["OCTAVO_BUILD_ISA"] = options.isa
    only = options.only.split(",") if options.only else None
    try:
        result = build(options.into, sanitize=options.sanitize, only=only)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for level, reason in result.skipped.items():
        print(f"native kernels: {level}: {reason}", file=sys.stderr)
    if not options.quiet:
        print(f"native kernels: {', '.join(result.built) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
