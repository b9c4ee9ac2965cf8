"""docs/modules.md is what the docstrings say now, and every module and folder has one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "module_table.py"


def load_script():
    spec = importlib.util.spec_from_file_location("module_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date():
    script = load_script()
    assert script.table() == script.TABLE.read_text("utf-8"), "run scripts/module_table.py"


def test_every_module_and_folder_says_what_it_is():
    script = load_script()
    files = [file for file in script.PACKAGE.rglob("*.py") if "static" not in file.parts]
    assert [str(file) for file in files if not script.first_sentence(file)] == []


def test_a_docstring_is_cut_at_its_first_sentence(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""Reads ``a|b`` files: lines\nof text. And more."""\n')
    assert load_script().first_sentence(file) == "Reads `a\\|b` files"
