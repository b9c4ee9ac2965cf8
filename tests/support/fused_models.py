"""Tiny models with random weights, and ragged steps of them: op by op, and as a fused program.

Both ways are given the same tokens in the same order, each with a KV cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from weights import stored

from octavo.core.batch import Batch, ScheduledRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cuda.attention_plan import StepTables
from octavo.kernels.cuda.ops import StepOps, StepTensors
from octavo.kernels.cuda.packing import pack
from octavo.kernels.cuda.plain_ops import PlainOps
from octavo.kernels.cuda.program import FusedProgram
from octavo.kernels.cuda.weights import DeviceWeight
from octavo.kernels.dispatch import create_ops
from octavo.kernels.fused_ops import FusedOp
from octavo.kernels.kv_stores import codecs_of
from octavo.kernels.routing import CLAMPED_SWIGLU, Routing
from octavo.layers.latent_config import LatentConfig
from octavo.layers.module import named_parameters
from octavo.layers.rope_config import RopeConfig
from octavo.layers.tensors import with_tensors
from octavo.models.config import ExpertsConfig, KVSpec, ModelConfig
from octavo.models.registry import model_class
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_quantize import quantize_to_blocks
from octavo.runtime.capacity import RankLimits
from octavo.runtime.eager_forward import EagerForward
from octavo.runtime.kv_cache import KVCache
from octavo.runtime.op_program import plan_step

VOCAB, HEAD_DIM, MAX_LEN, MAX_ROWS, BLOCK_SIZE, NUM_BLOCKS = 61, 16, 96, 32, 16, 40

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    name="tiny",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HEAD_DIM,
    vocab_size=VOCAB,
    max_position=MAX_LEN,
    rope=RopeConfig(1000.0, HEAD_DIM),
    norm_eps=1e-5,
    layer_windows=(None, None),
    attention_scale=HEAD_DIM**-0.5,
)
GEMMA = replace(
    LLAMA,
    architecture="Gemma3ForCausalLM",
    num_layers=3,
    local_rope=RopeConfig(100.0, HEAD_DIM),
    activation="gelu_tanh",
    tie_embeddings=True,
    qk_norm=True,
    norm_plus_one=True,
    layer_windows=(9, None, 9),
    embedding_scale=32**0.5,
)
MIXTRAL = replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    experts=ExpertsConfig(
        routing=Routing(num_experts=5, top_k=2), inner=24, layers=(True, True), activation="silu"
    ),
)
QWEN_2_MOE = replace(
    LLAMA,
    architecture="Qwen2MoeForCausalLM",
    attention_bias=True,
    experts=ExpertsConfig(
        routing=Routing(num_experts=6, top_k=3, normalize=False),
        inner=24,
        layers=(False, True),
        shared_inner=40,
        shared_gate=True,
    ),
)
GPT_OSS = replace(
    LLAMA,
    architecture="GptOssForCausalLM",
    attention_bias=True,
    attention_output_bias=True,
    layer_windows=(9, None),
    experts=ExpertsConfig(
        routing=Routing(num_experts=4, top_k=2),
        inner=24,
        layers=(True, True),
        bias=True,
        router_bias=True,
        activation=CLAMPED_SWIGLU,
    ),
)
GLM_4_MOE = replace(
    LLAMA,
    architecture="Glm4MoeForCausalLM",
    experts=ExpertsConfig(
        routing=Routing(
            num_experts=8,
            top_k=2,
            scoring="sigmoid",
            scale=1.5,
            num_groups=4,
            top_groups=2,
            group_top=2,
        ),
        inner=24,
        layers=(False, True),
        correction=True,
        shared_inner=24,
    ),
)
LATENT = LatentConfig(q_rank=None, kv_rank=24, nope_dim=16, rope_dim=16, value_dim=8)
DEEPSEEK_V2 = replace(
    LLAMA,
    architecture="DeepseekV2ForCausalLM",
    num_kv_heads=LLAMA.num_heads,
    head_dim=LATENT.query_dim,
    latent=LATENT,
    rope=RopeConfig(1000.0, 16, interleaved=True),
    experts=ExpertsConfig(
        routing=Routing(num_experts=6, top_k=2, normalize=False, num_groups=3, top_groups=2),
        inner=24,
        layers=(False, True),
        shared_inner=24,
    ),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    architecture="DeepseekV3ForCausalLM",
    latent=replace(LATENT, q_rank=20),
    experts=GLM_4_MOE.experts,
)
OPT = replace(
    LLAMA,
    architecture="OPTForCausalLM",
    num_kv_heads=LLAMA.num_heads,
    activation="relu",
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    learned_positions=MAX_LEN,
    unrotated_layers=(0, 1),
)
CONFIGS = {
    "llama": LLAMA,
    "llama with biases": replace(
        LLAMA, attention_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "llama, rotated in pairs": replace(LLAMA, rope=RopeConfig(500.0, 8, interleaved=True)),
    "llama of one key head, tied": replace(LLAMA, num_kv_heads=1, tie_embeddings=True),
    "mistral": replace(LLAMA, architecture="MistralForCausalLM", layer_windows=(7, 7)),
    "qwen 2": replace(LLAMA, architecture="Qwen2ForCausalLM", attention_bias=True),
    "qwen 3": replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, activation="gelu"),
    "gemma 3": GEMMA,
    "gemma 3 with caps": replace(GEMMA, attention_softcap=20.0, logit_softcap=5.0),
    "granite, of which a layer turns nothing": replace(
        LLAMA,
        architecture="GraniteForCausalLM",
        embedding_scale=3.0,
        residual_scale=0.4,
        logit_scale=0.5,
        unrotated_layers=(1,),
    ),
    "opt": OPT,
    "starcoder 2": replace(
        LLAMA,
        architecture="Starcoder2ForCausalLM",
        activation="gelu_tanh",
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    ),
    "cohere 2": replace(
        LLAMA,
        architecture="Cohere2ForCausalLM",
        rope=RopeConfig(500.0, HEAD_DIM, interleaved=True),
        tie_embeddings=True,
        layer_windows=(9, None),
        unrotated_layers=(1,),
        logit_scale=0.5,
    ),
    "olmo 2": replace(LLAMA, architecture="Olmo2ForCausalLM"),
    "mixtral": MIXTRAL,
    "qwen 2 with experts": QWEN_2_MOE,
    "gpt-oss": GPT_OSS,
    "glm 4 with experts": GLM_4_MOE,
    "deepseek 2": DEEPSEEK_V2,
    "deepseek 3": DEEPSEEK_V3,
}


def random_model(config: ModelConfig, type: GGMLType = GGMLType.F32) -> Any:
    """Numbers of a size that all of them matter; matrices are of a type of GGUF's."""
    model = model_class(config.architecture)(config)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in named_parameters(model):
        numbers = torch.randn(parameter.shape, generator=generator)
        if len(parameter.shape) == 1:
            parameter.load(stored(0.4 * numbers))
        elif type is GGMLType.F32:
            parameter.load(stored(numbers * 1.5 / parameter.shape[-1] ** 0.5))
        else:
            rows = quantize_to_blocks(type, numbers * 1.5 / parameter.shape[-1] ** 0.5)
            parameter.load(StoredWeight(type, rows.numpy(), parameter.shape))
    if config.tie_embeddings:
        model.lm_head.weight.share(model.model.embed_tokens.weight)
    return model


class PackedOnce:
    """Matrices on a device, each joint of them packed when it is first asked for."""

    def __init__(self, device: str, dtype: torch.dtype):
        self._to = device, dtype
        self._made: dict[tuple[int, ...], tuple[Sequence[Any], DeviceWeight]] = {}

    def __call__(self, matrices: Sequence[Any]) -> DeviceWeight:
        key = tuple(map(id, matrices))
        if key not in self._made:
            self._made[key] = matrices, pack(matrices, *self._to)
        return self._made[key][1]


def kv_cache_of(
    config: ModelConfig, kv: str = "float32", device: str = "cpu", kept: KVSpec | None = None
) -> KVCache:
    kept = kept or config.kv_layers[0]
    return KVCache(
        config.num_layers,
        NUM_BLOCKS,
        BLOCK_SIZE,
        kept.num_kv_heads,
        kept.key_dim,
        codecs_of(kv, kept.kind == "latent"),
        torch.device(device),
        value_dim=kept.value_dim,
    )


def fused_program(
    config: ModelConfig,
    model: Any,
    kernels_of: Callable[..., StepOps] = lambda *arguments: PlainOps(),
    dtype: torch.dtype = torch.float32,
    kv: str = "float32",
    device: str = "cpu",
    max_tokens: int = 64,
    depths: Sequence[int] = (),
    change: Callable[[Sequence[FusedOp]], Sequence[FusedOp]] = lambda ops: ops,
) -> FusedProgram:
    """``kernels_of`` makes the ops of most of the arguments of a program."""
    plan, _ = plan_step(model)
    ops, weight_of = change(plan.ops), PackedOnce(device, dtype)
    most = kv_cache_of(config, kv, device), dtype, torch.device(device), max_tokens, MAX_ROWS
    kernels = kernels_of(ops, weight_of, *most)
    kept = plan.streams(depths).values()
    return FusedProgram(ops, kernels, weight_of, *most, max_positions=MAX_LEN, kept=kept)


@dataclass(frozen=True)
class Step:
    """A batch, and the same as arrays of T tokens and S sequences."""

    batch: Batch
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray

    def padded(self, num_tokens: int, num_seqs: int, device: str = "cpu") -> StepTensors:
        """With rows that only fill up a shape."""
        tokens, seqs = num_tokens - len(self.token_ids), num_seqs - len(self.seq_lens)

        def tensor(array: np.ndarray, more: int, value: int) -> Tensor:
            pad = [(0, more)] + [(0, 0)] * (array.ndim - 1)
            filled = np.pad(array, pad, constant_values=value)
            return torch.from_numpy(filled.astype(np.int32)).to(device)

        tables = StepTables(
            tensor(self.block_tables, seqs, 0),
            tensor(self.query_start, seqs, int(self.query_start[-1])),
            tensor(self.seq_lens, seqs, 0),
        )
        max_query = int(np.diff(self.query_start).max())
        return StepTensors(
            tensor(self.token_ids, tokens, 0),
            tensor(self.positions, tokens, 0),
            [tensor(self.slots, tokens, -1)],
            [tables],
            1 if max_query == 1 else 1 << (max_query - 1).bit_length(),
        )


def step_of(*items: tuple[int, int, int]) -> Step:
    """A step of sequences by (number, tokens that it has, tokens to compute).

    Tokens of a sequence are the same whatever step they are in, and so are its blocks.
    """
    requests = [_sequence(number) for number, _, _ in items]
    tables = np.array([request.block_ids for request in requests])
    token_ids, positions, slots = [], [], []
    for (_, start, count), request, table in zip(items, requests, tables, strict=True):
        places = np.arange(start, start + count)
        token_ids.append(np.array(request.token_ids)[places])
        positions.append(places)
        slots.append(table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE)
    scheduled = (
        ScheduledRequest(request, start, count, num_sampled=0)
        for (_, start, count), request in zip(items, requests, strict=True)
    )
    return Step(
        Batch(0, tuple(scheduled)),
        *(np.concatenate(each) for each in (token_ids, positions, slots)),
        query_start=np.cumsum([0, *(count for _, _, count in items)]),
        seq_lens=np.array([start + count for _, start, count in items]),
        block_tables=tables,
    )


def _sequence(number: int) -> Request:
    """A request whose tokens are all known, and whose blocks are there; none is block 0."""
    tokens = np.random.default_rng(number).integers(0, VOCAB, MAX_LEN).tolist()
    blocks = np.random.default_rng(7).permutation(np.arange(1, NUM_BLOCKS))
    each = -(-MAX_LEN // BLOCK_SIZE)
    request = Request(str(number), tokens, SamplingParams(), 0.0)
    request.block_ids = blocks[number * each :][:each].tolist()
    return request


def eager_twin(
    config: ModelConfig, model: Any, dtype: str = "float32", kv: str = "float32", **changes: Any
) -> EagerForward:
    """The same model op by op, with these ops changed; its KV cache is its own."""
    ops, cpu = replace(create_ops(dtype), **changes), torch.device("cpu")
    depths = range(config.num_layers + 1)
    limits = RankLimits(NUM_BLOCKS, MAX_ROWS, MAX_LEN, MAX_LEN)
    return EagerForward(with_tensors(model), kv_cache_of(config, kv), ops, cpu, limits, depths)


def eager_logits(twin: EagerForward, step: Step) -> Tensor:
    """Of all rows of a step."""
    twin.submit(step.batch)
    return twin.logits(range(len(step.token_ids)))


def deeper(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The config of a tiny model with its layers repeated."""
    windows = (config.layer_windows * num_layers)[:num_layers]
    changes: dict[str, Any] = {"num_layers": num_layers, "layer_windows": windows}
    if config.experts is not None:
        layers = (config.experts.layers * num_layers)[:num_layers]
        changes["experts"] = replace(config.experts, layers=layers)
    return replace(config, **changes)
