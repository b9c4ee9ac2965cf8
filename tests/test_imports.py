"""The design, as far as imports show it: dependencies point one way."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "jinja2", "rich", "huggingface_hub")


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
    "import octavo.executor.simulated, octavo.cost.step_cost",
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


class Source(NamedTuple):
    """What these tests ask of a file, which is read once for all of them."""

    at_once: set[str]  # names that are imported as soon as it is: modules, and what is in them
    packages_at_once: set[str]  # the first parts of these
    ever: set[str]  # those, and what is imported in functions
    modules: set[str]  # of the latter, the modules
    dangers: list[str]  # calls and imports that can run code from data

    @property
    def packages(self) -> set[str]:
        return {name.partition(".")[0] for name in self.modules}


def read(source: str) -> Source:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    at_once, ever = names_imported_by(tree.body), names_imported_by(nodes)
    packages = {name.partition(".")[0] for name in at_once}
    return Source(at_once, packages, ever, modules_imported_by(nodes), dangers_in(nodes))


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


def module_of(file: Path) -> str:
    """The module of a file, such as ``octavo.core.engine``; that of a package by its folder."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


MODULES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def modules_among(names: Iterable[str]) -> set[str]:
    """The modules of octavo among imported names, of which some are classes and functions.

    To import a name from a package is to import the submodule of that name, if there is one.
    """
    found = {name for name in names if name in MODULES}
    packages = {name.rpartition(".")[0] for name in found}
    return {name for name in found if name not in packages or not is_package(name)}


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def folder_of(module: str) -> str:
    """The folder of octavo that a module is in, or its own name at the top."""
    return module.split(".")[1] if "." in module else module


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of octavo that one imports: at once, in its functions, or for types alone."""
    return frozenset(modules_among(source_of(MODULES[module]).ever) - {module})


def room_of(module: str) -> str:
    """The room of a module of the server: a folder of it, or a file beside these."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 else ""


def graph(names: Callable[[str], str], modules: Iterable[str]) -> dict[str, set[str]]:
    """Which groups of modules import from which, other than themselves."""
    modules = set(modules)
    found: dict[str, set[str]] = {names(module): set() for module in modules}
    for module in modules:
        found[names(module)] |= {names(other) for other in imports_of(module) if other in modules}
    return {name: others - {name} for name, others in found.items()}


@pytest.mark.parametrize(
    ("group", "inside"),
    [(folder_of, "octavo"), (room_of, "octavo.server."), (lambda module: module, "octavo")],
    ids=["folders", "rooms of the server", "modules"],
)
def test_there_is_no_circle(group, inside):
    """Imports in functions, and those for types alone, are counted like all others."""
    modules = [module for module in MODULES if module.startswith(inside)]
    TopologicalSorter(graph(group, modules)).prepare()  # raises CycleError, which names them


def imported_by(folder: str) -> set[str]:
    modules = [module for module in MODULES if folder_of(module) == folder]
    others = {folder_of(other) for module in modules for other in imports_of(module)}
    return others - {folder, "octavo"}


def test_the_engine_and_what_is_below_all_know_nothing_else():
    assert imported_by("base") == set()
    assert imported_by("core") == {"base"}
    assert imported_by("measure") <= {"base"}
    assert imported_by("workload") <= {"base", "measure", "hub", "text"}


def test_measuring_and_quantizing_stand_on_top():
    """To run a model nothing of this is needed: only the commands and each other know of it."""
    tops = {"bench", "calibration", "draft_training", "plots", "quality", "quantize", "tuning"}
    for module in MODULES:
        if folder_of(module) not in {*tops, "cli"}:
            assert not tops & {folder_of(other) for other in imports_of(module)}, module


def test_the_engine_of_the_server_knows_no_http():
    """So that something else could stand before it."""
    rooms = graph(room_of, [module for module in MODULES if module.startswith("octavo.server.")])
    assert rooms["engine"] <= {"settings", "log_lines"}
    assert rooms["watch"] <= {"settings", "log_lines", "engine"}


def uses_torch(module: str) -> bool:
    """Whether a module imports PyTorch, or Triton, as soon as it is imported."""
    return bool(source_of(MODULES[module]).packages_at_once & {"torch", "triton"})


def test_modules_that_use_torch_say_so():
    """A module that imports one that needs PyTorch does it in a function, or needs it itself: so
    whether a module can be imported without PyTorch is seen in the module."""
    for module, file in MODULES.items():
        if not uses_torch(module):
            at_once = modules_among(source_of(file).at_once)
            assert not [other for other in at_once if uses_torch(other)], module


# Folders without a tensor of PyTorch's, not even in a function.
WITHOUT_TORCH = {
    *("assembly", "calibration", "core", "cost", "measure", "offload", "page", "planner"),
    *("server", "settings", "sim", "text", "tuning", "workload"),
}


def test_where_no_tensor_is_torch_is_never_imported():
    for module, file in MODULES.items():
        if folder_of(module) in WITHOUT_TORCH:
            assert "torch" not in source_of(file).packages, module
            assert not [other for other in imports_of(module) if uses_torch(other)], module


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
