"""Messages and hidden states of a pipeline between machines: one `Link` for each stage elsewhere.

:class:`SentMessages` and :class:`ReceivedMessages` are the two ends of ``StepMessages``, and
:class:`MachineLink` is an end of a ``StageLink`` (``stage_links.py``). The bytes are those that
ranks on one machine read in shared memory::

    WORDS    a message of the home rank to a follower, as step_words.py has it
    ROWS     int32 [2]: number of the step, and its tokens T; then each value, float32 [T, width];
             or the number, -1, and why the step has failed, in bytes

Both ends are the first ranks of their stages; `StageMemory` has what others get from them. Frames
are as long at most as the sizes allow that all ranks were started with. A link that has
ended is a rank that has ended: those that wait get PeerEndedError.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from octavo.base.errors import EngineError, LinkError, PeerEndedError
from octavo.links.frames import MESSAGE, ROWS, WORDS
from octavo.links.link import MOST_WAITING, Frame, Link
from octavo.runtime.capacity import RankLimits
from octavo.runtime.home_connection import error_in
from octavo.runtime.stage_links import FAILED, check_step, text_words

_WORD = 4  # bytes, of int32 and float32
_HEAD_WORDS = 2
_OTHER_WORDS = 8192  # headers, and rows of the head beyond those of a step's tokens
_MOST_TEXT_BYTES = 1024


def most_message_bytes(limits: RankLimits, block_size: int) -> int:
    """Return how long the longest message of the home rank may be."""
    groups = 1 if limits.kv_groups is None else limits.kv_groups.num_groups
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    blocks = -(-(limits.max_model_len + tokens) // block_size) + 1
    # Of each token its id, parent, row of the head and what that needs; of each sequence its end,
    # length, table, sink window and states; and all tables anew, twice.
    step = 4 * tokens + 16 * rows + 2 * groups * rows * (blocks + 4)
    copies = 2 * (limits.num_blocks + limits.num_host_blocks)
    return _WORD * (_OTHER_WORDS + max(step, copies, limits.max_model_len + blocks))


class SentMessages:
    """``StepMessages`` at the home rank, to the first rank of each stage on another machine.

    ``links``: to these, one each.
    """

    room = MOST_WAITING

    def __init__(self, links: Sequence[Link]):
        self._links = links

    def pieces(self, num_words: int) -> int:
        return 1

    def send(self, words: array[int]) -> None:
        for link in self._links:
            _sent(link, WORDS, words)

    def receive(self) -> np.ndarray:
        raise AssertionError("the home rank is told nothing")

    def abort(self) -> None:
        _abort(*self._links)


class ReceivedMessages:
    """``StepMessages`` at the first rank of a stage on another machine than the home rank."""

    room = MOST_WAITING

    def __init__(self, link: Link):
        self._link = link

    def pieces(self, num_words: int) -> int:
        return 1

    def send(self, words: array[int]) -> None:
        raise AssertionError("a follower tells the other ranks nothing")

    def receive(self) -> np.ndarray:
        frame = _received(self._link, WORDS)
        if len(frame) % _WORD:
            raise EngineError(f"{self._link.peer}: a message of {len(frame)} bytes is no words")
        return np.frombuffer(frame, dtype=np.int32)

    def abort(self) -> None:
        _abort(self._link)


class MachineLink:
    """A ``StageLink`` between the first ranks of two stages, on two machines.

    Args:
        receives: the kinds of frames that may come at the end that receives, beside those of
            values, and their most bytes; None is the end that sends.
    """

    def __init__(self, link: Link, receives: Mapping[int, int] | None = None):
        self._link = link
        self._receives = receives

    def open(self, widths: Sequence[int], max_tokens: int, depth: int) -> None:
        if self._receives is not None:
            most = _WORD * (_HEAD_WORDS + max_tokens * sum(widths))
            self._link.allow({**self._receives, ROWS: max(most, _MOST_TEXT_BYTES)})

    def send(self, number: int, values: Sequence[np.ndarray]) -> None:
        head = np.array((number, len(values[0])), dtype=np.int32)
        parts = (head, *(value.reshape(-1).view(np.int32) for value in values))
        _sent(self._link, ROWS, np.concatenate(parts))

    def fail(self, number: int, reason: str) -> None:
        _sent(self._link, ROWS, array("i", [number, FAILED, *text_words(reason)]))

    def receive(self, number: int, values: Sequence[np.ndarray]) -> None:
        frame = _received(self._link, ROWS)
        num_tokens = len(values[0])
        due = _WORD * (_HEAD_WORDS + sum(value.size for value in values))
        words = np.frombuffer(frame[: len(frame) // _WORD * _WORD], dtype=np.int32)
        failed = len(words) >= _HEAD_WORDS and words[1] == FAILED
        check_step(words if failed else words[:_HEAD_WORDS], number, num_tokens)
        if len(frame) != due:
            raise EngineError(
                f"{self._link.peer}: hidden states of step {number} have {len(frame):,} bytes, and "
                f"{due:,} are due"
            )
        row, begin = words[_HEAD_WORDS:].view(np.float32), 0
        for value in values:
            value[:] = row[begin : begin + value.size].reshape(value.shape)
            begin += value.size

    def abort(self) -> None:
        _abort(self._link)


def peer_ended(error: LinkError) -> PeerEndedError:
    """Return the end of a link as what it means for a group of ranks."""
    return PeerEndedError(str(error))


def _sent(link: Link, kind: int, data: object) -> None:
    try:
        link.send(kind, data)
    except LinkError as error:
        raise peer_ended(error) from None


def _received(link: Link, kind: int) -> memoryview:
    try:
        frame: Frame = link.receive()
    except LinkError as error:
        raise peer_ended(error) from None
    if frame.kind == MESSAGE:  # why it cannot go on
        raise PeerEndedError(f"{link.peer}: {error_in(frame.data)}")
    if frame.kind != kind:
        raise EngineError(f"{link.peer}: another kind of frame came than was due")
    return frame.data


def _abort(*links: Link) -> None:
    for link in links:
        link.end(LinkError(f"{link.peer}: the group of ranks was ended here"))
