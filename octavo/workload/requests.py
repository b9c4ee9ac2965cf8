"""One request of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload.

    Exactly one of ``prompt`` (text), ``prompt_token_ids`` and ``messages`` (a conversation) is
    given. ``input_len``: tokens of the prompt, where known. ``output_len``: tokens that are asked
    for; None leaves it to the model. ``arrival_s``: seconds after the start, if a trace says so.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    input_len: int | None = None
    output_len: int | None = None
    arrival_s: float | None = None
