"""The ``medusa`` method, heads that each predict a later token from the same hidden state.

Head h computes of the hidden state x after the last norm

    logits = lm_head(f_n(... f_1(x)))       f(x) = x + SiLU(W x + b)

for the token h + 1 places after the one that x is sampled from (Cai et al. 2024, arXiv 2401.10774).
Heads do not see each other's tokens, so a draft is the chain of their likeliest tokens, or a static
tree of the paths that are accepted most often, which the folder has.

A folder has the layout of Medusa and vLLM: ``blocks.{h}.layers.{l}``, ``lm_heads.{h}``, and
optionally a ``token_map`` from the rows of the heads to token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.base.fields import Fields
from octavo.core.batch import Draft
from octavo.core.drafting import DraftingRequest
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.linear import Linear, LMHead
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.runtime.capacity import RankLimits
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.draft_tree import DraftTree, DraftTreeShape, drafts_of, min_probability_of
from octavo.speculation.drafter import TargetModel
from octavo.speculation.head_folder import HeadFolder
from octavo.speculation.head_program import DraftHead, HeadProgram, TokenCandidate
from octavo.speculation.native_target import NativeTarget
from octavo.speculation.state_proposer import LastStates, StateProposer

ARCHITECTURE = "MedusaModel"
_MAX_HEADS, _MAX_LAYERS, _MAX_RANK = 32, 16, 64
Path = tuple[int, ...]  # to a node of the tree: for each head the rank of its token, from 0


class MedusaHead(DraftHead):
    """A Medusa head, with the model's last norm before it."""

    def __init__(self, hidden_size: int, num_layers: int, vocab_size: int, norm_eps: float):
        self.inputs = {"hidden": hidden_size, "ones": hidden_size}
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.layers = [Linear(hidden_size, hidden_size, bias=True) for _ in range(num_layers)]
        self.lm_head = LMHead(hidden_size, vocab_size)

    def forward(
        self, inputs: Mapping[str, Activations], token_ids: Activations, ctx: ForwardContext
    ) -> Activations:
        x = self.norm(inputs["hidden"], ctx)
        for layer in self.layers:  # silu_mul with a gate of ones is the SiLU
            x = ctx.ops.add(x, ctx.ops.silu_mul(layer(x, ctx), inputs["ones"]))
        return self.lm_head(x, ctx)


class MedusaHeads(Module):
    """All heads of a folder."""

    def __init__(self, heads: list[MedusaHead]):
        self.heads = heads


@dataclass(frozen=True, slots=True)
class _LoadedMedusaHeads:
    heads: list[MedusaHead]
    token_ids: np.ndarray  # target ids by the row of a head
    tree: list[Path]


class MedusaDrafter:
    """A ``Drafter`` of the Medusa heads of a folder. Raises as ``open_drafter`` does."""

    kv_bytes_per_token = 0

    def __init__(self, config: SpeculativeConfig, target: TargetModel, folder: HeadFolder):
        folder.check([ARCHITECTURE], "medusa")
        self._config = config
        self._rank = target.rank
        self._native = NativeTarget(target, "medusa")
        self._loaded = _load(folder, self._native)
        self._rank.keep_hidden_states([self._native.depth])

    def start(self, limits: RankLimits) -> MedusaProposer:
        programs = [
            HeadProgram(head, self._native, limits.max_num_seqs) for head in self._loaded.heads
        ]
        for program in programs:
            program.input("ones")[:] = 1.0
        asked = self._config.num_speculative_tokens or len(programs)
        tree = self._loaded.tree[:asked] if asked > len(programs) else []
        states = LastStates(self._native.depth)
        self._rank.follow(states)
        return MedusaProposer(
            programs,
            self._loaded.token_ids,
            states,
            tree,
            DraftTreeShape(
                min(asked, len(tree) or len(programs)),
                min(asked, len(programs)),
                width=1,
                beams=1,
                min_probability=min_probability_of(self._config),
            ),
        )


class MedusaProposer(StateProposer):
    """Drafts the static ``tree`` of a folder, or chains if that is empty.

    Args:
        programs: the heads in their order.
        token_ids: target ids by the row of a head, int64.
        shape: the limits of chains; with a tree, ``max_tokens`` is its number of nodes.
    """

    def __init__(
        self,
        programs: Sequence[HeadProgram],
        token_ids: np.ndarray,
        states: LastStates,
        tree: Sequence[Path],
        shape: DraftTreeShape,
    ):
        super().__init__(states, shape)
        self._programs = programs
        self._token_ids = token_ids
        self._tree = tree

    def draft(self, openings: Sequence[DraftingRequest], states: np.ndarray) -> dict[str, Draft]:
        if self._tree:
            return self._trees(openings, states)
        trees = [DraftTree(opening, self.shape) for opening in openings]
        alive = [(row, -1) for row in range(len(trees))]
        for program in self._programs[: self.shape.depth]:
            found = self._run_head(program, states[[row for row, _ in alive]], 1)
            alive = [
                (row, next_node)
                for (row, node), candidates in zip(alive, found, strict=True)
                for next_node in trees[row].best(trees[row].add(node, self._tokens(candidates)))
            ]
            if not alive:
                break
        return drafts_of(trees)

    def _tokens(self, candidates: Sequence[TokenCandidate]) -> list[tuple[int, float]]:
        return [(int(self._token_ids[row]), logprob) for row, logprob in candidates]

    def _trees(self, openings: Sequence[DraftingRequest], states: np.ndarray) -> dict[str, Draft]:
        """Fill the static tree with the heads' tokens."""
        depth = max(map(len, self._tree))
        of_heads = []
        for index, program in enumerate(self._programs[:depth]):
            most = max(path[index] for path in self._tree if len(path) > index)
            of_heads.append(self._run_head(program, states, most + 1))
        parents = [self._tree.index(path[:-1]) if len(path) > 1 else -1 for path in self._tree]
        drafts: dict[str, Draft] = {}
        for row, opening in enumerate(openings):
            if all(candidates[row] for candidates in of_heads):
                rows = [of_heads[len(path) - 1][row][path[-1]].row for path in self._tree]
                draft = Draft(tuple(self._token_ids[rows].tolist()), tuple(parents))
                drafts[opening.request.request_id] = draft
        return drafts

    @staticmethod
    def _run_head(
        program: HeadProgram, states: np.ndarray, num_top: int
    ) -> list[list[TokenCandidate]]:
        program.input("hidden")[: len(states)] = states
        return program.run(len(states), range(len(states)), num_top)


def _load(folder: HeadFolder, native: NativeTarget) -> _LoadedMedusaHeads:
    fields = folder.config
    hidden_size = fields.integer("hidden_size")
    vocab_size = fields.integer("vocab_size")
    folder.check_fits("hidden_size", hidden_size, native.config)
    folder.check_fits("vocab_size", vocab_size, native.config)
    count = fields.integer("num_heads", maximum=_MAX_HEADS)
    num_layers = fields.integer("num_hidden_layers", 1, maximum=_MAX_LAYERS)
    rows = fields.integer("truncated_vocab_size", vocab_size)
    heads: list[MedusaHead] = []
    for _ in range(count):
        head = MedusaHead(hidden_size, num_layers, rows, native.config.norm_eps)
        head.norm.weight = native.share_norm(head.norm.weight)
        heads.append(head)
    token_ids = np.arange(rows)
    if "token_map" in folder.tensors:
        token_ids = folder.token_ids("token_map", rows, vocab_size)
    folder.load(MedusaHeads(heads), _tensor_name)
    return _LoadedMedusaHeads(heads, token_ids, _tree(fields.section("octavo", {}), count, rows))


def _tensor_name(parameter: str) -> str:
    """The tensor of a parameter: ``blocks.2.layers.0.weight`` for ``heads.2.layers.0.weight``."""
    _, head, name = parameter.split(".", 2)
    if name.startswith("layers."):
        return f"blocks.{head}.{name}"
    return name.replace("lm_head.", f"lm_heads.{head}.")


def _tree(fields: Fields, num_heads: int, vocab_size: int) -> list[Path]:
    """The paths of the static tree, checked: parents come before their children."""
    paths: list[Path] = []
    for entry in fields.entries("tree") if "tree" in fields else []:
        path = tuple(entry) if isinstance(entry, list) else ()
        is_path = 0 < len(path) <= num_heads and all(
            isinstance(rank, int) and 0 <= rank < min(vocab_size, _MAX_RANK) for rank in path
        )
        if not is_path or path in paths or path[:-1] not in [(), *paths]:
            raise fields.error(
                "tree", f"{entry!r:.60} does not extend a path before it, for {num_heads} heads"
            )
        paths.append(path)
    return paths
