"""Drafting by heads with one attention layer (EAGLE, MTP), which have a KV cache of their own.

At position p such a head reads a feature made of the target's hidden states there, and the token
p + 1, and predicts the token p + 2; its own hidden state then stands in for the feature of p + 1,
which the target has not computed yet. So the head runs over every position that the target
computes, right after each step, and its KV lies in blocks with the numbers of the target's.

Blocks that requests share are thereby filled without a look-up. Where another token follows a
shared block, the head's last position in it is slightly wrong; and a block restored from the host
KV cache or a disk has only the target's KV. Both can make drafts worse, and no answer different.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.batch import Batch, Draft
from octavo.core.drafting import DraftingRequest
from octavo.core.request import Request
from octavo.kernels.cpu.layout import KV_FORMATS
from octavo.models.config import ModelConfig
from octavo.models.footprint import native_kv_bytes_per_token
from octavo.runtime.capacity import RankLimits
from octavo.runtime.hidden_states import ComputedTokens, States
from octavo.runtime.native_kv_cache import create_native_cache
from octavo.speculation.draft_tree import DraftTree, DraftTreeShape, drafts_of
from octavo.speculation.head_program import DraftHead, HeadProgram, HeadSequences, TokenCandidate
from octavo.speculation.native_target import NativeTarget

FEATURE = "feature"  # the name of the one input of such a head
_KV_DTYPE = "bfloat16"

# Makes features of hidden states: float32 [rows, ...] to [rows, width].
MakeFeatures = Callable[[np.ndarray], np.ndarray]


def kv_bytes_per_token(layer: ModelConfig) -> int:
    """KV bytes of a head's one layer for a token."""
    return native_kv_bytes_per_token(layer, _KV_DTYPE)


@dataclass(frozen=True, slots=True)
class _HeadOutput:
    """The head's output at the latest position of a request that the target has computed."""

    position: int  # of the last known token, which the candidates follow
    candidates: list[TokenCandidate]
    hidden: np.ndarray  # float32 [hidden_size], the head's own, in place of the next feature


class LayerProposer:
    """A ``DraftProposer`` of a head with a layer, and the ``StepFollower`` that runs the head over
    what the target has computed.

    Args:
        head: a head with one input, ``feature``.
        layer: the config of its layer.
        depths: after how many target layers hidden states are taken, which are concatenated.
        make_features: makes features of these, float32 [rows, len(depths) * hidden_size].
        token_ids: target ids by the row of the head, int64.
        shape: the limits of drafts, with one beam.
        go_on: makes features of the head's own hidden states; None uses them as they are.
    """

    def __init__(
        self,
        head: DraftHead,
        layer: ModelConfig,
        native: NativeTarget,
        limits: RankLimits,
        depths: Sequence[int],
        make_features: MakeFeatures,
        token_ids: np.ndarray,
        shape: DraftTreeShape,
        go_on: MakeFeatures | None = None,
    ):
        self.max_tokens = shape.max_tokens
        self._shape = shape
        self.seconds = 0.0
        # In blocks with the numbers of the target's.
        self._kv_cache = create_native_cache(
            native.library,
            layer.kv_layers,
            native.block_size,
            KV_FORMATS[_KV_DTYPE],
            replace(limits, kv_groups=None),
        )
        self._program = HeadProgram(
            head,
            native,
            limits.max_num_batched_tokens,
            self._kv_cache.layout(),
            native.block_size,
        )
        self._depths = depths
        self._make_features = make_features
        self._go_on_from = go_on or (lambda hidden: hidden)
        self._token_ids = token_ids
        self._outputs: dict[str, _HeadOutput] = {}

    # -- following the target --------------------------------------------------------------------

    def follow(self, batch: Batch, computed: Sequence[ComputedTokens], states: States) -> None:
        """Run the head over the positions that the target's step has computed."""
        begin = time.perf_counter()
        self._kv_cache.copy_blocks(batch.block_copies)
        if computed:
            self._run_over(computed, states)
        self.seconds += time.perf_counter() - begin

    def _run_over(self, computed: Sequence[ComputedTokens], states: States) -> None:
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
            self._shape.width,
            [token_id for each in computed for token_id in each.next_token_ids],
            HeadSequences(
                [len(each.rows) for each in computed],
                [each.end for each in computed],
                [each.request.block_ids for each in computed],
            ),
        )
        hidden = self._program.hidden
        for (each, end), candidates in zip(asking, found, strict=True):
            output = _HeadOutput(each.end, candidates, hidden[end].copy())
            self._outputs[each.request.request_id] = output

    # -- drafting --------------------------------------------------------------------------------

    def wants(self, request: Request) -> bool:
        return True

    def propose(
        self, openings: Sequence[DraftingRequest], batch_tokens: int
    ) -> Mapping[str, Draft]:
        begin = time.perf_counter()
        trees: list[DraftTree] = []
        states: list[np.ndarray] = []
        front: list[tuple[DraftTree, int]] = []
        for opening in openings:
            output = self._outputs.get(opening.request.request_id)
            if output is None or output.position != len(opening.request.token_ids) - 1:
                continue
            trees.append(DraftTree(opening, self._shape))
            for node in self._add(trees[-1], -1, output.candidates):
                front.append((trees[-1], node))
                states.append(output.hidden)
        if front:
            self._go_on(front, np.stack(states))
        self.seconds += time.perf_counter() - begin
        return drafts_of(trees)

    def _go_on(self, front: list[tuple[DraftTree, int]], states: np.ndarray) -> None:
        """Extend trees by running the head on its own hidden states, each along its likeliest path
        only, since the KV cache has one slot for a position."""
        while front:
            count = len(front)
            self._program.input(FEATURE)[:count] = self._go_on_from(states)
            found = self._program.run(
                count,
                range(count),
                self._shape.width,
                [tree.token_id(node) for tree, node in front],
                HeadSequences(
                    [1] * count,
                    [len(t.opening.request.token_ids) + t.depth(node) for t, node in front],
                    [tree.opening.request.block_ids for tree, _ in front],
                ),
            )
            going = [
                (row, (tree, next_node))
                for row, ((tree, node), candidates) in enumerate(zip(front, found, strict=True))
                for next_node in self._add(tree, node, candidates)
            ]
            states = self._program.hidden[[row for row, _ in going]]
            front = [each for _, each in going]

    def _add(self, tree: DraftTree, node: int, candidates: Sequence[TokenCandidate]) -> list[int]:
        """Add a node's candidates to its tree, and return the node to extend, if there is one."""
        tokens = [(int(self._token_ids[row]), logprob) for row, logprob in candidates]
        return tree.best(tree.add(node, tokens))

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        pass

    def observe_step(self, batch: Batch, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._outputs.pop(request.request_id, None)
