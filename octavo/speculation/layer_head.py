"""Heads with a layer of attention: they see the whole context, with keys and values of their own.

At position p such a head is handed a feature of the target's hidden states there, and the token
p + 1; it says what the token p + 2 is, and its own hidden state stands in for the feature of p + 1
that nobody has computed yet. So it is run over every position that the target computes, right after
each step, and what it keeps of a position lies in a block of the same number as the target's.
Blocks that requests share were computed by this engine, so there is nothing to look up: where the
token that follows a shared block is another, one position is a little wrong, and a guess may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import Opening
from octavo.core.request import Request
from octavo.kernels.cpu.layout import KV_FORMATS, kv_token_bytes
from octavo.kernels.cpu.program import KVLayout
from octavo.models.config import ModelConfig
from octavo.runtime.capacity import RankLimits
from octavo.runtime.hidden_states import Computed, States
from octavo.runtime.native_kv_cache import NativeKVCache
from octavo.speculation.head_chains import Chain, drafts_of
from octavo.speculation.head_program import Candidate, Head, HeadProgram, Runs
from octavo.speculation.native_target import NativeTarget

FEATURE = "feature"  # the name of the one input of such a head
_KV_DTYPE = "bfloat16"

# Float32 [rows, ...] to the features of those rows, float32 [rows, width].
MakeFeatures = Callable[[np.ndarray], np.ndarray]


def kv_bytes_per_token(layer: ModelConfig) -> int:
    """Of the one layer that a head has."""
    return layer.num_kv_heads * kv_token_bytes(_KV_DTYPE, layer.head_dim)


class LayerKV:
    """Keys and values of one layer, in blocks that have the numbers of the target's."""

    def __init__(self, layer: ModelConfig, native: NativeTarget, num_blocks: int):
        format = KV_FORMATS[_KV_DTYPE]
        library = native.library
        chunk_bytes = library.check(library.lib.oct_kv_chunk_bytes(format, layer.head_dim))
        self.cache = NativeKVCache(
            1, num_blocks, native.block_size, layer.num_kv_heads, chunk_bytes
        )
        self.layout = KVLayout(
            format,
            layer.num_kv_heads,
            layer.head_dim,
            num_blocks,
            self.cache.block_bytes,
            self.cache.layer_addresses(),
        )


@dataclass(frozen=True, slots=True)
class _Guessed:
    """What follows the last known token of a request, by the head's last run over its positions."""

    position: int  # of that token
    guesses: list[Candidate]
    hidden: np.ndarray  # float32 [hidden_size], to go on from


class LayerProposer:
    """A ``DraftProposer`` of a head with a layer, and the ``StepFollower`` that keeps up with the
    target.

    Args:
        head: with one input, ``feature``.
        depths: of the hidden states that features are made of, side by side.
        make_features: of those, float32 [rows, len(depths) * hidden_size].
        token_ids: int64, of the target, by the row of the head.
        go_on: what is made of the head's own hidden states to stand for features; nothing without.
    """

    def __init__(
        self,
        head: Head,
        layer: ModelConfig,
        native: NativeTarget,
        limits: RankLimits,
        depths: Sequence[int],
        make_features: MakeFeatures,
        token_ids: np.ndarray,
        max_tokens: int,
        min_probability: float,
        go_on: MakeFeatures | None = None,
    ):
        self.max_tokens = max_tokens
        self.min_probability = min_probability
        self.seconds = 0.0
        self._kv = LayerKV(layer, native, limits.num_blocks)
        self._program = HeadProgram(
            head, native, limits.max_num_batched_tokens, self._kv.layout, native.block_size
        )
        self._depths = depths
        self._make_features = make_features
        self._go_on_from = go_on or (lambda hidden: hidden)
        self._token_ids = token_ids
        self._guessed: dict[str, _Guessed] = {}

    # -- following the target --------------------------------------------------------------------

    def follow(self, batch: Batch, computed: Sequence[Computed], states: States) -> None:
        """As of ``StepFollower``: run over what the target has computed."""
        begin = time.perf_counter()
        self._kv.cache.copy_blocks(batch.block_copies)
        if computed:
            self._run_over(computed, states)
        self.seconds += time.perf_counter() - begin

    def _run_over(self, computed: Sequence[Computed], states: States) -> None:
        rows = [row for each in computed for row in each.rows]
        features = np.concatenate([states(depth)[rows] for depth in self._depths], axis=1)
        self._program.input(FEATURE)[: len(rows)] = self._make_features(features)
        ends = np.cumsum([len(each.rows) for each in computed]) - 1
        asking = [
            (each, end) for each, end in zip(computed, ends.tolist(), strict=True) if each.samples
        ]
        found = self._program.run(
            len(rows),
            [end for _, end in asking],
            1,
            [token_id for each in computed for token_id in each.next_token_ids],
            Runs(
                [len(each.rows) for each in computed],
                [each.end for each in computed],
                [each.request.block_ids for each in computed],
            ),
        )
        hidden = self._program.hidden
        for (each, end), guesses in zip(asking, found, strict=True):
            guessed = _Guessed(each.end, guesses, hidden[end].copy())
            self._guessed[each.request.request_id] = guessed

    # -- drafting --------------------------------------------------------------------------------

    def wants(self, request: Request) -> bool:
        return True

    def propose(self, openings: Sequence[Opening], batch_tokens: int) -> Mapping[str, Draft]:
        begin = time.perf_counter()
        chains: list[Chain] = []
        states: list[np.ndarray] = []
        alive: list[Chain] = []
        for opening in openings:
            guessed = self._guessed.get(opening.request.request_id)
            if guessed is None or guessed.position != len(opening.request.token_ids) - 1:
                continue
            chains.append(Chain(opening, self.min_probability, self.max_tokens))
            if self._extend(chains[-1], guessed.guesses):
                alive.append(chains[-1])
                states.append(guessed.hidden)
        if alive:
            self._go_on(alive, np.stack(states))
        self.seconds += time.perf_counter() - begin
        return drafts_of(chains)

    def _go_on(self, alive: list[Chain], states: np.ndarray) -> None:
        """Extend chains by what the head makes of its own hidden states."""
        while alive:
            count = len(alive)
            self._program.input(FEATURE)[:count] = self._go_on_from(states)
            found = self._program.run(
                count,
                range(count),
                1,
                [chain.last_token_id for chain in alive],
                Runs([1] * count, [_end(chain) for chain in alive], [_table(c) for c in alive]),
            )
            going = [
                row
                for row, (chain, guesses) in enumerate(zip(alive, found, strict=True))
                if self._extend(chain, guesses)
            ]
            states = self._program.hidden[going]
            alive = [alive[row] for row in going]

    def _extend(self, chain: Chain, guesses: Sequence[Candidate]) -> bool:
        return bool(guesses) and chain.extend(
            int(self._token_ids[guesses[0].row]), guesses[0].logprob
        )

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        pass

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._guessed.pop(request.request_id, None)


def _end(chain: Chain) -> int:
    """The number of positions with the one that a chain's next row is at: that before its last
    token."""
    return len(chain.opening.request.token_ids) + len(chain.token_ids) - 1


def _table(chain: Chain) -> list[int]:
    return chain.opening.request.block_ids
