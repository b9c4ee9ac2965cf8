"""Every error that octavo raises on purpose.

    OctavoError
    ├── ConfigError            an engine setting is wrong or not supported here (ValueError)
    │   └── MissingPackageError    it needs a package that is not installed
    ├── RequestError           one request cannot be served, others can (ValueError)
    │   ├── InvalidRequestError    a field of the request is wrong
    │   │   └── ConstraintError    no answer can be held to what it asks for
    │   ├── PromptTooLongError     prompt (+ max_tokens) exceeds the context or the block pool
    │   └── QueueFullError         the waiting queue is at its bound; try again later
    ├── ChatTemplateError      a chat template failed, or went over its bounds (ValueError)
    ├── ModelError
    │   ├── ModelNotFoundError     no such alias, folder, file or hub id
    │   ├── ModelFileError         a model file is damaged, truncated or inconsistent
    │   ├── UnsupportedModelError  the file is fine, octavo cannot run it
    │   └── DownloadError          fetching failed, or a checksum did not match
    ├── ToolError              a tool was called in vain: wrong arguments, or it failed
    ├── DeadlineError          a request did not end within its timeout
    ├── BenchmarkError         a measurement could not be made, or a file for one not be used
    ├── LinkError              a connection between machines was refused, or has ended
    └── EngineError            the engine itself failed: a bug of octavo, not of the input
        ├── StepAbortedError    a step was ended before its end, and may be run again
        ├── PeerEndedError      a process that computes a part of the model has ended
        ├── EngineUnavailableError  it does not take requests now: stopping, or not coming back
        └── QuarantinedError        the same request has brought the engine down before

User errors say what was wrong, where, and what to do. Asserts in the code are for bugs.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Self

# Exceptions that end a program on purpose. All others are confined to the request that caused them,
# also where ``except Exception`` would not do: a panic of a library in Rust is a bare
# BaseException.
ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class OctavoError(Exception):
    """Root of the tree; ``except OctavoError`` catches everything octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """An engine setting is wrong, contradicts another, or is not supported on this machine."""


class MissingPackageError(ConfigError):
    """A package that is needed is not installed; the message says which command adds it."""


class RequestError(OctavoError, ValueError):
    """One request cannot be served. The engine and all other requests are unaffected."""


class InvalidRequestError(RequestError):
    """A field of the request is out of range or of the wrong type."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message if field is None else f"{field}: {message}")
        self.field = field

    @property
    def message(self) -> str:
        """The error without the name of the field."""
        return str(self).removeprefix(f"{self.field}: ")

    def with_field(self, field: str) -> Self:
        """Return the same error about a field of another name."""
        renamed = copy(self)
        renamed.args = (f"{field}: {self.message}",)
        renamed.field = field
        return renamed


class ConstraintError(InvalidRequestError):
    """No answer can be held to the schema, expression or grammar that a request asks for.

    ``reason``: a word for counts: "invalid" (it is none), "unsupported" (a part of it is),
    "unsatisfiable" (no text has it), "unwritable" (no tokens of the model do), "too_complex".
    """

    def __init__(self, message: str, field: str | None = None, reason: str = "invalid"):
        super().__init__(message, field)
        self.reason = reason


class PromptTooLongError(RequestError):
    """The request needs more tokens than the context or the block pool can ever hold."""

    def __init__(self, message: str, num_prompt_tokens: int, limit: int):
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.limit = limit


class QueueFullError(RequestError):
    """The waiting queue is at its bound of requests or of tokens.

    ``retry_after``: seconds after which there may be room, where that can be said.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class ChatTemplateError(OctavoError, ValueError):
    """A chat template is invalid, refused the messages, or exceeded its time or output bound."""


class ModelError(OctavoError):
    """A model cannot be found, fetched, read or run."""


class ModelNotFoundError(ModelError):
    """The model argument names no alias, folder, file or hub id that octavo can see."""


class ModelFileError(ModelError):
    """A model file is damaged, truncated or inconsistent.

    ``offset`` is the byte position in ``path`` at which the problem was found (None where the
    format has no offsets), ``field`` the part of the file that is wrong.
    """

    def __init__(
        self, path: str | Path, reason: str, *, field: str | None = None, offset: int | None = None
    ):
        where = str(path)
        if offset is not None:
            where += f" at byte {offset}"
        if field is not None:
            where += f" ({field})"
        super().__init__(f"{where}: {reason}")
        self.path = Path(path)
        self.reason = reason
        self.field = field
        self.offset = offset


class UnsupportedModelError(ModelError):
    """The model is well formed, but needs something that octavo does not have."""


class DownloadError(ModelError):
    """A model could not be fetched, or what came does not match its checksum."""


class EngineError(OctavoError):
    """The engine failed for a reason that no request caused. Please report it."""


class StepAbortedError(EngineError):
    """A step ended before its end, in this rank or another of its group."""


class PeerEndedError(EngineError):
    """Another rank of the engine's group has ended, or ended the group: this engine can compute no
    further step."""


class ToolError(OctavoError):
    """A tool cannot be called so, or failed; the message is for the model that called it."""


class DeadlineError(OctavoError):
    """A request did not end within its timeout, in the queue or while it ran."""


class BenchmarkError(OctavoError):
    """A measurement could not be made, or a file that it needs or makes cannot be read or
    written."""


class LinkError(OctavoError):
    """A connection to another machine could not be made, was refused, or has ended."""


class EngineUnavailableError(EngineError):
    """The engine takes no requests now: the server is stopping, or the engine is not there."""

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class QuarantinedError(EngineError):
    """The same request has brought the engine down before; trying it again will not help."""
