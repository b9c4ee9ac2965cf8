"""Policies of when a waiting request may join the running ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.core.request import Request


class AdmissionPolicy(Protocol):
    """A policy that is asked before each admission. Memory, token budget and order are the
    scheduler's part."""

    def may_admit(self, running: Sequence[Request]) -> bool: ...


class ContinuousAdmission:
    """Admits whenever there is room (iteration-level scheduling; Orca, OSDI 2022)."""

    def may_admit(self, running: Sequence[Request]) -> bool:
        return True


class StaticAdmission:
    """Begins a new batch only when the last one has ended. For comparison; never faster.

    The batch stays open while it is being formed: until its first request has produced a token.
    """

    def may_admit(self, running: Sequence[Request]) -> bool:
        return all(request.num_output_tokens == 0 for request in running)
