"""Installs octavo with its native kernels: what pyproject.toml cannot say.

The kernels are plain shared libraries, one for each instruction set, which csrc/build.py compiles.
They do not depend on the version of Python, so a wheel with them is of one platform and of any
Python 3; a wheel without (no compiler, or ``OCTAVO_NATIVE=0``) is of any platform too.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
DOCUMENTS = ROOT / "docs"

# csrc/build.py, by another name than that of the package `build`.
_spec = importlib.util.spec_from_file_location("octavo_native", ROOT / "csrc" / "build.py")
assert _spec is not None and _spec.loader is not None
native = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = native
_spec.loader.exec_module(native)


class OctavoDistribution(Distribution):
    """Of one platform as soon as native libraries have been built for it."""

    has_native_libraries = False

    def has_ext_modules(self) -> bool:
        return self.has_native_libraries


class BuildNative(Command):
    """Compile the kernels: into the wheel, or into the source tree of an editable installation."""

    description = "compile the native CPU kernels"
    user_options: list[tuple[str, str, str]] = []
    editable_mode = False  # set by setuptools

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    @property
    def into(self) -> Path:
        if self.editable_mode or self.build_lib is None:
            return native.LIBRARIES
        return Path(self.build_lib) / native.LIBRARIES.relative_to(ROOT)

    def run(self) -> None:
        # A wheel is for machines that are not known; a source tree is run where it is.
        isa = native.isa_from_environment(["native"] if self.editable_mode else None)
        result = native.build(self.into, isa, keep_going=True)  # better slow than not at all
        for level, reason in result.skipped.items():
            if level != "all":
                self.warn(f"native kernels for {level} left out: {reason}")
        if not result.built:
            reason = result.skipped.get("all", "no level could be compiled")
            self.warn(f"octavo is installed without native kernels, and will be slow: {reason}")
        self.distribution.has_native_libraries = bool(result.built)

    # What setuptools asks of parts of `build`.
    def get_source_files(self) -> list[str]:
        return [str(file.relative_to(ROOT)) for file in sorted(native.SOURCES.glob("*.*"))]

    def get_outputs(self) -> list[str]:
        return [str(file) for file in sorted(self.into.glob("*"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildDocuments(Command):
    """Copy the page's documents into the wheel; a source tree has them where they are."""

    description = "copy the documents that the page shows, with their images"
    user_options: list[tuple[str, str, str]] = []
    editable_mode = False  # set by setuptools

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if self.editable_mode or self.build_lib is None:
            return
        into = Path(self.build_lib) / "octavo" / "page" / "documents"
        for document in self._documents():
            target = into / document.relative_to(DOCUMENTS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(document, target)

    def _documents(self) -> list[Path]:
        return sorted([*DOCUMENTS.glob("*.md"), *DOCUMENTS.glob("pictures/*.webp")])

    # What setuptools asks of parts of `build`.
    def get_source_files(self) -> list[str]:
        return [str(document.relative_to(ROOT)) for document in self._documents()]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_native", None), ("build_documents", None)]


class BdistWheel(bdist_wheel):
    def run(self) -> None:
        self.run_command("build")  # first, as the kind of wheel depends on what came of it
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        if not self.distribution.has_ext_modules():
            platform = "any"
        return "py3", "none", platform


setup(
    distclass=OctavoDistribution,
    cmdclass={
        "build": Build,
        "build_native": BuildNative,
        "build_documents": BuildDocuments,
        "bdist_wheel": BdistWheel,
    },
)
