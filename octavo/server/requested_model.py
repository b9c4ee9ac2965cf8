"""`RequestedModel`, a model that an operator has named, of several of one server."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.settings.engine import EngineArgs


@dataclass(frozen=True)
class RequestedModel:
    """A model that an operator has named.

    Args:
        args: of its engine.
        names: for clients; none is that of its argument.
        is_pinned: it is not unloaded but on request.
        loads_at_start: it is loaded when the server starts, if there is room.
    """

    args: EngineArgs
    names: tuple[str, ...] = ()
    chat_template: str | None = None
    is_pinned: bool = False
    loads_at_start: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether nothing but its engine's settings was said of it."""
        return self == RequestedModel(self.args)
