"""Names and sentences use the words of the field, so that a stranger knows what is meant."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent
ROOT = PACKAGE.parent
FOLDERS = sorted(
    [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    + [path.name for path in PACKAGE.glob("*.py")]
)

# The words that this project once had of its own, and those of the field in their place.
PRIVATE_WORDS = {
    r"guess\w*": "draft, draft tokens, a draft candidate",
    r"seats?": "slot",
    r"sights?": "sink window",
    r"(shelf|shelves)": "host KV cache",
    r"depots?": "KV storage",
    r"close[ _-]look\w*": "engine snapshot",
    r"loners?": "an isolated request",
    r"probation": "crash isolation",
    r"(foresight|fore(see|sees|saw|seen|tell|tells|told))": "predict, prediction",
    r"touchstone": "reference",
    r"rehears\w+": "trial run",
    r"newcomers?": "new request",
    r"num_rounds|max_rounds": "multi-step",
    r"(whoever|nobody|whose turn)": "a thing is not a person",
}
_PRIVATE = re.compile(
    r"(?<![a-z])(" + "|".join(f"(?:{word})" for word in PRIVATE_WORDS) + r")(?![a-z])",
    re.IGNORECASE,
)
# Keys of JSON and of files, and names of metrics, which clients read: they stay, whole.
KEPT: frozenset[str] = frozenset({"is_rehearsal"})

# A docstring begins with a verb, or with the noun that it describes.
_BEGINNINGS = {
    *(
        "After",
        "And",
        "As",
        "At",
        "Before",
        "Beside",
        "Between",
        "But",
        "By",
        "Each",
        "For",
        "From",
    ),
    *("How", "If", "In", "Into", "It", "Like", "Nobody", "Nor", "Of", "On", "Out", "So", "Such"),
    *("That", "There", "They", "Those", "To", "What", "When", "Where", "Which", "Who", "Whoever"),
    *("Whose", "With"),
}


def files_of(folder: str) -> list[Path]:
    path = PACKAGE / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def docstrings(file: Path) -> list[tuple[int, str]]:
    """The docstrings of a file, with the lines that they begin in."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((node.body[0].lineno, text))
    return found


@cache
def prose(file: Path) -> list[tuple[int, str]]:
    """Every name, comment and string of a file of Python, with its line."""
    kinds = (tokenize.NAME, tokenize.COMMENT, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


def private_words(lines: list[tuple[int, str]]) -> list[str]:
    return [
        f"line {number}: {found.group(0)}"
        for number, text in lines
        if text.strip("\"'") not in KEPT
        for found in _PRIVATE.finditer(text)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_has_no_words_of_its_own(folder):
    found = {
        str(file.relative_to(ROOT)): words
        for file in files_of(folder)
        if (words := private_words(prose(file)))
    }
    assert not found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in files_of(folder)
        for line, text in docstrings(file)
        if re.split(r"[\s,;:.]", text, maxsplit=1)[0] in _BEGINNINGS
    ]
    assert not found


TEXTS = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *(file for file in (ROOT / "csrc").iterdir() if file.suffix in (".cpp", ".h", ".py")),
        *(f for s in ("*.js", "*.html", "*.css") for f in (PACKAGE / "page" / "static").rglob(s)),
    ]
)


@pytest.mark.parametrize("file", [file for file in TEXTS if file.exists()], ids=lambda f: f.name)
def test_documents_pages_and_kernels_have_none_either(file):
    lines = enumerate(file.read_text().splitlines(), 1)
    assert not private_words(list(lines))


@pytest.mark.parametrize(
    "text",
    ["a guess", "num_guesses", "the seats of a batch", "close_look", "Nobody waits"],
)
def test_the_ban_sees_what_it_bans(text):
    assert private_words([(1, text)])


@pytest.mark.parametrize("text", ["insight", "foreground", "rounds to nearest", "unseated"])
def test_other_words_are_free(text):
    assert not private_words([(1, text)])
