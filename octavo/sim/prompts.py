"""The prompts of a simulated load, as pieces that become tokens when they are sent.

No model reads these prompts, so that a token need not be of any vocabulary. All that matters is
which of them are equal: prompts share in the prefix cache what they share here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat

from octavo.base.errors import ConfigError
from octavo.workload.requests import WorkloadRequest
from octavo.workload.traces import TraceEntry, check_replay


@dataclass(frozen=True, slots=True)
class RepeatedToken:
    """A sequence of one token, again and again. A long prompt takes no memory until it is sent, and
    then none for its many numbers."""

    token_id: int
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    def __iter__(self) -> Iterator[int]:
        return repeat(self.token_id, self.num_tokens)

    def first(self, num_tokens: int) -> RepeatedToken:
        return RepeatedToken(self.token_id, min(num_tokens, self.num_tokens))


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One request of a simulation.

    Args:
        pieces: the tokens of the prompt, one piece after the other.
        output_len: tokens of the answer.
        arrival_s: seconds after the start, if a trace says so.
        priority: smaller is served first, as in ``Request``.
        tenant: whose request it is; tenants get fair shares, as in ``Request``.
        follows: the id of the request whose end it waits for; it is sent ``think_s`` seconds
            later.
        goes_on: its prompt begins with the one that it follows, and with the answer to that.
        patience_s: after so long without the whole answer, the client hangs up.
    """

    request_id: str
    pieces: tuple[Sequence[int] | RepeatedToken, ...]
    output_len: int
    arrival_s: float | None = None
    priority: int = 0
    tenant: str = ""
    follows: str | None = None
    think_s: float = 0.0
    goes_on: bool = False
    patience_s: float | None = None

    @property
    def input_len(self) -> int:
        """Number of tokens of its own pieces."""
        return sum(map(len, self.pieces))


def prompts_of_requests(requests: Iterable[WorkloadRequest]) -> list[PromptSpec]:
    """Convert the requests of a benchmark. Prompts that are text share nothing.

    Raises:
        ConfigError: the length of an answer or of a text is not known.
    """
    tokens = _TokenSupply()
    prompts = []
    for request in requests:
        if request.output_len is None:
            raise ConfigError(
                f"nothing says how long the answer to request {request.request_id} is, and no "
                "model decides that in a simulation: give --output-len"
            )
        piece: Sequence[int] | RepeatedToken | None = request.prompt_token_ids
        if piece is None:
            if not request.input_len:
                raise ConfigError(
                    f"nothing says how many tokens the prompt of request {request.request_id} has: "
                    "simulate a trace, or prompts of token ids"
                )
            piece = tokens.fresh(request.input_len)
        prompts.append(
            PromptSpec(request.request_id, (piece,), request.output_len, request.arrival_s)
        )
    return prompts


def prompts_of_trace(
    entries: Sequence[TraceEntry], *, speedup: float = 1.0, max_input_len: int | None = None
) -> list[PromptSpec]:
    """Return prompts that share exactly the blocks that a trace says they share.

    Arrivals count from the first entry, divided by ``speedup``, and so do pauses: an entry with a
    session and a ``think_ms`` is sent that long after the one before it in its session has ended.
    Prompts longer than ``max_input_len`` are cut. Prompts and answers have at least one token.

    Raises:
        ConfigError: the speed-up or the limit is out of range.
    """
    check_replay(speedup, max_input_len)
    tokens = _TokenSupply()
    start = min((entry.arrival_s for entry in entries), default=0.0)
    last_turns: dict[str, str] = {}
    prompts = []
    for index, entry in enumerate(entries):
        length = min(max(1, entry.input_len), max_input_len or entry.input_len + 1)
        prompt = PromptSpec(
            str(index),
            tokens.prompt(entry, length),
            max(1, entry.output_len),
            (entry.arrival_s - start) / speedup,
            entry.priority or 0,
            entry.tenant or "",
        )
        if entry.session_id is not None:
            before = last_turns.get(entry.session_id)
            if before is not None and entry.think_ms is not None:
                prompt = replace(prompt, follows=before, think_s=entry.think_ms / 1e3 / speedup)
            last_turns[entry.session_id] = prompt.request_id
        prompts.append(prompt)
    return prompts


def as_conversations(
    prompts: Sequence[PromptSpec], turns: int, think_s: float = 0.0
) -> list[PromptSpec]:
    """Return the same requests as turns of conversations of ``turns`` each, in their order: the
    prompt of a turn follows the whole conversation before it, ``think_s`` after the last answer."""
    if turns < 1:
        raise ConfigError(f"a conversation has at least one turn, not {turns}")
    if not 0 <= think_s < math.inf:
        raise ConfigError(f"a pause between turns is from 0 s on, not {think_s}")
    return [
        replace(prompt, follows=prompts[index - 1].request_id, think_s=think_s, goes_on=True)
        if index % turns
        else prompt
        for index, prompt in enumerate(prompts)
    ]


class _TokenSupply:
    """Makes runs of tokens, each of a new token: pieces are equal only where they are the same
    block of a trace."""

    def __init__(self) -> None:
        self._token_ids = count()
        self._blocks: dict[tuple[int, int], RepeatedToken] = {}

    def fresh(self, num_tokens: int) -> RepeatedToken:
        return RepeatedToken(next(self._token_ids), num_tokens)

    def prompt(self, entry: TraceEntry, length: int) -> tuple[RepeatedToken, ...]:
        """Return pieces of ``length`` tokens: the blocks of an entry, then tokens of its own."""
        pieces: list[RepeatedToken] = []
        left = length
        for hash_id in entry.hash_ids[: math.ceil(length / entry.block_size)]:
            key = (hash_id, entry.block_size)
            if key not in self._blocks:
                self._blocks[key] = self.fresh(entry.block_size)
            pieces.append(self._blocks[key].first(left))
            left -= len(pieces[-1])
        return (*pieces, self.fresh(left)) if left else tuple(pieces)
