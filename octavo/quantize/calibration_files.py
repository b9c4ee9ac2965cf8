"""Reads calibration files, a text or a data set of texts and conversations.

A data set is a file of JSON lines, ``.jsonl``. Each line is one of these objects, with any other
fields::

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}       as ShareGPT has them
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError

Conversation = list[dict[str, Any]]
"""Messages for chat templates: {"role", "content"}."""

_BUILT_IN = "calibration_text.txt"
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "system": "system"}


def read_documents(path: str | Path | None) -> list[str | Conversation]:
    """Read the documents of a file, or the built-in text without one.

    Raises:
        ConfigError: the file cannot be read, or names the line of a data set that is none of the
            objects above.
    """
    if path is None:
        return [(files(__package__) / _BUILT_IN).read_text("utf-8")]
    text = _read(Path(path))
    if Path(path).suffix != ".jsonl":
        return [text]
    return [
        _document(f"the calibration text {path}, line {number}", line)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def conversations_of(text: str) -> list[Conversation]:
    """Make a conversation of each two paragraphs of a text: a question and its answer."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(paragraphs[::2], paragraphs[1::2], strict=False)
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"the calibration text {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the calibration text {path} is not UTF-8 at byte {error.start}: convert it first"
        ) from None


def _document(where: str, line: str) -> str | Conversation:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return str(row["text"])
        if isinstance(row.get("messages"), list):
            return [_message(where, each, "role", "content") for each in row["messages"]]
        if isinstance(row.get("conversations"), list):
            return [_message(where, each, "from", "value") for each in row["conversations"]]
    raise ConfigError(f"{where}: an object with text, messages or conversations is expected")


def _message(where: str, message: Any, role: str, content: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        message = {}
    name, said = message.get(role), message.get(content)
    if role == "from":
        name = _SHAREGPT_ROLES.get(str(name))
    if not isinstance(name, str) or not isinstance(said, str):
        raise ConfigError(f"{where}: a message has {role} and {content}, both of them text")
    return {"role": name, "content": said}
