"""`Validity`, which checks answers by another implementation of JSON Schema, jsonschema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.base.errors import BenchmarkError


class Validity:
    """Checks of answers.

    Raises:
        BenchmarkError: jsonschema is not installed.
    """

    def __init__(self) -> None:
        try:
            import jsonschema
        except ImportError:
            raise BenchmarkError(
                "answers are checked by the package jsonschema, which is not installed: "
                "pip install 'octavo[schemas]'"
            ) from None
        self._validator = jsonschema.Draft202012Validator

    def is_valid(self, text: str | bytes, schema: Mapping[str, Any]) -> bool:
        """Return whether a text is JSON, and of a schema, formats included."""
        try:
            value = json.loads(text if isinstance(text, str) else text.decode())
        except ValueError:
            return False
        checker = self._validator.FORMAT_CHECKER
        return bool(self._validator(schema, format_checker=checker).is_valid(value))
