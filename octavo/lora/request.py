"""The adapter of a request, as callers name it and as a server knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.base.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, as vLLM's class of this name has it.

    Args:
        lora_name: what answers and errors call it.
        lora_int_id: a number of 1 or more, another one for each adapter.
        lora_path: the folder that PEFT has written.

    Raises:
        InvalidRequestError: a field is empty, or of another type.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidRequestError(f"must be a text, not {self.lora_name!r:.80}", "lora_name")
        is_number = isinstance(self.lora_int_id, int) and not isinstance(self.lora_int_id, bool)
        if not is_number or self.lora_int_id < 1:
            raise InvalidRequestError(
                f"must be an integer of at least 1, not {self.lora_int_id!r:.80}", "lora_int_id"
            )
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise InvalidRequestError(f"must be a folder, not {self.lora_path!r:.80}", "lora_path")
        object.__setattr__(self, "lora_path", str(self.lora_path))


@dataclass(frozen=True, slots=True)
class ServedLora:
    """An adapter under the name that clients give it; ``digest`` is that of its files."""

    request: LoRARequest
    digest: str

    @property
    def name(self) -> str:
        return self.request.lora_name

    def to_list(self) -> list[str | int]:
        """Return what an engine is told of it."""
        request = self.request
        return [request.lora_name, request.lora_int_id, request.lora_path, self.digest]
