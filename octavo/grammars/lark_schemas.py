"""JSON schemas within grammars in Lark's notation, behind ``%json``.

They are checked and rewritten as schemas are that a request asks for by themselves. Grammars of
tool calls have those of the tools.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.base.errors import ConstraintError
from octavo.grammars.json_schema import json_options, rewritten_schema
from octavo.grammars.schema_document import schema_at

# What a schema may look like within a grammar without being one, and then schemas.
_PART = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|\#[^\n]*|(?P<schema>%json)\s*', re.DOTALL
)


def with_rewritten_schemas(grammar: str) -> str:
    """Return a grammar with schemas as llguidance takes them.

    Options of llguidance come with a schema as ``x-guidance``, and whose it is as ``$comment``.
    With ``lenient`` among the options, keywords that are not supported are left out.

    Raises:
        ConstraintError: a schema is none, or has a keyword that is not supported.
    """
    parts: list[str] = []
    at = 0
    while found := _PART.search(grammar, at):
        parts.append(grammar[at : found.end()])
        at = found.end()
        if found["schema"]:
            schema, at = schema_at(grammar, at)
            parts.append(json.dumps(_rewritten(schema), ensure_ascii=False))
    return "".join(parts) + grammar[at:]


def _rewritten(schema: Any) -> dict[str, Any]:
    options = schema.pop("x-guidance", {}) if isinstance(schema, dict) else {}
    if not isinstance(options, dict):
        raise ConstraintError(f"has at #/x-guidance no options: {options!r:.60}")
    try:
        parsed = rewritten_schema(schema, is_lenient=options.get("lenient") is True)
    except ConstraintError as error:
        owner = schema.get("$comment") if isinstance(schema, dict) else None
        raise ConstraintError(f"{owner or '%json'}: {error}", None, error.reason) from None
    escapes = json_options(is_bounded=False)
    return {"x-guidance": {**escapes, **options}, **parsed.schema}
