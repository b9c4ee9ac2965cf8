"""Lines of code by package, and the longest functions: a question to ask, not a gate."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NUM_LONGEST = 10


class Function(NamedTuple):
    lines: int
    name: str
    path: Path


def code_lines(text: str) -> int:
    """Lines that are neither blank nor a comment; docstrings count, for they are read too."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def functions(path: Path, text: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function((node.end_lineno or node.lineno) - node.lineno + 1, node.name, path)


def main() -> None:
    found: list[Function] = []
    print(f"{'package':<24} {'files':>5} {'lines':>7}   longest file")
    for folder in (
        "octavo",
        *sorted(p for p in (ROOT / "octavo").iterdir() if p.is_dir()),
        "tests",
    ):
        top = ROOT / folder
        paths = sorted(top.glob("*.py") if folder == "octavo" else top.rglob("*.py"))
        texts = {path: path.read_text(encoding="utf-8") for path in paths}
        if not texts:
            continue
        lines = {path: code_lines(text) for path, text in texts.items()}
        longest = max(lines, key=lambda path: lines[path])
        name = str(top.relative_to(ROOT))
        print(
            f"{name:<24} {len(paths):>5} {sum(lines.values()):>7,}   "
            f"{longest.name} ({lines[longest]})"
        )
        if folder != "tests":
            found += (function for path in paths for function in functions(path, texts[path]))
    found.sort(reverse=True)
    if found:
        p95 = found[len(found) // 20].lines
        print(f"\n{len(found)} functions, 95th percentile {p95} lines; the longest:")
    for function in found[:NUM_LONGEST]:
        print(f"  {function.lines:>4}  {function.path.relative_to(ROOT)}:{function.name}")


if __name__ == "__main__":
    main()
