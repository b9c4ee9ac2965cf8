"""The ``recurrent`` method, a ReDrafter head, which is a recurrence over the last hidden state.

Each draft token follows from the state and the embedding e of the token before it::

    s_0 = x                             the hidden state after the last norm
    s_i+1 = s_i, and for each layer     s += down(silu(gate y) * up y),  y = norm(s);
                                        in the first layer y = [norm(s), norm(e)]
    the token after e: token_map[argmax of lm_head s_i+1]

The design is that of recurrent drafters (Zhang et al. 2024, "Recurrent Drafter", arXiv 2403.09919)
and of Hydra's heads (Ankner et al. 2024, arXiv 2402.05109). The layout of the folder is octavo's
own, made by ``octavo train-draft``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from octavo.core.batch import Draft
from octavo.core.drafting import DraftingRequest
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear, LMHead
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.runtime.capacity import RankLimits
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.draft_tree import DraftTree, DraftTreeShape, drafts_of, tree_shape
from octavo.speculation.drafter import TargetModel
from octavo.speculation.head_folder import HeadFolder
from octavo.speculation.head_program import DraftHead, HeadProgram
from octavo.speculation.native_target import NativeTarget
from octavo.speculation.state_proposer import LastStates, StateProposer
from octavo.speculation.two_input_linear import PairLinear

ARCHITECTURE = "OctavoRecurrentDraft"
_MAX_LAYERS = 16
_MAX_BEAMS = 4
_NUM_TOKENS = 3  # each is accepted less often than the one before


class _FirstLayer(Module):
    """The first gated layer, which reads the last token's embedding beside the state."""

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float):
        self.input_norm = RMSNorm(hidden_size, eps)
        self.gate_proj = PairLinear(hidden_size, hidden_size, intermediate_size)
        self.up_proj = PairLinear(hidden_size, hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, s: Activations, e: Activations, ctx: ForwardContext) -> Activations:
        pair = self.input_norm(s, ctx), e
        product = ctx.ops.silu_mul(self.gate_proj(pair, ctx), self.up_proj(pair, ctx))
        return ctx.ops.add(s, self.down_proj(product, ctx))


class _Layer(Module):
    def __init__(self, hidden_size: int, intermediate_size: int, eps: float):
        self.input_norm = RMSNorm(hidden_size, eps)
        self.mlp = GatedMLP(hidden_size, intermediate_size, "silu")

    def forward(self, s: Activations, ctx: ForwardContext) -> Activations:
        return ctx.ops.add(s, self.mlp(self.input_norm(s, ctx), ctx))


class ReDrafterHead(DraftHead):
    """One step of the recurrence, with the target's embedding."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_layers: int, rows: int, eps: float
    ):
        self.inputs = {"state": hidden_size}
        self.embed_tokens = Embedding(1, hidden_size)  # the size is that of the shared one
        self.embed_norm = RMSNorm(hidden_size, eps)
        self.first = _FirstLayer(hidden_size, intermediate_size, eps)
        self.layers = [_Layer(hidden_size, intermediate_size, eps) for _ in range(num_layers - 1)]
        self.lm_head = LMHead(hidden_size, rows)

    def forward(
        self, inputs: Mapping[str, Activations], token_ids: Activations, ctx: ForwardContext
    ) -> Activations:
        e = self.embed_norm(self.embed_tokens(token_ids, ctx), ctx)
        s = self.first(inputs["state"], e, ctx)
        for layer in self.layers:
            s = layer(s, ctx)
        return self.lm_head(s, ctx)


class ReDrafter:
    """A ``Drafter`` of the recurrent head of a folder. Raises as ``open_drafter`` does."""

    kv_bytes_per_token = 0

    def __init__(self, config: SpeculativeConfig, target: TargetModel, folder: HeadFolder):
        folder.check([ARCHITECTURE], "recurrent")
        self._rank = target.rank
        self._native = NativeTarget(target, "recurrent")
        self._head, self._token_ids = _load(folder, self._native)
        self._shape = tree_shape(config, folder.config, _NUM_TOKENS, beams=_MAX_BEAMS)
        self._rank.keep_hidden_states([self._native.depth])

    def start(self, limits: RankLimits) -> ReDrafterProposer:
        states = LastStates(self._native.depth, self._native.last_norm())
        self._rank.follow(states)
        max_rows = limits.max_num_seqs * self._shape.beams
        program = HeadProgram(self._head, self._native, max_rows)
        return ReDrafterProposer(program, self._token_ids, states, self._shape)


class ReDrafterProposer(StateProposer):
    """Drafts for all requests at once, one depth of their trees at a time.

    Args:
        token_ids: target ids by the row of the head, int64.
    """

    def __init__(
        self, program: HeadProgram, token_ids: np.ndarray, states: LastStates, shape: DraftTreeShape
    ):
        super().__init__(states, shape)
        self._program = program
        self._token_ids = token_ids

    def draft(self, openings: Sequence[DraftingRequest], states: np.ndarray) -> dict[str, Draft]:
        trees = [DraftTree(opening, self.shape) for opening in openings]
        front = [(tree, -1) for tree in trees]
        while front:
            count = len(front)
            self._program.input("state")[:count] = states
            tokens = [tree.token_id(node) for tree, node in front]
            found = self._program.run(count, range(count), self.shape.width, tokens)
            made: dict[DraftTree, dict[int, int]] = {tree: {} for tree, _ in front}
            for row, ((tree, node), candidates) in enumerate(zip(front, found, strict=True)):
                tokens_of_row = [(int(self._token_ids[c.row]), c.logprob) for c in candidates]
                made[tree] |= dict.fromkeys(tree.add(node, tokens_of_row), row)
            front = [(tree, node) for tree, rows in made.items() for node in tree.best([*rows])]
            states = self._program.hidden[[made[tree][node] for tree, node in front]]
        return drafts_of(trees)


def _load(folder: HeadFolder, native: NativeTarget) -> tuple[ReDrafterHead, np.ndarray]:
    fields = folder.config
    hidden_size, vocab_size = fields.integer("hidden_size"), fields.integer("vocab_size")
    folder.check_fits("hidden_size", hidden_size, native.config)
    folder.check_fits("vocab_size", vocab_size, native.config)
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "must be silu")
    rows = fields.integer("draft_vocab_size")
    head = ReDrafterHead(
        hidden_size,
        fields.integer("intermediate_size"),
        fields.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        rows,
        fields.number("rms_norm_eps"),
    )
    head.embed_tokens.weight, _ = native.share_embedding(head.embed_tokens.weight)
    for name, pair in (("gate_proj", head.first.gate_proj), ("up_proj", head.first.up_proj)):
        pair.load(folder, f"layers.0.{name}.weight")
    token_ids = folder.token_ids("token_map", rows, vocab_size)
    folder.load(head, _tensor_name)
    return head, token_ids


def _tensor_name(parameter: str) -> str:
    """The tensor of a parameter: ``layers.0.down_proj.weight`` for ``first.down_proj.weight``."""
    if parameter.startswith("first."):
        return parameter.replace("first.", "layers.0.", 1)
    if parameter.startswith("layers."):
        _, index, name = parameter.split(".", 2)
        return f"layers.{int(index) + 1}.{name.removeprefix('mlp.')}"
    return parameter
