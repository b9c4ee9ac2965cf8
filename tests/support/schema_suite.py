"""The JSON Schema Test Suite (github.com/json-schema-org), by what grammars make of its cases.

    JSON_SCHEMA_TEST_SUITE=DIR python tests/support/schema_suite.py

prints the table of docs/structured_output.md. DIR has ``tests/draft2020-12``; the source archive of
the package jsonschema has one, as ``json``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from byte_tokens import EOS
from grammar_walks import COMPILER

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import StructuredOutputs

DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_WRITTEN: tuple[dict[str, Any], ...] = (
    {"ensure_ascii": False},
    {"ensure_ascii": False, "separators": (",", ":")},
    {"ensure_ascii": False, "indent": 2},
)


class Case(NamedTuple):
    """A schema of the suite, and the values that are tried under it."""

    keyword: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


def suite() -> Path | None:
    """The suite's directory; None where there is none."""
    root = os.environ.get("JSON_SCHEMA_TEST_SUITE")
    return Path(root) if root and (Path(root) / "tests" / "draft2020-12").is_dir() else None


def cases(root: Path, draft: str) -> Iterator[Case]:
    directory = root / "tests" / draft
    for file in sorted(directory.glob("*.json")) + sorted(directory.glob("optional/format/*.json")):
        is_format = file.parent != directory
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            keyword = f"format: {file.stem}" if is_format else file.stem
            yield Case(keyword, case["description"], schema, case["tests"])


def counts_of(case: Case) -> Counter[str]:
    """Count its schema as ``schemas`` and maybe ``refused``; its values as ``valid`` and
    ``allowed``, or as ``invalid`` and maybe ``wrong``, which is what must not be."""
    asked = StructuredOutputs(json=case.schema)
    found = Counter(schemas=1)
    try:
        COMPILER.mask(asked)
    except ConstraintError as error:
        is_right = error.reason == "unsatisfiable" and not any(t["valid"] for t in case.tests)
        found["refused"] += not is_right
        return found
    for test in case.tests:
        allowed = [is_allowed(asked, test["data"], how) for how in _WRITTEN]
        if test["valid"]:
            found += Counter(valid=1, allowed=int(all(allowed)))
        else:
            found += Counter(invalid=1, wrong=int(any(allowed)))
    return found


def is_allowed(asked: StructuredOutputs, value: Any, how: dict[str, Any]) -> bool:
    tokens = [*json.dumps(value, **how).encode("utf-8", "surrogatepass"), EOS]
    return COMPILER.mask(asked).num_allowed(tokens) == len(tokens)


def table(root: Path, draft: str) -> str:
    """A table of a draft, a row for each keyword."""
    rows: dict[str, Counter[str]] = {}
    for case in cases(root, draft):
        rows[case.keyword] = rows.get(case.keyword, Counter()) + counts_of(case)
    names = ("schemas", "refused", "valid", "allowed", "invalid", "wrong")
    lines = [
        "| keyword | schemas | refused | valid values | allowed | invalid values | allowed |",
        "|---|---|---|---|---|---|---|",
    ]
    rows["all"] = sum(rows.values(), Counter())
    for keyword, row in rows.items():
        lines.append(" | ".join([f"| `{keyword}`", *(str(row[name]) for name in names)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    where = suite()
    assert where is not None, __doc__
    for each in DRAFTS:
        print(f"\n{each}\n\n{table(where, each)}")
