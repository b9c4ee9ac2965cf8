"""Makes an engine folder of a model (``octavo build``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import octavo
from octavo import hub
from octavo.base.errors import ConfigError, UnsupportedModelError
from octavo.base.files import NewFolder, sha256_of
from octavo.base.model_files import ENGINE_MANIFEST, ModelFolder, check_free, is_engine_folder
from octavo.kernels.cpu import activation_precision, library
from octavo.kernels.cpu.file_digests import Seals, digest
from octavo.kernels.cpu.format_advice import advise
from octavo.kernels.cpu.library import Pool
from octavo.kernels.cpu.packed_weights import (
    Entries,
    Progress,
    end_of,
    lay_out,
    pack_all,
    reserve,
)
from octavo.kernels.cpu.packing import ALIGNMENT
from octavo.kernels.fused_ops import CannotFuse
from octavo.layers.module import Module
from octavo.models.loader import load_checkpoint, weights_bytes
from octavo.models.quantized_hf import OWN_CONFIGS
from octavo.runtime.backends import why_not_native
from octavo.runtime.capacity import RankSpec, capacity_of
from octavo.runtime.op_program import plan_step
from octavo.settings.engine import EngineArgs, resolve
from octavo.sources.checkpoint import CheckpointSource
from octavo.sources.engine_folder.manifest import (
    CONSTANTS_FILE,
    WEIGHTS_FILE,
    FolderFile,
    contents,
    write_manifest,
)
from octavo.sources.engine_folder.model_config import config_json
from octavo.sources.engine_folder.program import Constants, program_json
from octavo.sources.engine_folder.settings import STORED, built_for
from octavo.sources.engine_folder.tokenizer_files import copy_files, write_metadata
from octavo.text.folder_tokenizer import tokenizer_files

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.quantization.base import Weight

# The folder may be started on another machine, with another amount of memory.
_ANY_MEMORY = 1 << 62

_log = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class BuiltFolder:
    """The folder that ``octavo build`` has made. ``sources``: the SHA-256 of each file it was
    made from."""

    out: Path
    num_bytes: int
    elapsed_s: float
    sources: dict[str, str]


def build_engine_folder(
    args: EngineArgs,
    out: Path,
    notes: Path | None = None,
    progress: Progress | None = None,
) -> BuiltFolder:
    """Make an engine folder of ``args.model`` at ``out``, where nothing is, or an empty folder.

    Args:
        args: settings given here become the folder's settings.
        notes: see ``EngineFolder``.
        progress: called with (bytes packed, bytes in all).

    Raises:
        ModelError: the model cannot be read.
        ConfigError: no such folder can be made of it, or not there; says why.
    """
    begin = time.perf_counter()
    check_free(out)
    path = hub.resolve(args.model)
    if is_engine_folder(path):
        raise ConfigError(f"{path} is an engine folder already: give the model it was built from")
    source = CheckpointSource(path)
    args = source.settings(args)
    fixed = _check_settings(args, source)
    try:
        with NewFolder(out) as new:
            sources, files = _Writer(source, args, fixed, new.folder, progress).write()
            new.publish()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    if notes is not None:
        _note(out, files.values(), notes)
    num_bytes = sum(file.num_bytes for file in files.values())
    num_bytes += (out / ENGINE_MANIFEST).stat().st_size
    return BuiltFolder(out, num_bytes, time.perf_counter() - begin, sources)


def _check_settings(args: EngineArgs, source: CheckpointSource) -> dict[str, Any]:
    """Return what the folder is built for; ConfigError if ``args`` ask for what no folder can
    be."""
    if source.pooling(args) is not None:
        raise ConfigError(
            f"{source.path} pools texts to vectors or scores: engine folders are of models that "
            "generate"
        )
    asked = activation_precision.DEFAULT if args.activations == "auto" else args.activations
    fixed = built_for(asked, source.quantization)
    for name in ("device", "dtype", "kernels"):
        if getattr(args, name) not in ("auto", fixed[name]):
            raise ConfigError(
                f"{name} {getattr(args, name)!r}: engine folders are for {fixed[name]!r} only"
            )
    return fixed


class _Writer:
    """Writes the files of a folder that is not published yet."""

    def __init__(
        self,
        source: CheckpointSource,
        args: EngineArgs,
        fixed: Mapping[str, Any],
        folder: Path,
        progress: Progress | None,
    ):
        self._source, self._args, self._fixed = source, args, fixed
        self._folder, self._progress = folder, progress
        self._config: ModelConfig = source.config()

    def write(self) -> tuple[dict[str, str], dict[str, FolderFile]]:
        """Write all files; returns the hashes of those that they are made from, and of
        themselves."""
        source, config, fixed = self._source, self._config, self._fixed
        self._check_fits()
        config.check_tokenizer(source.tokenizer().vocab_size, source.path)
        model = load_checkpoint(source.checkpoint, config)
        assert isinstance(model, Module)
        try:
            plan, weights = plan_step(model, fixed["activations"])
            entries = self._write_weights(weights)
        except (CannotFuse, UnsupportedModelError) as error:
            raise ConfigError(f"there can be no engine folder of {source.path}: {error}") from error
        constants = Constants()
        program = program_json(plan, model, config, constants)
        places = self._write_constants(constants.arrays)
        tokenizer, names = self._write_tokenizer()
        files = {name: self._digested(name) for name in (WEIGHTS_FILE, CONSTANTS_FILE, *names)}
        sources = {name: (path.stat().st_size, sha256_of(path)) for name, path in self._sources()}
        manifest = {
            "octavo": octavo.__version__,
            "source": self._args.model,
            "sources": {n: {"bytes": size, "sha256": sha} for n, (size, sha) in sources.items()},
            "settings": self._settings(),
            "activations": fixed["activations"],
            "quantization": fixed["quantization"],
            "weights_bytes": weights_bytes(model),
            "tokenizer": tokenizer,
            "model": config_json(config),
            "files": {
                name: {"bytes": file.num_bytes, "digest": file.digest.hex()}
                for name, file in files.items()
            },
            "weights": {
                name: [spec.format, spec.n, spec.k, spec.group, offset, int(spec.is_reordered)]
                for name, (spec, offset) in entries.items()
            },
            "constants": places,
            "program": program,
        }
        write_manifest(self._folder, manifest)
        return {name: sha for name, (_, sha) in sources.items()}, files

    def _check_fits(self) -> None:
        """Raise ConfigError if no machine could start this model with these settings."""
        args = self._args
        spec = RankSpec(
            self._source.path,
            kv_cache_dtype=args.kv_cache_dtype,
            activations=self._fixed["activations"],
            block_size=args.block_size,
        )
        reason = why_not_native(spec, self._config)
        if reason is not None:
            raise ConfigError(f"there can be no engine folder of {self._source.path}: {reason}")
        capacity = capacity_of(spec, self._config, is_native=True, kv_memory_bytes=_ANY_MEMORY)
        resolve(args, capacity)

    def _settings(self) -> dict[str, Any]:
        """Return the given settings that a folder may have; a warning names the others."""
        given = self._args.given_settings()
        if others := sorted(given.keys() - STORED - self._fixed.keys()):
            flags = ", ".join("--" + name.replace("_", "-") for name in others)
            _log.warning("not kept in the folder, to be given where it is started: %s", flags)
        return {name: value for name, value in given.items() if name in STORED}

    def _write_weights(self, weights: Mapping[str, Weight]) -> Entries:
        native = library.load()
        entries, _ = lay_out(weights, native)
        advise(weights, entries)
        size = end_of(entries)
        threads = self._args.threads or library.usable_threads()
        with open(self._folder / WEIGHTS_FILE, "w+b") as file, Pool(native, threads) as pool:
            reserve(file, size)  # a full disk is an error here, and a crash later
            memory = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
            pack_all(weights, entries, memory, native, pool, self._progress)
            memory.flush()
        return entries

    def _write_constants(self, arrays: list[np.ndarray]) -> list[list[int]]:
        """Write the arrays; returns offset and length of each."""
        places = []
        with open(self._folder / CONSTANTS_FILE, "wb") as file:
            for array in arrays:
                assert array.ndim == 1
                file.write(bytes(-file.tell() % ALIGNMENT))
                places.append([file.tell(), len(array)])
                file.write(array.astype("<f4").tobytes())
        return places

    def _write_tokenizer(self) -> tuple[str, list[str]]:
        """Write the tokenizer; returns its kind, and the names of its files."""
        metadata = self._source.gguf_metadata()
        if metadata is not None:
            return "gguf", write_metadata(metadata, self._folder)
        return "folder", copy_files(self._source.path, self._folder)

    def _sources(self) -> list[tuple[str, Path]]:
        """Return the files of the model that the folder is made from, with their names in its
        folder."""
        path = self._source.path
        paths = set(self._source.checkpoint.files)
        if path.is_dir():
            folder = ModelFolder(path)
            names = ("config.json", "generation_config.json", "model.safetensors.index.json")
            paths.update(filter(None, map(folder.find, (*names, *OWN_CONFIGS))))
            paths.update(tokenizer_files(folder))
        root = path if path.is_dir() else path.parent
        return [(each.relative_to(root).as_posix(), each) for each in sorted(paths)]

    def _digested(self, name: str) -> FolderFile:
        with open(self._folder / name, "rb") as file:
            content = contents(file)
        return FolderFile(name, len(content), digest(b"", content, library.usable_threads()))


def _note(out: Path, files: Iterable[FolderFile], notes: Path) -> None:
    """Note that the files are as they were written, so that the first start checks none."""
    seals = Seals(notes)
    with suppress(OSError):  # then the first start does
        for file in files:
            with open(out / file.name, "rb") as handle:
                seals.add(file.digest, handle)
