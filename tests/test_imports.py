"""The design, as far as imports show it: dependencies point one way."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "jinja2", "rich", "huggingface_hub")

# What each part may import of octavo, beside itself. These are open to all:
OPEN = {"errors", "extras", "files", "garbage", "lazy", "options", "patterns", "scalars"}

ALLOWED = {
    "machine": set(),
    "fields": set(),
    "model_files": set(),
    "core": set(),
    "core.sampling_params": set(),
    "quantization": {"fields"},
    "quantization.produce": {"kernels", "layers", "machine", "models", "quantization", "text"},
    "kernels": {"machine", "quantization"},
    "layers": {"kernels", "quantization"},
    "models": {
        *("fields", "kernels", "layers", "model_files", "quantization"),
        "core.sampling_params",  # what a model recommends must be what a request may ask
        # Whole models have a tokenizer, which their writers write too.
        *("text.folder_tokenizer", "text.tokenizer_json", "text.tokenizer_metadata"),
    },
    "models.kv_groups": {"models"},
    "runtime": {"core", "kernels", "layers", "machine", "models", "quantization"},
    "runtime.capacity": {"core", "kernels", "models", "runtime.memory_ledger"},
    "runtime.cuda_graphs": {"core", "runtime.memory_ledger", "runtime.streams"},
    "runtime.memory_ledger": set(),
    "runtime.streams": set(),
    "executor": {"core", "runtime"},
    "config": {
        *("core", "models.kv_groups", "offload.settings", "runtime.capacity"),
        *("speculation.config", "vllm_settings"),
    },
    "vllm_settings": set(),
    "offload": {"core", "cost", "model_files"},
    "offload.settings": set(),
    "speculation.config": {"core"},
    "speculation": {
        *("core", "fields", "hub", "kernels", "layers", "model_files", "model_source", "models"),
        *("open_model", "quantization", "runtime", "text"),
    },
    "hub": {"model_files"},
    "model_source": {"config", "models", "runtime", "text"},
    "engine_folder": {
        *("config", "fields", "hub", "kernels", "layers", "model_files", "model_source", "models"),
        *("quantization", "runtime", "text"),
    },
    "open_model": {
        *("engine_folder", "hub", "kernels", "model_files", "model_source", "text"),
        "transformers_source",
    },
    "transformers_source": {
        *("config", "model_files", "model_source", "models", "runtime", "text"),
    },
    "text": {"fields", "model_files"},
    "text.folder_tokenizer": {"fields", "model_files", "text"},
    "text.tokenizer_json": {"text"},
    "text.tokenizer_metadata": {"text"},
    # What octavo's own engine would take is asked of its own arithmetic, where it is asked for.
    "cost": {
        *("config", "core", "fields", "hub", "kernels", "machine", "model_files", "models"),
        *("quantization", "runtime.capacity", "runtime.cuda_graphs", "runtime.memory_ledger"),
    },
    "measure": set(),
    "workload": {"measure"},
    "wiring": {"config", "core"},
    "sim": {
        *("config", "core", "cost", "executor", "measure", "runtime", "speculation", "wiring"),
        "workload",
    },
    "planner": {"config", "core", "cost", "hub", "measure", "sim", "speculation", "workload"},
    "page": {"cost", "measure", "planner", "sim"},
    "page.tensors": {"models", "quantization"},
    "speculation.training": {
        *("core", "fields", "kernels", "layers", "models", "quantization"),
        *("quantization.produce", "runtime", "speculation", "text"),
    },
}


def loaded_modules(*statements: str) -> list[set[str]]:
    """Modules that a fresh interpreter has after each of some statements."""
    code = "\n".join(f"{statement}\nprint(*sys.modules)" for statement in statements)
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in result.stdout.splitlines()]


LIGHT = (
    "import octavo",
    "import octavo.core.engine, octavo.core.scheduler",
    "import octavo.executor.simulated, octavo.executor.hash_model, octavo.cost.step_cost",
    "import octavo.models.footprint, octavo.cost.loaded_model, octavo.cost.hardware_table",
    "import octavo.cost.memory, octavo.cost.open_spec, octavo.cost.rank",
    "import octavo.workload.datasets, octavo.measure.load_report, octavo.measure.serve_report",
    "from octavo import SamplingParams, EngineArgs",
    "import octavo.quantization, octavo.quality.tradeoffs",
    "import octavo.planner",
)


def test_light_parts_stay_light():
    for statement, loaded in zip(LIGHT, loaded_modules(*LIGHT), strict=True):
        assert not loaded & set(HEAVY), statement


# What computes with tensors, or in Triton, which needs PyTorch. All else runs without torch, and
# imports these where it needs them.
OF_TORCH = {
    "kernels/attention.py",
    "kernels/cuda/activations.py",
    "kernels/cuda/attention.py",
    "kernels/cuda/attention_kernels.py",
    "kernels/cuda/attention_plan.py",
    "kernels/cuda/buffers.py",
    "kernels/cuda/elementwise.py",
    "kernels/cuda/code_products.py",
    "kernels/cuda/dequantize.py",
    "kernels/cuda/expert_choice.py",
    "kernels/cuda/expert_products.py",
    "kernels/cuda/kv_codes.py",
    "kernels/cuda/kv_copy.py",
    "kernels/cuda/kv_write.py",
    "kernels/cuda/latents.py",
    "kernels/cuda/linear.py",
    "kernels/cuda/norms.py",
    "kernels/cuda/ops.py",
    "kernels/cuda/packing.py",
    "kernels/cuda/plain_ops.py",
    "kernels/cuda/products.py",
    "kernels/cuda/program.py",
    "kernels/cuda/rows.py",
    "kernels/cuda/sampler.py",
    "kernels/cuda/sampler_cuts.py",
    "kernels/cuda/sampler_logprobs.py",
    "kernels/cuda/sampler_parts.py",
    "kernels/cuda/sampling.py",
    "kernels/cuda/compile_ahead.py",
    "kernels/cuda/splits.py",
    "kernels/cuda/token_feed.py",
    "kernels/cuda/triton_ops.py",
    "kernels/cuda/triton_products.py",
    "kernels/cuda/gemm_dispatch.py",
    "kernels/cuda/weights.py",
    "kernels/experts.py",
    "kernels/kv_stores.py",
    "kernels/recurrence.py",
    "kernels/reference.py",
    "layers/tensors.py",
    "models/transformers_model.py",
    "quantization/gguf_blocks.py",
    "quantization/upload.py",
    "quantization/gguf_fields.py",
    "quantization/gguf_formats.py",
    "quantization/gguf_quantize.py",
    "quantization/gguf_search.py",
    "quantize/awq.py",
    "quantize/autoround.py",
    "quantize/calibration.py",
    "quantize/candidates.py",
    "quantize/distillation.py",
    "quantize/explore.py",
    "quantize/fake_quant.py",
    "quantize/gptq.py",
    "quantize/grid.py",
    "quantize/quantization_job.py",
    "quantize/mixture.py",
    "quantize/named_schemes.py",
    "quantize/observers.py",
    "quantize/pipeline.py",
    "quantize/qat.py",
    "quantize/resume.py",
    "quantize/rotation.py",
    "quantize/scaling.py",
    "quantize/sensitivity.py",
    "quantize/smoothquant.py",
    "quantize/tables.py",
    "quantization/tensors.py",
    "runtime/cuda_backend.py",
    "runtime/cuda_forward.py",
    "runtime/cuda_inputs.py",
    "runtime/cuda_components.py",
    "runtime/cuda_sampling.py",
    "runtime/cuda_warmup.py",
    "runtime/device_memory.py",
    "runtime/eager_attention.py",
    "runtime/eager_forward.py",
    "runtime/eager_states.py",
    "runtime/kv_cache.py",
    "runtime/logits.py",
    "runtime/plain_sampler.py",
    "runtime/streams.py",
    "runtime/sampler.py",
    "runtime/torch_backend.py",
    "runtime/torch_probe.py",
    "runtime/transformers_backend.py",
    "draft_training/eagle.py",
    "draft_training/evaluation.py",
    "draft_training/examples.py",
    "draft_training/stateless_heads.py",
    "draft_training/training_job.py",
    "draft_training/kinds.py",
    "draft_training/loop.py",
    "draft_training/pieces.py",
    "draft_training/state.py",
    "bench/peers/workers/transformers_worker.py",  # in the environment of another engine
}


# Those who import one of these, or torch itself, where they need it: to run a model, to look for a
# GPU, to say that it is missing, to name a type; and two benchmarks.
WHERE_NEEDED = {
    "transformers_source.py",
    "extras.py",
    "quantization/base.py",
    "runtime/backends.py",
    "runtime/cuda_graphs.py",
    "runtime/forward.py",
    "runtime/rank.py",
    "cli/quantize.py",
    "cli/train_draft.py",
    "bench/gpu/checks.py",
    "bench/offline/ablation_study.py",
    "bench/peers/hf_model.py",
}


class Source(NamedTuple):
    """What these tests ask of a file, which is read once for all of them."""

    at_once: set[str]  # names that are imported as soon as it is: modules, and what is in them
    ever: set[str]  # those, and what is imported in functions
    modules: set[str]  # of the latter, the modules
    dangers: list[str]  # calls and imports that can run code from data

    @property
    def of_octavo(self) -> set[str]:
        """The modules of octavo, without its name."""
        prefix = "octavo."
        return {name.removeprefix(prefix) for name in self.modules if name.startswith(prefix)}

    @property
    def packages(self) -> set[str]:
        return {name.partition(".")[0] for name in self.modules}


def read(source: str) -> Source:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    at_once, ever = names_imported_by(tree.body), names_imported_by(nodes)
    return Source(at_once, ever, modules_imported_by(nodes), dangers_in(nodes))


@functools.cache
def source_of(file: Path) -> Source:
    return read(file.read_text())


def modules_imported_by(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def names_imported_by(nodes: Iterable[ast.AST]) -> set[str]:
    nodes = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    asked_for = {
        f"{node.module}.{name.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    return modules_imported_by(nodes) | asked_for


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("os", "system"), ("os", "popen"), ("yaml", "load")}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def dangers_in(nodes: Iterable[ast.AST]) -> list[str]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
                found.append(function.id)
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                pair = (function.value.id, function.attr)
                if pair in FORBIDDEN_ATTRIBUTES:
                    found.append(".".join(pair))
            if any(
                keyword.arg == "shell" and getattr(keyword.value, "value", True)
                for keyword in node.keywords
            ):
                found.append("shell=True")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [name.name for name in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    return found


def test_torch_is_imported_by_those_who_compute_with_it():
    modules = {f"octavo.{name.removesuffix('.py').replace('/', '.')}" for name in OF_TORCH}
    for file in PACKAGE.rglob("*.py"):
        name = str(file.relative_to(PACKAGE))
        at_once, ever = source_of(file).at_once, source_of(file).ever
        needs_torch = any(m.split(".")[0] in ("torch", "triton") for m in at_once)
        assert (name in OF_TORCH) == needs_torch, name
        if name not in OF_TORCH:
            assert not at_once & modules, name
            assert (name in WHERE_NEEDED) == bool(ever & {"torch", *modules}), name


def test_triton_is_imported_by_kernels_alone():
    for file in PACKAGE.rglob("*.py"):
        if "triton" in source_of(file).packages:
            assert file.parent == PACKAGE / "kernels" / "cuda", file


def test_the_text_part_needs_no_torch():
    (loaded,) = loaded_modules("import octavo.text.tokenizer, octavo.text.chat_template")
    assert "torch" not in loaded


def test_the_engine_of_a_server_is_started_before_the_web_is_imported():
    """Nor does the server need torch, nor the module of its engine, which imports it where a model
    or a request needs it."""
    before, after = loaded_modules(
        "import octavo.server.run", "import octavo.server.app, octavo.server.engine.worker"
    )
    assert not before & {"fastapi", "pydantic", "uvicorn"}
    assert "torch" not in after


def test_a_load_generator_needs_no_torch():
    """It shares the machine with the server that it measures."""
    (loaded,) = loaded_modules("import octavo.bench.serving.serve")
    assert "torch" not in loaded


def test_measuring_and_quantizing_stand_on_top():
    """Nothing but the commands, and each other, knows of benchmarks, of quality, and of what makes
    quantized models: to run one, nothing of that is needed."""
    tops = (
        *("bench", "calibration", "plots", "quality"),
        *("quantization.produce", "speculation.training", "tuning"),
    )
    for file in PACKAGE.rglob("*.py"):
        part = ".".join(file.relative_to(PACKAGE).parts)
        if not part.startswith((*tops, "cli")):
            assert not [name for name in source_of(file).of_octavo if name.startswith(tops)], file


def files_of(part: str) -> list[Path]:
    """Of a folder, but for the parts of it that are listed themselves, or the file of a module."""
    path = PACKAGE / part.replace(".", "/")
    inner = {file for other in ALLOWED if other.startswith(f"{part}.") for file in files_of(other)}
    return [file for file in path.rglob("*.py") if file not in inner] or [path.with_suffix(".py")]


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_layers_only_look_down(part):
    files = files_of(part)
    for file in files:
        for module in source_of(file).of_octavo:
            top = module.split(".")[0]
            allowed = top in {part, *OPEN} or top in ALLOWED[part] or module in ALLOWED[part]
            assert allowed, f"{file.relative_to(PACKAGE)} imports octavo.{module}"


# The rooms of the server, and which of them each may look into. That of the engine knows of no
# HTTP, so that something else could stand before it.
SERVER_ROOMS = {
    "settings": set(),
    "log_lines": set(),
    "engine": {"settings", "log_lines"},
    "watch": {"settings", "log_lines", "engine"},
    "http": {"settings", "log_lines", "engine"},
    "api": {"settings", "log_lines", "engine", "watch", "http"},
    "page": {"settings", "http", "api"},
    "app": {"settings", "engine", "watch", "http", "api", "page"},
    "server": {"settings", "log_lines", "engine", "watch", "http", "api", "app"},
    "run": {"settings", "engine", "watch", "http", "server"},
}


def server_imports(file: Path) -> list[str]:
    """The rooms of the server that a file imports from."""
    modules = source_of(file).of_octavo
    return [module.split(".")[1] for module in modules if module.startswith("server.")]


def test_rooms_of_the_server_only_look_down():
    for file in (PACKAGE / "server").rglob("*.py"):
        room = file.relative_to(PACKAGE / "server").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for seen in server_imports(file):
            assert seen in {room, *SERVER_ROOMS[room]}, f"{file} imports octavo.server.{seen}"


@pytest.mark.parametrize("table", [ALLOWED, SERVER_ROOMS], ids=["octavo", "server"])
def test_what_is_allowed_is_bounded_itself(table):
    """Nothing comes in by way of a part without bounds, and no way leads back."""
    assert set().union(*table.values()) <= set(table)
    TopologicalSorter(table).prepare()  # raises CycleError


def test_what_is_open_to_all_stands_below_all():
    for part in OPEN:
        assert {name.split(".")[0] for name in source_of(PACKAGE / f"{part}.py").of_octavo} <= OPEN


OUTSIDE_WORLD = {"asyncio", "datetime", "io", "os", "pathlib", "random", "secrets", "socket",
                 "subprocess", "tempfile", "threading", "time", "uuid"}  # fmt: skip


def test_the_core_reads_no_clock_but_in_one_file():
    for file in (PACKAGE / "core").rglob("*.py"):
        used = source_of(file).packages & OUTSIDE_WORLD
        assert used <= ({"time"} if file.name == "clock.py" else set()), file


@pytest.mark.parametrize(
    "source",
    ["import time", "from time import monotonic", "import os.path as p", "from os import *"],
)
def test_a_clock_is_seen_however_it_is_imported(source):
    assert read(f"def f():\n    {source}").packages & OUTSIDE_WORLD


def test_nothing_runs_code_from_data():
    for file in PACKAGE.rglob("*.py"):
        assert source_of(file).dangers == [], file


def test_the_ban_sees_what_it_bans():
    source = "import pickle\neval('1')\ntorch.load(f)\nsubprocess.run('x', shell=True)"
    assert len(read(source).dangers) == 4
