"""The design, as far as imports show it: dependencies point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "jinja2", "rich", "huggingface_hub")

# What each part may import of octavo, beside itself. These are open to all:
OPEN = {"errors", "faults"}

ALLOWED = {
    "core": set(),
    "quantization": set(),
    "kernels": {"machine", "quantization"},
    "layers": {"kernels", "quantization"},
    "models": {"kernels", "layers", "quantization"},
    "runtime": {"core", "kernels", "layers", "models", "quantization"},
    "executor": {"core", "runtime"},
    "text": set(),
    "sim": {"core"},
}


def loaded_modules(statement: str) -> set[str]:
    """Modules that a fresh interpreter has after a statement."""
    code = f"{statement}; import sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import octavo",
        "import octavo.core.engine, octavo.core.scheduler",
        "import octavo.executor.simulated, octavo.executor.hashing, octavo.sim.cost_model",
        "from octavo import SamplingParams, EngineArgs",
    ],
)
def test_light_parts_stay_light(statement):
    assert not loaded_modules(statement) & set(HEAVY)


def test_the_text_part_needs_no_torch():
    assert "torch" not in loaded_modules("import octavo.text.tokenizer, octavo.text.chat_template")


def test_the_server_needs_no_torch():
    """Its engine does, in a process of its own."""
    assert "torch" not in loaded_modules("import octavo.server.run, octavo.server.app")


def test_a_load_generator_needs_no_torch():
    """It shares the machine with the server that it measures."""
    assert "torch" not in loaded_modules("import octavo.bench.serving.serve")


def test_measuring_stands_on_top():
    """Nothing but the commands, and each other, knows of benchmarks and of quality."""
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).parts[0]
        if part not in ("bench", "quality", "cli"):
            assert not [name for name in imports_of(file) if name.startswith(("bench", "quality"))]


def imports_of(file: Path) -> list[str]:
    """Dotted names of octavo modules that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo."):
            found.append(node.module.removeprefix("octavo."))
        elif isinstance(node, ast.Import):
            found += [
                name.name.removeprefix("octavo.")
                for name in node.names
                if name.name.startswith("octavo.")
            ]
    return found


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_layers_only_look_down(part):
    files = list((PACKAGE / part).rglob("*.py"))
    assert files
    for file in files:
        for module in imports_of(file):
            top = module.split(".")[0]
            allowed = top in {part, *OPEN} or top in ALLOWED[part] or module in ALLOWED[part]
            assert allowed, f"{file.relative_to(PACKAGE)} imports octavo.{module}"


def test_the_core_reads_no_clock_but_in_one_file():
    for file in (PACKAGE / "core").glob("*.py"):
        names = {
            name.name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import)
            for name in node.names
        }
        assert file.name == "clock.py" or not names & {"time", "datetime", "random", "os"}


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("os", "system"), ("os", "popen"), ("yaml", "load")}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def dangers_in(source: str) -> list[str]:
    """Calls and imports that can run code from data."""
    found = []
    for node in ast.walk(ast.parse(source)):
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


def test_nothing_runs_code_from_data():
    for file in PACKAGE.rglob("*.py"):
        assert dangers_in(file.read_text()) == [], file


def test_the_ban_sees_what_it_bans():
    source = "import pickle\neval('1')\ntorch.load(f)\nsubprocess.run('x', shell=True)"
    assert len(dangers_in(source)) == 4
