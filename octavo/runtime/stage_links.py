"""Links between the ranks of a pipeline: messages of steps, and hidden states.

    home rank (last stage)  ── step messages ──▶  all other ranks
    stage 0  ── hidden states ──▶  stage 1  ── hidden states ──▶  ...  the last stage

Steps go through the stages in the order of their messages, and every step goes through all of
them, with hidden states or with the word that it has failed. So each end of a link knows the number
of the next step, and a number that is another one is an error.

:class:`StepMessages` and :class:`StageLink` are the interfaces. ``ShmGroup``
(``kernels/cpu/group.py``) and :class:`ShmLink` implement them in memory that processes of one
machine share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.base.errors import EngineError, PeerEndedError
from octavo.kernels.cpu.group import ShmGroup
from octavo.kernels.parts import Stage

FAILED = -1  # in place of the number of tokens
_MOST_WORDS = 250  # of the text of an error
_FLOAT_BYTES = 4


class StageFailedError(EngineError):
    """Raised where a step has failed in an earlier stage, in the words of that stage."""


class StepMessages(Protocol):
    """Messages from the home rank to all others: each end has one of these.

    Once it is aborted, all waiting ends with PeerEndedError, at both ends.
    """

    @property
    def room(self) -> int:
        """Number of pieces that may be unread before `send` waits."""
        ...

    def pieces(self, num_words: int) -> int:
        """Return how many pieces a message of so many words has."""
        ...

    def send(self, words: array[int]) -> None:
        """Send a message, one number or more of type "i", to all followers."""
        ...

    def receive(self) -> np.ndarray:
        """Wait for the next message, int32; valid until the next call."""
        ...

    def abort(self) -> None:
        """End all waiting, at both ends, for ever. May be called from any thread."""
        ...


class StageLink(Protocol):
    """One end of the way from one stage to the next.

    All ranks of a stage receive; its rank 0 sends. The values of a step are arrays of float32
    [T, width], contiguous, one for each value that crosses from stage to stage: the same ones, in
    the same order, at both ends and in all steps.
    """

    def open(self, widths: Sequence[int], max_tokens: int, depth: int) -> None:
        """Allocate memory: for steps of up to ``max_tokens`` rows, of which up to ``depth`` are on
        their way at a time. Called once at each end, before the first step."""
        ...

    def send(self, number: int, values: Sequence[np.ndarray]) -> None:
        """Send the values of step ``number``. They may be overwritten when this returns."""
        ...

    def fail(self, number: int, reason: str) -> None:
        """Send the word that step ``number`` has failed."""
        ...

    def receive(self, number: int, values: Sequence[np.ndarray]) -> None:
        """Wait for the values of step ``number``, and write them to ``values``.

        Raises:
            StageFailedError: the step has failed.
            PeerEndedError: the other end has ended, or what came is not that step.
        """
        ...

    def abort(self) -> None:
        """End all waiting, at both ends, for ever. May be called from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """The place of a rank in a pipeline.

    Args:
        messages: of all ranks of the pipeline.
        incoming: from the stage before; None in the first.
        outgoing: to the next stage; None in the last, and in ranks other than 0 of their stage.
    """

    stage: Stage
    messages: StepMessages
    incoming: StageLink | None = None
    outgoing: StageLink | None = None


class ShmLink:
    """A ``StageLink`` through the memory of a group, whose rank 0 sends and whose others receive.

    Values lie in slots, one for each step on its way; the group's messages say that one is written.
    A slot is written again ``depth`` steps later: by then the home rank has the results of its
    step, so that all ranks have read it.
    """

    def __init__(self, group: ShmGroup):
        self._group = group
        self._slots: list[np.ndarray] = []
        self._count = 0  # of steps that were sent or received

    def open(self, widths: Sequence[int], max_tokens: int, depth: int) -> None:
        num_bytes = _FLOAT_BYTES * max_tokens * sum(widths)
        self._slots = [self._group.allocate(num_bytes).view(np.float32) for _ in range(depth)]

    def send(self, number: int, values: Sequence[np.ndarray]) -> None:
        slot, begin = self._next_slot(), 0
        for value in values:
            slot[begin : begin + value.size] = value.ravel()
            begin += value.size
        self._group.send(array("i", [number, len(values[0])]))

    def fail(self, number: int, reason: str) -> None:
        self._next_slot()
        self._group.send(array("i", [number, FAILED, *text_words(reason)]))

    def receive(self, number: int, values: Sequence[np.ndarray]) -> None:
        slot, begin = self._next_slot(), 0
        message = self._group.receive()
        check_step(message, number, len(values[0]))
        for value in values:
            value[:] = slot[begin : begin + value.size].reshape(value.shape)
            begin += value.size

    def abort(self) -> None:
        self._group.abort()

    def _next_slot(self) -> np.ndarray:
        self._count += 1
        return self._slots[self._count % len(self._slots)]


def text_words(text: str) -> list[int]:
    """Return a text as words of a message; what is long is cut off."""
    data = text.encode(errors="replace")[: 4 * _MOST_WORDS]
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4), dtype=np.int32).tolist()


def check_step(message: np.ndarray, number: int, num_tokens: int) -> None:
    """Check the words that come with the values of a step: its number, and its tokens.

    Raises:
        StageFailedError: they say that it has failed.
        PeerEndedError: they are of another step, or of none: then nothing more can be computed.
    """
    said = message[:2].tolist()
    if len(said) == 2 and said[0] == number and said[1] == FAILED:
        reason = message[2:].tobytes()[: 4 * _MOST_WORDS].decode(errors="replace").strip()
        raise StageFailedError(reason)
    if said != [number, num_tokens]:
        raise PeerEndedError(
            f"hidden states of step {number}, of {num_tokens} tokens, are awaited from the stage "
            f"before, and these are of (step, tokens) {said}: the ranks are not in step"
        )
