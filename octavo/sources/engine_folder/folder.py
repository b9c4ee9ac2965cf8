"""Loads a model from an engine folder (``EngineFolder``). The package describes the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from octavo.base.errors import ConfigError, EngineError, ModelFileError
from octavo.base.fields import Fields
from octavo.base.model_files import ModelFolder
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.file_digests import Seals, digest
from octavo.kernels.cpu.library import Library, Pool, report_bus_errors
from octavo.kernels.cpu.packed_weights import PackedWeights
from octavo.kernels.cpu.packing import ALIGNMENT, PackedFormat, plain_format
from octavo.models.config import ModelConfig
from octavo.models.pooling import Pooling
from octavo.runtime.backends import NativeBackend, why_not_native
from octavo.runtime.capacity import RankSpec
from octavo.runtime.op_program import NativeModel
from octavo.runtime.rank import Rank
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder import tokenizer_files
from octavo.sources.engine_folder.manifest import (
    CONSTANTS_FILE,
    WEIGHTS_FILE,
    FolderFile,
    Manifest,
    contents,
)
from octavo.sources.engine_folder.model_config import read_config
from octavo.sources.engine_folder.program import read_program
from octavo.sources.engine_folder.settings import settings_of
from octavo.text.tokenizer import Tokenizer

_MAX_INT32 = (1 << 31) - 1
_MAX_SIZE = 1 << 24  # rows or columns of a matrix


class EngineFolder:
    """A folder that ``octavo build`` has made: a ``ModelSource``.

    Args:
        notes: a folder of octavo's own, which lists the files that were checked; without one they
            are checked at every start.

    Raises:
        ModelFileError: the manifest is damaged.
        UnsupportedModelError: another version of octavo made it.
    """

    def __init__(self, path: Path, notes: Path | None = None):
        self.path = path
        self._folder = ModelFolder(path)
        self._manifest = Manifest(self._folder)
        self._seals = Seals(notes) if notes is not None else None
        self._config: ModelConfig | None = None

    def settings(self, args: EngineArgs) -> EngineArgs:
        """Return the engine's settings: the user's, else those that the folder was built with."""
        return settings_of(self._manifest, args)

    def config(self) -> ModelConfig:
        if self._config is None:
            self._config = read_config(self._manifest.fields.section("model"))
        return self._config

    def pooling(self, args: EngineArgs) -> Pooling | None:
        if args.runner == "pooling" or args.pooling is not None:
            raise ConfigError(f"runner pooling: {self.path} is an engine folder, which generates")
        return None

    def tokenizer(self) -> Tokenizer:
        kind = self._manifest.fields.text("tokenizer")
        if kind not in tokenizer_files.KINDS:
            raise self._manifest.fields.error("tokenizer", f"{kind!r:.60} is no kind of tokenizer")
        built = self._manifest.files.keys() - {WEIGHTS_FILE, CONSTANTS_FILE}
        there = set(tokenizer_files.names(self._folder, kind))
        for name in sorted(built | there):
            self._read(self._manifest.file(name))
        return tokenizer_files.load(self._folder, kind)

    def weights_bytes(self) -> int:
        return self._manifest.file(WEIGHTS_FILE).num_bytes

    def load_rank(self, spec: RankSpec, progress: Callable[[int, int], None] | None = None) -> Rank:
        """Return a rank that runs this model. Nothing has to be loaded, so no progress is reported.

        Raises:
            ModelFileError: the folder is damaged.
            ConfigError: it cannot be run here.
        """
        report_bus_errors()  # the weights are mapped: the file may be truncated meanwhile
        config = self.config()
        reason = why_not_native(spec, config)
        if reason is not None:
            raise ConfigError(
                f"{self.path}: an engine folder is for native kernels, which cannot run it here: "
                f"{reason}"
            )
        return Rank(spec, config, NativeBackend(spec, config, self._native_model))

    def _native_model(self, library: Library, pool: Pool) -> NativeModel:
        fields = self._manifest.fields
        weights = self._read(self._manifest.file(WEIGHTS_FILE), pool.size)
        entries = dict(self._weights(fields.section("weights"), weights, library))
        plan = read_program(
            fields.section("program"),
            self.config(),
            {name: (spec.n, spec.k) for name, (spec, _) in entries.items()},
            self._constants(),
        )
        num_bytes = fields.integer("weights_bytes", minimum=0, maximum=1 << 62)
        return NativeModel(plan, PackedWeights(weights, entries), num_bytes)

    def _weights(
        self, table: Fields, file: np.ndarray, library: Library
    ) -> Iterator[tuple[str, tuple[PackedFormat, int]]]:
        """Return formats and places of the packed weights, which are all inside the file."""
        for name in table:
            format, n, k, group, offset, is_reordered = table.each(
                name, lambda f, entry: f.integer(entry, minimum=0, maximum=1 << 62), 6
            )
            if format >= abi.OCT_STORED:
                raise table.error(name, f"format {format} is none of packed weights")
            if group > _MAX_INT32 or not 1 <= min(n, k) <= max(n, k) <= _MAX_SIZE:
                raise table.error(name, f"there is no weight of [{n}, {k}]")
            try:
                spec = plain_format(format, n, k, group, library, is_reordered > 0)
            except EngineError as error:
                raise table.error(name, f"{error}") from None
            if offset % ALIGNMENT or offset + spec.num_bytes > len(file):
                raise table.error(
                    name, f"{spec.num_bytes} bytes at {offset} are not in a file of {len(file)}"
                )
            if spec.is_reordered:
                columns = spec.columns(file[offset:])
                if not np.array_equal(np.sort(columns), np.arange(k)):
                    raise table.error(name, f"its columns are not those of {k} inputs")
            yield name, (spec, offset)

    def _constants(self) -> list[np.ndarray]:
        content = self._read(self._manifest.file(CONSTANTS_FILE))
        fields = self._manifest.fields

        def read(table: Fields, entry: str) -> np.ndarray:
            offset, length = table.each(entry, lambda f, name: f.integer(name, minimum=0), 2)
            end = offset + 4 * length
            if offset % ALIGNMENT or end > len(content):
                raise table.error(
                    entry, f"{length} numbers at {offset} are not in {len(content)} bytes"
                )
            return np.array(content[offset:end].view("<f4"), dtype=np.float32)

        return fields.each("constants", read)

    def _read(self, file: FolderFile, num_threads: int = 1) -> np.ndarray:
        """Return the bytes of a file, mapped; ModelFileError if they are not those that were
        written.

        They are checked once, and again only after the file was changed.
        """
        path = self._folder.find(file.name, named_in=self._manifest.path)
        if path is None:
            raise ModelFileError(self.path / file.name, "the file is missing")
        try:
            with open(path, "rb") as handle:
                content = contents(handle)
                if len(content) != file.num_bytes:
                    raise ModelFileError(
                        path, f"has {len(content):,} bytes, and had {file.num_bytes:,} when built"
                    )
                if self._seals is None or not self._seals.is_current(file.digest, handle):
                    self._verify(file, content, handle, num_threads)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error
        return content

    def _verify(
        self, file: FolderFile, content: np.ndarray, handle: BinaryIO, num_threads: int
    ) -> None:
        if digest(b"", content, num_threads) != file.digest:
            raise ModelFileError(
                self.path / file.name,
                "its contents are not those that were built: it was damaged, or changed. Copy the "
                f"folder again, or build it again: {self._manifest.build_command()}",
            )
        if self._seals is not None:
            with suppress(OSError):  # it is checked again at the next start
                self._seals.add(file.digest, handle)
