"""Medusa: heads that guess the tokens after the next one, all from one hidden state.

Head h makes of the hidden state x after the last norm

    logits = lm_head(f_n(... f_1(x)))       f(x) = x + SiLU(W x + b)

and says what stands h + 1 places after the token that x leads to (Cai et al. 2024, arXiv
2401.10774). Heads know nothing of each other's guesses, so what they draft is a chain of their
first guesses; or a tree of the paths that are most often right, which the folder has.

A folder is as Medusa and vLLM have it: ``blocks.{h}.layers.{l}``, ``lm_heads.{h}``, and maybe a
``token_map`` from the rows of the heads to the tokens of the model.
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
Path = tuple[int, ...]  # of a tree: the rank of a guess, 0 the first, for every head down to it


class MedusaHead(DraftHead):
    """One head, and the model's last norm before it."""

    def __init__(self, hidden_size: int, num_layers: int, vocab_size: int, norm_eps: float):
        self.inputs = {"hidden": hidden_size, "ones": hidden_size}
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.layers = [Linear(hidden_size, hidden_size, bias=True) for _ in range(num_layers)]
        self.lm_head = LMHead(hidden_size, vocab_size)

    def forward(
        self, inputs: Mapping[str, Activations], token_ids: Activations, ctx: ForwardContext
    ) -> Activations:
        x = self.norm(inputs["hidden"], ctx)
        for layer in self.layers:  # a gate of ones leaves the SiLU alone
            x = ctx.ops.add(x, ctx.ops.silu_mul(layer(x, ctx), inputs["ones"]))
        return self.lm_head(x, ctx)


class MedusaHeads(Module):
    """All heads of a folder."""

    def __init__(self, heads: list[MedusaHead]):
        self.heads = heads


@dataclass(frozen=True, slots=True)
class _LoadedMedusaHeads:
    heads: list[MedusaHead]
    token_ids: np.ndarray  # of the target, by the row of a head
    tree: list[Path]


class MedusaDrafter:
    """The heads of a folder, for one target. Errors as of ``open_drafter``."""

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
    """Drafts chains, or where it has a ``tree`` that.

    Args:
        programs: a head each, in order.
        token_ids: int64, of the target, by the row of a head.
        shape: of chains; with a tree, its ``max_tokens`` are those of the tree.
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
            found = self._guess(program, states[[row for row, _ in alive]], 1)
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
        """The static tree, with the guesses of the heads at its nodes."""
        depth = max(map(len, self._tree))
        of_heads = []
        for index, program in enumerate(self._programs[:depth]):
            most = max(path[index] for path in self._tree if len(path) > index)
            of_heads.append(self._guess(program, states, most + 1))
        parents = [self._tree.index(path[:-1]) if len(path) > 1 else -1 for path in self._tree]
        drafts: dict[str, Draft] = {}
        for row, opening in enumerate(openings):
            if all(guesses[row] for guesses in of_heads):
                rows = [of_heads[len(path) - 1][row][path[-1]].row for path in self._tree]
                draft = Draft(tuple(self._token_ids[rows].tolist()), tuple(parents))
                drafts[opening.request.request_id] = draft
        return drafts

    @staticmethod
    def _guess(
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
    """``heads.2.layers.0.weight`` to ``blocks.2.layers.0.weight``."""
    _, head, name = parameter.split(".", 2)
    if name.startswith("layers."):
        return f"blocks.{head}.{name}"
    return name.replace("lm_head.", f"lm_heads.{head}.")


def _tree(fields: Fields, num_heads: int, vocab_size: int) -> list[Path]:
    """Paths of a static tree, a parent before its children."""
    paths: list[Path] = []
    for entry in fields.entries("tree") if "tree" in fields else []:
        path = tuple(entry) if isinstance(entry, list) else ()
        is_path = 0 < len(path) <= num_heads and all(
            isinstance(rank, int) and 0 <= rank < min(vocab_size, _MAX_RANK) for rank in path
        )
        if not is_path or path in paths or path[:-1] not in [(), *paths]:
            raise fields.error(
                "tree", f"{entry!r:.60} does not go on from a path before it, for {num_heads} heads"
            )
        paths.append(path)
    return paths
