"""Random heads for tiny models, engines that draft with them, and what their drafts should be."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from loading import load_model

from octavo.core.batch import Batch, Draft, ScheduledRequest
from octavo.core.engine import Engine
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.rank import Rank
from octavo.serving.load import load_engine
from octavo.settings.engine import EngineArgs

HIDDEN, VOCAB = 64, 260
TARGET = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_hidden_layers": 4}


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def engine_of(path: Path, head: Path | None = None, method: str = "", **settings: Any) -> Engine:
    """An engine; with a ``method``, one that drafts."""
    speculation = settings.pop("speculation", {})
    if method:
        said = {"method": method, "min_probability": 0.0, **speculation}
        settings["speculative_config"] = said | ({"model": str(head)} if head else {})
    settings = {"max_model_len": 128, "max_num_seqs": 8, "threads": 1, "seed": 0, **settings}
    args = EngineArgs(str(path), **settings)
    return load_engine(args).text_engine.engine


def requests(count: int = 6, most: int = 50) -> list[Request]:
    """Greedy and sampled ones, some with a prefix in common."""
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB - 4) for _ in range(20)]
    made: list[Request] = []
    for index in range(count):
        own = [rng.randrange(VOCAB - 4) for _ in range(rng.randint(1, most - 20))]
        params = SamplingParams(
            max_tokens=rng.randint(8, 30),
            temperature=[0.0, 0.9][index % 2],
            repetition_penalty=1.2 if index % 3 == 2 else 1.0,
            logprobs=2 if index % 3 == 0 else None,
            ignore_eos=True,
        )
        prompt = shared[: rng.choice([0, 20])] + own
        made.append(Request(f"r{index}", prompt, params, 0.0, seed=index))
    return made


@dataclass
class Run:
    """What came of some requests: tokens by their ids, and the drafts with what was known then."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    drafts: list[tuple[list[int], Draft]] = field(default_factory=list)


def run(engine: Engine, batch: Sequence[Request]) -> Run:
    result = Run()
    proposer = engine.scheduler.proposer
    if proposer is not None:
        propose = proposer.propose

        def spy(openings, batch_tokens):
            drafts = propose(openings, batch_tokens)
            for request, room in openings:
                draft = drafts.get(request.request_id)
                if draft is not None:
                    assert 1 <= len(draft) <= proposer.max_tokens
                    known = (list(request.token_ids), draft.first(room))
                    result.drafts.append(known)
            return drafts

        proposer.propose = spy
    for request in batch:
        engine.add(request)
    while (step := engine.step()) is not None:
        for update in step.updates:
            tokens = result.token_ids.setdefault(update.request.request_id, [])
            tokens += update.new_token_ids
            assert update.request.error is None
    engine.check_integrity()
    return result


def true_states(path: Path, token_ids: Sequence[int], depths: Sequence[int]) -> list[np.ndarray]:
    """Hidden states of a text, float32 [T, hidden_size] each, by the reference ops."""
    rank = Rank.load(RankSpec(path, kernels="reference"))
    rank.keep_hidden_states(depths)
    num_blocks = -(-len(token_ids) // 16)
    rank.start(RankLimits(num_blocks, 1, num_blocks * 16, num_blocks * 16))
    request = Request("r", list(token_ids), SamplingParams(), 0.0)
    request.block_ids = list(range(num_blocks))
    rank.run(Batch(0, (ScheduledRequest(request, 0, len(token_ids), 1),)))
    assert rank.runner is not None
    return [rank.runner.forward.hidden_states(depth).copy() for depth in depths]


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def is_likely(logits: np.ndarray, row: int, slack: float = 0.25) -> bool:
    """Whether a row has the greatest logit, but for what 8 bits of weights and activations lose."""
    return bool(logits[row] >= logits.max() - slack * logits.std())


def embedding_of(path: Path) -> np.ndarray:
    """float32 [vocab_size, hidden_size] of a tiny model."""
    weights: np.ndarray = load_model(path).model.model.embed_tokens.weight.value.floats()
    return weights


def last_norm_of(path: Path) -> np.ndarray:
    weight: np.ndarray = load_model(path).model.model.norm.weight.value
    return weight


def decoder_layer(
    x: np.ndarray,
    residual: np.ndarray,
    tensors: dict[str, np.ndarray],
    prefix: str,
    num_heads: int,
    head_dim: int,
) -> np.ndarray:
    """A layer as Llama has it, over a whole text: ``x`` [T, inputs] goes into the attention."""

    def project(name: str, y: np.ndarray) -> np.ndarray:
        return y @ tensors[f"{prefix}{name}.weight"].T

    count = len(x)
    q, k, v = (project(f"self_attn.{n}_proj", x).reshape(count, -1, head_dim) for n in "qkv")
    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(y, num_heads // y.shape[1], axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
    y = residual + project("self_attn.o_proj", attended)
    normed = rms(y, tensors[f"{prefix}post_attention_layernorm.weight"])
    inner = silu(project("mlp.gate_proj", normed)) * project("mlp.up_proj", normed)
    return y + project("mlp.down_proj", inner)


def rotated(x: np.ndarray, theta: float = 10000.0) -> np.ndarray:
    """Rope of [T, heads, head_dim], at the positions from 0 on."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
