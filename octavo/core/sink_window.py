"""Attention sinks and sliding windows of requests, which attend to a part of their own tokens.

A model that only ever attends to the last positions breaks down when the first ones go, as much of
its attention rests there whatever they say. With a few of the first tokens kept it goes on for
ever: *attention sinks* (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453)::

    position     0 1 2 3 | 4 ........ 995 | 996 .......... 1999       sinks 4, window 1004
    as it sees   0 1 2 3                    4 ............ 1007       and places in the cache

Rotary embeddings depend on distances alone. For the sinks a query stands at its place in the cache,
which is the last one; for the window, at its position. So keys stay as they were written, and
errors do not add up.

A window that moves by leaps of more than one token is what llama.cpp calls a *context shift*: when
the context is full, half of what is behind the first ``n_keep`` tokens is dropped at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from octavo.base.errors import ConfigError, InvalidRequestError

DEFAULT_SINKS = 4  # of the paper

# Kernels add up keys in splits of this many positions (csrc/attention.h). The tokens that are left
# out are a multiple of it, so that sums are the same wherever a prompt was cut.
SPLIT = 256
# Angles of rotations begin again after a multiple of this, so that tables do not grow without end.
_TURN = 4096


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """The first ``sinks`` tokens, and the last ``window`` of the others, the query's own included.

    ``stride``: number of tokens that leave a full window at once.
    """

    sinks: int
    window: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise InvalidRequestError(f"must be at least 0, not {self.sinks}", "attention_sinks")
        if self.window < 1 or not 1 <= self.stride <= self.window:
            raise InvalidRequestError(f"must be at least 1, not {self.window}", "window")

    @property
    def num_tokens(self) -> int:
        """Largest number of tokens that a query attends to. Earlier queries attend to all."""
        return self.sinks + self.window

    @property
    def turn(self) -> int:
        """Number of positions after which angles of rotary embeddings begin again."""
        return _turn_of(self.num_tokens)

    def first_seen(self, position: int) -> int:
        """Return the first position behind the sinks that the query at ``position`` attends to."""
        beyond = position + 1 - self.num_tokens
        return self.sinks + (-(-beyond // self.stride) * self.stride if beyond > 0 else 0)

    def place(self, position: int) -> int:
        """Return the place in the cache of the query at ``position``, where it stands for the
        sinks."""
        return position - (self.first_seen(position) - self.sinks)

    def left_behind(self, num_tokens: int, block_size: int) -> range:
        """Return the blocks of ``num_tokens`` tokens that no query after them attends to.

        The last full block is kept, as those of windows are (``kv_tables.first_kept``).
        """
        first_kept = min(self.first_seen(num_tokens) // block_size, num_tokens // block_size - 1)
        first_behind = -(-self.sinks // block_size)
        return range(first_behind, max(first_behind, first_kept))

    def left_out(self, num_tokens: int, block_size: int) -> int:
        """Return the number of tokens behind the sinks' blocks that need no place in a table, if
        all queries come after ``num_tokens``: a multiple of ``SPLIT`` and of ``block_size``."""
        unit = unit_left_out(block_size)
        return len(self.left_behind(num_tokens, block_size)) * block_size // unit * unit

    def most_blocks(self, block_size: int, step_tokens: int) -> int:
        """Return the blocks that a request holds at most, if no step adds more than
        ``step_tokens`` to it."""
        # Blocks are given back when one is full, so almost a block beyond the window may be held.
        behind = max(self.window, block_size) + block_size - 1 + step_tokens
        return -(-self.sinks // block_size) + -(-behind // block_size) + 1

    def num_angles(self, num_tokens: int) -> int:
        """Return the rows that tables of rotations need for ``num_tokens`` tokens of a sequence."""
        return num_tokens if num_tokens <= self.turn else self.turn + self.window


def unit_left_out(block_size: int) -> int:
    """Return the number of tokens that are left out of a table at once."""
    return math.lcm(SPLIT, block_size)


def most_angles(max_model_len: int) -> int:
    """Return the rows that tables of rotations need at most, for any sink window."""
    return _turn_of(max_model_len) + max_model_len


def _turn_of(num_tokens: int) -> int:
    return -(-num_tokens // _TURN) * _TURN


class HasSinkWindow(Protocol):
    """The parameters of a request, or the fields of a body; None takes the engine's setting."""

    @property
    def attention_sinks(self) -> int | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def n_keep(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class SinkWindowRules:
    """The sink window of requests that ask for none, and what requests may ask for.

    Args:
        attention_sinks, window: for requests that ask for none; with a window of 0 they see all.
        context_shift: a context that is full is shifted, behind ``n_keep`` tokens.
        why_not: the reason why this model, or what runs it, cannot have any; empty if it can.
        may_be_asked: a request may have a window of its own. With one it can go on for ever, so a
            server leaves that to its operator.
    """

    attention_sinks: int = DEFAULT_SINKS
    window: int = 0
    context_shift: bool = False
    n_keep: int = 0
    why_not: str = ""
    may_be_asked: bool = True

    def check(self, max_model_len: int) -> None:
        """Check the settings against the context.

        Raises:
            ConfigError: requests that ask for nothing could not have these settings.
        """
        try:
            self._sink_window(self.attention_sinks, self.window, self.n_keep, max_model_len)
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error

    def of(self, asked: HasSinkWindow, max_model_len: int) -> SinkWindow | None:
        """Return the sink window of a request; None attends to all of its tokens.

        Raises:
            InvalidRequestError: it asks for what it cannot have.
        """
        sinks = self.attention_sinks if asked.attention_sinks is None else asked.attention_sinks
        window = self.window if asked.window is None else asked.window
        n_keep = self.n_keep if asked.n_keep is None else asked.n_keep
        if asked.window and not self.may_be_asked:
            raise InvalidRequestError(
                "may not be asked for here: a server allows it with --allow-window", "window"
            )
        if asked.attention_sinks is not None and not window:
            raise InvalidRequestError("is of a window, and there is none", "attention_sinks")
        if asked.n_keep is not None and (window or not self.context_shift):
            raise InvalidRequestError("is of a context shift, and none is made here", "n_keep")
        return self._sink_window(sinks, window, n_keep, max_model_len)

    def _sink_window(
        self, sinks: int, window: int, n_keep: int, max_model_len: int
    ) -> SinkWindow | None:
        if window:
            sink_window, field = SinkWindow(sinks, window), "window"
        elif self.context_shift:
            field = "n_keep"
            if not 0 <= n_keep < max_model_len - 1:
                raise InvalidRequestError(
                    f"{n_keep} tokens are to be kept, of a context of {max_model_len}", field
                )
            room = max_model_len - n_keep
            sink_window = SinkWindow(n_keep, room, max(1, room // 2))
        else:
            return None
        if self.why_not:
            raise InvalidRequestError(f"cannot be had: {self.why_not}", field)
        if sink_window.num_tokens > max_model_len:
            raise InvalidRequestError(
                f"{sink_window.window} and {sink_window.sinks} attention sinks are more than the "
                f"{max_model_len} tokens of the context: lower one of them",
                field,
            )
        return sink_window
