"""Writes docs/modules.md: every module of octavo, with the first sentence of its docstring.

python scripts/module_table.py            write the file
python scripts/module_table.py --check    exit with 1 if it is not up to date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "octavo"
TABLE = ROOT / "docs" / "modules.md"

HEAD = """# Modules

The first sentence of every module's docstring, folder by folder. `scripts/module_table.py` writes
this file; `tests/test_modules_table.py` fails if it is out of date. For the larger picture see
[architecture.md](architecture.md).
"""


def first_sentence(file: Path) -> str:
    """The first sentence of a module's docstring, in one line; empty if it has none."""
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:;])\s", paragraph, maxsplit=1)[0].rstrip(".:;")
    return sentence.replace("``", "`").replace("|", "\\|")


def table_of(folder: Path) -> str:
    """A section for the modules of one folder, without the folders inside it."""
    name = folder.relative_to(PACKAGE.parent).as_posix()
    modules = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    rows = [f"| `{file.name}` | {first_sentence(file)} |" for file in modules]
    about = first_sentence(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    head = [f"## {name}/", *(["", f"{about}."] if about else [])]
    return "\n".join([*head, "", "| module | what it is |", "| --- | --- |", *rows]) + "\n"


def table() -> str:
    folders = sorted({file.parent for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"})
    return "\n".join([HEAD, *map(table_of, folders)])


def main(arguments: list[str]) -> int:
    text = table()
    if "--check" in arguments:
        return int(TABLE.read_text("utf-8") != text)
    TABLE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
