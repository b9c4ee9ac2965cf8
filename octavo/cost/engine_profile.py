"""Memory use and defaults of an engine: what it reserves beside the weights.

``profile`` has engines by name. A constant that was measured belongs to the version it was measured
with:

    vllm        https://github.com/vllm-project/vllm: defaults of ``engine/arg_utils.py``; memory as
                llm-d-planner measured it on H100 ("empirical vLLM memory results", up to 0.11, and
                "Capacity Planner Accuracy Report", 0.15 to 0.19), and as issue 59 of LLMServingSim
                has it of 0.19 on an RTX 4090
    llama.cpp   https://github.com/ggml-org/llama.cpp: ``llama-context.cpp``, and logs of it
    octavo      this package: ``config.py``, ``runtime/rank.py``, ``runtime/memory_ledger.py``,
                ``kernels/cpu/program.py``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import ceil

from octavo.base.errors import ConfigError
from octavo.cost.hardware import Device
from octavo.cost.mlps import ExpertMlp
from octavo.cost.model_spec import LayerSpec, ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.prediction import Prediction
from octavo.kernels.cpu.layout import experts_bytes
from octavo.runtime.memory_ledger import CONTEXT_BYTES, GRAPH_BYTES, logits_bytes
from octavo.runtime.step_shapes import MAX_DECODES, MOST_TOKENS, decode_shapes, prompt_shapes

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of what an engine holds at once; None is the engine's default for a device.

    Args:
        max_model_len: tokens of a sequence; the model's, by default.
        utilization: share of a device's memory that the engine may use.
        kv_cache_memory: bytes of the KV pool, in place of what is left.
        reserve_bytes: that are kept free for others.

    Raises:
        ConfigError: a value that cannot be.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    utilization: float | None = None
    kv_cache_memory: int | None = None
    reserve_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization must be above 0 and up to 1, not {self.utilization}")
        if min(self.reserve_bytes or 0, self.kv_cache_memory or 0) < 0:
            raise ConfigError("bytes of memory cannot be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Limits of which none is open; ``kv_cache_memory`` stays None where what is left is used."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    utilization: float
    kv_cache_memory: int | None
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for a KV pool.

    Args:
        num_bytes: that are left on a device. block_bytes: of one block in all layers of a device.
        num_ranks: with as much each on the same machine, of which all of them have a pool.
    """

    device: Device
    num_bytes: float
    block_bytes: float
    kv_dtype: str
    num_ranks: int = 1


_NOTHING = Prediction.sure(0.0)

Activations = Callable[[ModelSpec, Parallel, Settled], Prediction]


def number_that_fits(num_bytes: float, each_bytes: float) -> int:
    """Number of blocks or sequences that fit; 0 where layers keep nothing of a token."""
    return max(0, int(num_bytes // each_bytes)) if each_bytes else 0


def _all_blocks(room: Room, limits: Settled) -> int:
    """An engine that takes what there is."""
    return number_that_fits(room.num_bytes, room.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """An engine, as far as memory depends on it.

    Args:
        name, version: of the engine; the constants are of this version.
        defaults: limits for a device, all but the length given.
        activations: what a device needs for the largest step.
        non_torch: bytes that no allocator counts: of one device alone, and of one that adds up
            what others have (a stage of a pipeline only sends on).
        graphs: bytes of recorded steps, by those of a device's weights.
        keeps_back: which of ``activations``, ``non_torch`` and ``graphs`` the engine leaves out of
            the KV pool itself; the others must fit into the memory that it does not use.
        keeps_windows_only: whether, on a device, what no window sees any more gives its KV memory
            back.
        kv_types: the types of the cache that it keeps in a way of its own, by its names for them.
        mxfp4_unit: inner values of experts in mxfp4 are padded to a multiple of it.
        embedding_in_host: a GPU has no embedding, but where that is the head.
        has_uneven_heads: GPUs that share a layer may have different numbers of heads.
        runs_on: whether it runs on a device at all.
        num_blocks: of its KV pool, if its size is not given.
        gpu: the same engine where it runs on a GPU, if that is another matter.
    """

    name: str
    version: str
    defaults: Callable[[Device], Limits]
    activations: Activations
    non_torch: tuple[Prediction, Prediction] = (_NOTHING, _NOTHING)
    graphs: Callable[[int], Prediction] = lambda weights_bytes: _NOTHING
    keeps_back: frozenset[str] = frozenset({"activations", "non_torch"})
    keeps_windows_only: Callable[[Device], bool] = lambda device: True
    kv_types: Mapping[str, str] = field(default_factory=dict)
    mxfp4_unit: int = 1
    embedding_in_host: bool = False
    has_uneven_heads: bool = False
    runs_on: Callable[[Device], bool] = lambda device: True
    num_blocks: Callable[[Room, Settled], int] = _all_blocks
    gpu: EngineProfile | None = None

    def on(self, device: Device) -> EngineProfile:
        """The profile as it is on a device."""
        return self.gpu if self.gpu is not None and device.kind == "gpu" else self

    def settle(self, limits: Limits, spec: ModelSpec, device: Device) -> Settled:
        """Limits of which none is open. ConfigError for more tokens than the model has
        positions."""
        defaults = self.defaults(device)
        length = limits.max_model_len or spec.max_position
        if length > spec.max_position:
            raise ConfigError(
                f"max_model_len {length} exceeds the {spec.max_position} positions of "
                f"{spec.name}: lower it"
            )
        reserve = limits.reserve_bytes
        return Settled(
            max_num_seqs=limits.max_num_seqs or defaults.max_num_seqs or 1,
            max_num_batched_tokens=(
                limits.max_num_batched_tokens or defaults.max_num_batched_tokens or length
            ),
            max_model_len=length,
            block_size=limits.block_size or defaults.block_size or 1,
            utilization=limits.utilization or defaults.utilization or 1.0,
            kv_cache_memory=limits.kv_cache_memory,
            reserve_bytes=(defaults.reserve_bytes or 0) if reserve is None else reserve,
        )

    def kv_dtype(self, name: str | None) -> str | None:
        """The name that ``precision_of`` has for a type of the KV cache as this engine keeps it;
        None is the engine's default."""
        return self.kv_types.get(name or "auto", name)


def profile(name: str) -> EngineProfile:
    """An engine by its name, with a version where one is known: ``vllm``, ``vllm-0.11``.

    ConfigError with the names that there are for others.
    """
    low = name.lower()
    if low in _PROFILES:
        return _PROFILES[low]
    near = get_close_matches(low, _PROFILES, 2) or profiles()
    raise ConfigError(f"profile {name!r:.80} is not known: do you mean {' or '.join(near)}?")


def profiles() -> list[str]:
    """All names."""
    return list(_PROFILES)


# -- vLLM -----------------------------------------------------------------------------------------

_BIG_MEMORY = 70 * GIB  # from here on, defaults are those of large GPUs, A100 excepted
# Of the sampler that sorts: logits as float32, a sorted copy, indices, probabilities, masks. Fitted
# to seven H100 runs of 1,024 sequences within 2 %; two others are 6 % below and 3 % above it.
_SORT_BYTES = 38.7
# Of the one that does not, from 0.17 on: logits in 16 bits and as float32, probabilities, and the
# noise that they are divided by.
_NO_SORT_BYTES = 2 + 4 + 4 + 4


def _vllm_defaults(device: Device) -> Limits:
    is_big = device.memory_bytes >= _BIG_MEMORY and not device.name.startswith("A100")
    return Limits(
        max_num_seqs=1024 if is_big else 256,
        max_num_batched_tokens=8192 if is_big else 2048,
        block_size=16,
        utilization=0.9,
    )


def _vllm_activations(spec: ModelSpec, parallel: Parallel, limits: Settled) -> Prediction:
    """The larger of the activations of sampler and layers, since one follows the other."""
    sampler = Prediction.around(
        _SORT_BYTES * limits.max_num_seqs * spec.vocab_size, 0.06, "published"
    )
    return max(sampler, _layers_peak(spec, parallel, limits), key=lambda each: each.value)


def _vllm_activations_unsorted(spec: ModelSpec, parallel: Parallel, limits: Settled) -> Prediction:
    """The sum of the sampler's activations and the layers' where these are not small beside it:
    hidden and residual states of a step, and the workspace of experts, which is kept."""
    tokens = limits.max_num_batched_tokens
    workspace = max(_workspace_values(spec, layer, parallel) for layer in set(spec.layers))
    left = 2.0 * tokens * (2 * spec.hidden_size + workspace)
    logits = _NO_SORT_BYTES * limits.max_num_seqs * spec.vocab_size
    # 22 models on H100 are within 7 %, but for Gemma 3 (9 %, with what images take).
    sampler = Prediction.around(logits + left, 0.1, "published")
    return max(sampler, _layers_peak(spec, parallel, limits), key=lambda each: each.value)


def _workspace_values(spec: ModelSpec, layer: LayerSpec, parallel: Parallel) -> float:
    """Bytes for a token between the two products of its experts;
    ``TritonExperts.workspace_shapes``. Experts in mxfp4 have other kernels, which keep nothing."""
    mlp, hidden = layer.mlp, spec.hidden_size
    method = (spec.quantization or {}).get("quant_method")
    if not isinstance(mlp, ExpertMlp) or method == "mxfp4":
        return 0.0
    inner = mlp.inner if parallel.ep > 1 else mlp.inner / parallel.tp
    return mlp.per_token * (max(inner, hidden) + max(2 * inner, hidden)) + hidden


def _layers_peak(spec: ModelSpec, parallel: Parallel, limits: Settled) -> Prediction:
    """Bytes of what needs most for a step's tokens, in 16 bits, the queries, keys and values of a
    layer or its MLP, and four times the hidden size.

    Of Llama 3.1 8B (0.6.4, 20,000 and 29,000 tokens: vLLM #10517) it is 7 % too much, of CodeLlama
    7B (0.19) 2 % too little, of Mistral Small, which sees images, 15 %.
    """
    values = max(
        max(
            sum(mixer.activation_values(parallel.tp) for mixer in layer.mixers),
            layer.mlp.activation_values(spec.hidden_size, parallel.tp) if layer.mlp else 0.0,
        )
        for layer in set(spec.layers)
    )
    num_bytes = 2.0 * limits.max_num_batched_tokens * (values + 4 * spec.hidden_size)
    return Prediction.around(num_bytes, 0.2, "published")


def _vllm_graphs(weights_bytes: int) -> Prediction:
    """Made after the pool, in what utilization leaves free: 0.3 GiB of small models, 1 GiB of one
    of 64 GiB; logs have anything from -0.9 to 1."""
    return Prediction.around(0.3 * GIB + 0.7 / 64 * weights_bytes, 1.0, "published")


def _gibs(value: float, low: float, high: float) -> Prediction:
    return Prediction(value * GIB, low * GIB, high * GIB, "published")


# Up to 0.11 on H100: 0.13 GiB beside the allocator, 0.55 with NCCL.
_VLLM_011 = EngineProfile(
    name="vllm",
    version="0.11",
    defaults=_vllm_defaults,
    activations=_vllm_activations,
    non_torch=(_gibs(0.13, 0.0, 0.3), _gibs(0.55, 0.4, 0.8)),
    graphs=_vllm_graphs,
    mxfp4_unit=256,  # gpt-oss takes what 2,880 values take when they are 3,072
)
# Without a version: what keeps back the most. On an RTX 4090 a sampler that sorts explains all that
# 0.19 keeps back (1.15 GiB), so that nothing is left for the rest; what is more with NCCL is taken
# to be as before. On H100, versions from 0.17 on have 3 to 4 GiB more for keys and values.
_VLLM = replace(_VLLM_011, version="any", non_torch=(_gibs(0.0, 0.0, 0.3), _gibs(0.42, 0.3, 0.8)))
# 53 runs of 34 models on H100: 0.24 to 0.26 GiB beside the allocator (Granite 0.46), 2.06 to 2.17
# with the buffers of all-reduces.
_VLLM_019 = replace(
    _VLLM_011,
    version="0.19",
    activations=_vllm_activations_unsorted,
    non_torch=(_gibs(0.25, 0.07, 0.5), _gibs(2.1, 0.5, 2.3)),
)
# From 0.21 on, graphs are estimated beforehand and kept back; from 0.22 on, 0.92 is the default.
_VLLM_022 = replace(
    _VLLM_019,
    version="0.22",
    defaults=lambda device: replace(_vllm_defaults(device), utilization=0.92),
    keeps_back=frozenset({"activations", "non_torch", "graphs"}),
)


# -- llama.cpp ------------------------------------------------------------------------------------

_MICRO_BATCH = 512  # tokens that it computes at once: --ubatch-size


def _llama_cpp_defaults(device: Device) -> Limits:
    """``reserve_bytes``: what --fit leaves free on a GPU. Of memory that is shared with the
    processor, Metal recommends three quarters at most."""
    return Limits(
        max_num_seqs=4,
        max_num_batched_tokens=_MICRO_BATCH,
        block_size=1,
        utilization=0.75 if device.kind == "unified" else 1.0,
        reserve_bytes=0 if device.kind == "cpu" else GIB,
    )


def _llama_cpp_activations(spec: ModelSpec, parallel: Parallel, limits: Settled) -> Prediction:
    """Logits of a micro-batch and its hidden states, as 32-bit floats, with flash attention: its
    log has 258.5 MiB for Llama 3 8B, which this is."""
    rows = min(_MICRO_BATCH, limits.max_num_batched_tokens)
    return Prediction.around(4.0 * rows * (spec.vocab_size + spec.hidden_size), 0.15, "published")


_LLAMA_CPP = EngineProfile(
    name="llama.cpp",
    version="2026",
    defaults=_llama_cpp_defaults,
    activations=_llama_cpp_activations,
    embedding_in_host=True,
    kv_types={"int8": "q8_0", "int4": "q4_0"},
)


# -- octavo ---------------------------------------------------------------------------------------


def _octavo_defaults(device: Device) -> Limits:
    from octavo.settings import engine

    is_cpu = device.kind != "gpu"
    return Limits(
        max_num_seqs=engine.CPU_MAX_NUM_SEQS if is_cpu else engine.CUDA_MAX_NUM_SEQS,
        max_num_batched_tokens=(
            engine.CPU_MAX_NUM_BATCHED_TOKENS if is_cpu else engine.CUDA_MAX_NUM_BATCHED_TOKENS
        ),
        block_size=16,
        utilization=1.0 if is_cpu else 0.9,
    )


def _octavo_activations(spec: ModelSpec, parallel: Parallel, limits: Settled) -> Prediction:
    """Activations of the native kernels: values of a step in turn, as ``kernels/cpu/program.py``
    places them, and logits of the sampled rows, all 32-bit floats; rows of experts; and matrices
    made of weights (``kernels/cpu/latent_weights.py``), of 16 bits unless these have more."""
    tokens = limits.max_num_batched_tokens
    logits = limits.max_num_seqs * ceil(spec.vocab_size / 16) * 16
    routed = max(
        experts_bytes(spec.hidden_size, layer.mlp.inner, layer.mlp.per_token, tokens)
        if isinstance(layer.mlp, ExpertMlp)
        else 0
        for layer in set(spec.layers)
    )
    made = sum(
        weight.outputs * weight.inputs
        for layer in spec.layers
        for weight in layer.weights(spec.hidden_size)
        if weight.op == "attention.kv_b"
    )
    num_bytes = 4.0 * (tokens * _octavo_values(spec) + logits) + routed + 2.0 * made
    return Prediction.around(num_bytes, 0.1, "published")


_PIECE_ROWS = 4096  # of a product at once, as kernels/cuda/triton_products.py has it
# Of programs that share a product or a sequence, about: hardly a matter of the model.
_SPLITS_BYTES = 24 << 20


def _octavo_gpu_activations(spec: ModelSpec, parallel: Parallel, limits: Settled) -> Prediction:
    """Activations of the fused steps: the same values in 16 bits, and those between two launches of
    an op; of products, gates and ups side by side and a normed input; cosines and sines; logits,
    with the sampler's notes on each. ``runtime/cuda_backend.py`` counts the real ones."""
    inner = max(
        (
            weight.inputs
            for layer in set(spec.layers)
            for weight in layer.weights(spec.hidden_size)
            if weight.op == "mlp.down"
        ),
        default=0,
    )
    tokens = limits.max_num_batched_tokens
    step = 2.0 * tokens * (_octavo_values(spec) + spec.hidden_size)
    step += 2.0 * min(tokens, _PIECE_ROWS) * (spec.hidden_size + 2 * inner)
    rotations = 4.0 * 128 * limits.max_model_len
    logits = 3.0 * logits_bytes(limits.max_num_seqs, spec.vocab_size)
    return Prediction.around(step + rotations + logits + _SPLITS_BYTES, 0.25, "roofline")


def _octavo_graphs(weights_bytes: int) -> Prediction:
    # Weights of 16 bits: two operations a token for each value.
    prompts = prompt_shapes(MAX_DECODES, MOST_TOKENS, ops_per_token=float(weights_bytes))
    num_graphs = len(decode_shapes(MAX_DECODES)) + len(prompts)
    return Prediction.around(num_graphs * GRAPH_BYTES, 1.0, "published")


def _octavo_values(spec: ModelSpec) -> int:
    """Bytes of a token for which a step has places: values of one width take turns."""
    widest = 0
    for layer in set(spec.layers):
        width = spec.hidden_size
        for weight in layer.weights(spec.hidden_size):
            if weight.op == "attention.qkv":
                width += weight.outputs
            elif weight.op in ("attention.output", "mlp.down"):
                width += weight.inputs
        widest = max(widest, width)
    return widest


def _octavo_blocks(room: Room, limits: Settled) -> int:
    """The settings that ``octavo.settings.engine.resolve`` chooses, for the same capacity."""
    from octavo.runtime.capacity import Capacity, cpu_kv_bytes
    from octavo.settings.engine import EngineArgs, resolve

    is_cpu = room.device.kind != "gpu"
    free = int(room.num_bytes) * room.num_ranks
    capacity = Capacity(
        device="cpu" if is_cpu else "cuda",
        dtype="float32" if is_cpu else "bfloat16",
        model_max_len=limits.max_model_len,
        kv_bytes_per_token=int(room.block_bytes) // limits.block_size,
        kv_memory_bytes=cpu_kv_bytes(free) // room.num_ranks if is_cpu else free,
        kv_dtype=room.kv_dtype,
    )
    if capacity.kv_memory_bytes < room.block_bytes:
        return 0
    args = EngineArgs(model="", max_num_seqs=limits.max_num_seqs, block_size=limits.block_size)
    return resolve(args, capacity).cache.num_blocks


def _octavo_runs_on(device: Device) -> bool:
    """Processors, and GPUs that CUDA knows: none of AMD's (MI300X), nor Apple's."""
    return device.kind != "unified" and not re.match(r"MI\d|RX \d|Radeon", device.name)


_OCTAVO = EngineProfile(
    name="octavo",
    version="",
    has_uneven_heads=True,
    runs_on=_octavo_runs_on,
    defaults=_octavo_defaults,
    activations=_octavo_activations,
    keeps_back=frozenset(),  # they are in what utilization, or half of the memory, leaves free
    kv_types={"auto": "bfloat16", "int8": "octavo-int8", "fp8": "octavo-fp8"},
    num_blocks=_octavo_blocks,
)
_OCTAVO = replace(
    _OCTAVO,
    gpu=replace(
        _OCTAVO,
        activations=_octavo_gpu_activations,
        non_torch=(Prediction.around(CONTEXT_BYTES, 0.5, "published"),) * 2,
        graphs=_octavo_graphs,
        keeps_back=frozenset({"activations", "non_torch", "graphs"}),
    ),
)

_PROFILES = {
    "octavo": _OCTAVO,
    "vllm": _VLLM,
    "vllm-0.11": _VLLM_011,
    "vllm-0.19": _VLLM_019,
    "vllm-0.22": _VLLM_022,
    "llama.cpp": _LLAMA_CPP,
}
