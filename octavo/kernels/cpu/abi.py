"""csrc/octavo.h in ctypes: its constants, its structs field by field, its functions.

Pointers to arrays are plain addresses (``tensor.data_ptr()``), as making typed pointers costs more
than the call; pointers to structs are typed. The caller keeps alive what the addresses point to.
tests/kernels/cpu/test_abi.py compares all of this with the header as a C compiler reads it.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

OCT_ABI_VERSION = 20

OCT_OK = 0
OCT_ERR_ARGUMENT = -1
OCT_ERR_MEMORY = -2
OCT_ERR_ABORTED = -3
OCT_ERR_PEER = -4

# Packed weight formats.
OCT_W2S = 0
OCT_W2A = 1
OCT_W3S = 2
OCT_W3A = 3
OCT_W4S = 4
OCT_W4A = 5
OCT_W8S = 6
OCT_W8A = 7
OCT_W5S = 8
OCT_W5A = 9
OCT_W4N = 10
OCT_W4F = 11
OCT_K2A = 12
OCT_K3S = 13
OCT_K4A = 14
OCT_K5A = 15
OCT_K6S = 16
OCT_K4N = 17
OCT_BF16 = 18
OCT_F16 = 19
OCT_F32 = 20
OCT_NF4 = 21
OCT_FP4 = 22
OCT_E4M3 = 23
OCT_STORED = 64

# Epilogues of a linear.
OCT_EPI_NONE = 0
OCT_EPI_RESIDUAL = 1
OCT_EPI_SILU_MUL = 2
OCT_EPI_GELU_TANH_MUL = 3
OCT_EPI_GELU_ERF_MUL = 4
OCT_EPI_HEAD = 5
OCT_EPI_CLAMPED_SWIGLU = 6
OCT_EPI_SILU = 7
OCT_EPI_GELU_TANH = 8
OCT_EPI_GELU_ERF = 9
OCT_EPI_RELU = 10

OCT_MAX_SEGMENTS = 4

# Formats of the KV cache.
OCT_KV_F32 = 0
OCT_KV_BF16 = 1
OCT_KV_INT8 = 2
OCT_KV_FP8 = 3
OCT_KV_INT4 = 4
OCT_KV_K8V4 = 5

# What became of a token.
OCT_TOKEN_OK = 0
OCT_TOKEN_BAD_LOGITS = 1
OCT_TOKEN_OVERFLOW = 2
OCT_TOKEN_NONE = 3
OCT_TOKEN_NO_CHOICE = 4

# Element-wise ops.
OCT_ROWS_NORM = 0
OCT_ROWS_ADD = 1
OCT_ROWS_SILU_MUL = 2
OCT_ROWS_GELU_TANH_MUL = 3
OCT_ROWS_GELU_ERF_MUL = 4
OCT_ROWS_LAYERNORM = 5
OCT_ROWS_SCALE = 6
OCT_ROWS_SILU = 7
OCT_ROWS_GELU_TANH = 8
OCT_ROWS_GELU_ERF = 9
OCT_ROWS_RELU = 10
OCT_ROWS_SIGMOID_MUL = 11

# Nodes of a program.
OCT_OP_EMBED = 0
OCT_OP_LINEAR = 1
OCT_OP_ATTENTION = 2
OCT_OP_ROWS = 3
OCT_OP_CHECK = 4
OCT_OP_HEAD = 5
OCT_OP_EXPERTS = 6
OCT_OP_LATENT = 7
OCT_OP_CONV = 20
OCT_OP_SCAN = 21
OCT_OP_DELTA = 22
OCT_OP_GATED_NORM = 23

# What a router's logits become.
OCT_SCORE_SOFTMAX = 0
OCT_SCORE_SIGMOID = 1


def _fields(*declarations: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return the fields of a struct, declared as in C: a type, and the names that have it."""
    return [(name, kind) for kind, names in declarations for name in names.split()]


class Weight(Structure):
    _fields_ = _fields(
        (c_int32, "format n k group"),
        (c_void_p, "data columns"),
    )


class Segment(Structure):
    _fields_ = _fields(
        (Weight, "weight"),
        (c_void_p, "bias y"),
        (c_int64, "ldy"),
    )


class Head(Structure):
    _fields_ = _fields(
        (c_void_p, "logits best_logit best_id"),
        (c_float, "softcap"),
        (c_int32, "first_id"),
    )


class LinearArgs(Structure):
    _fields_ = _fields(
        (c_int32, "rows k"),
        (c_void_p, "in"),  # a keyword of Python: give it by position, or with setattr
        (c_int64, "ldin"),
        (c_void_p, "row_index add add_norm x_out norm"),
        (c_float, "eps add_eps remainder_above"),
        (c_int32, "epilogue num_segments"),
        (Segment * OCT_MAX_SEGMENTS, "segments"),
        (c_void_p, "residual"),
        (POINTER(Head), "head"),
        (c_float, "scale"),
    )


class SinkWindow(Structure):
    _fields_ = _fields(
        (c_int32, "sinks window stride turn"),
        (c_int64, "left_out"),
    )


class Sequences(Structure):
    _fields_ = _fields(
        (c_int32, "num_seqs num_tokens"),
        (c_void_p, "q_start kv_len block_table"),
        (c_int32, "table_stride block_size"),
        (c_void_p, "parents"),
        (c_int64, "group_stride"),
        (c_int32, "share_prefixes"),
        (c_void_p, "sink_windows state_source state_target"),
    )


class AttentionArgs(Structure):
    _fields_ = _fields(
        (c_int32, "num_heads num_kv_heads head_dim head_size kv_format window rotary_dim"),
        (c_int32, "rope_interleaved"),
        (c_float, "scale softcap qk_norm_eps"),
        (c_void_p, "q_norm k_norm sinks cos_sin q k v"),
        (c_int64, "ldq ldk ldv"),
        (c_void_p, "kv"),
        (c_int64, "kv_block_bytes"),
        (c_void_p, "out"),
        (c_int64, "ldo"),
        (c_int32, "num_blocks group bidirectional"),
    )


class KvMemory(Structure):
    _fields_ = _fields(
        (c_int32, "kv_format num_kv_heads head_dim num_layers num_blocks block_size"),
        (c_int64, "layer_bytes block_bytes"),
        (c_void_p, "kv"),
    )


class LatentArgs(Structure):
    _fields_ = _fields(
        (c_int32, "num_heads rank rope_dim nope_dim value_dim kv_format rope_interleaved"),
        (c_int32, "weight_format"),
        (c_float, "scale eps"),
        (c_void_p, "norm cos_sin key_up value_up q ckv"),
        (c_int64, "ldq ldckv"),
        (c_void_p, "kv"),
        (c_int64, "kv_block_bytes"),
        (c_void_p, "out"),
        (c_int64, "ldo"),
        (c_int32, "num_blocks group"),
    )


class Sample(Structure):
    _fields_ = _fields(
        (c_float, "temperature repetition_penalty frequency_penalty presence_penalty"),
        (c_double, "top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold"),
        (c_int32, "top_k num_prompt_ids num_output_ids"),
        (c_uint32, "sample_index"),
        (c_void_p, "prompt_ids output_ids"),
        (c_uint64, "seed position"),
        (c_void_p, "mask"),
        (c_int64, "mask_turn"),
        (c_void_p, "bias_ids biases"),
        (c_int64, "num_biases"),
    )


class Logprobs(Structure):
    _fields_ = _fields(
        (c_int32, "num_top rank"),
        (c_double, "logprob"),
        (c_void_p, "top_ids top"),
    )


class EmbedArgs(Structure):
    _fields_ = _fields(
        (Weight, "table"),
        (c_float, "scale"),
        (c_void_p, "out"),
        (Weight, "positions"),
        (c_int32, "position_offset num_types"),
        (c_void_p, "types"),
    )


class RowsArgs(Structure):
    _fields_ = _fields(
        (c_int32, "kind width per_token"),
        (c_float, "eps"),
        (c_void_p, "a b out bias"),
        (c_float, "factor"),
    )


class States(Structure):
    _fields_ = _fields(
        (c_void_p, "data"),
        (c_int64, "slot_floats"),
        (c_int32, "num_slots"),
    )


class ConvArgs(Structure):
    _fields_ = _fields(
        (c_int32, "channels first count kernel gated"),
        (c_void_p, "x"),
        (c_int64, "ldx"),
        (c_void_p, "weight bias out"),
        (States, "states"),
    )


class ScanArgs(Structure):
    _fields_ = _fields(
        (c_int32, "heads first count head_dim groups state_dim"),
        (c_float, "step_min step_max step_scale"),
        (c_void_p, "x steps"),
        (c_int64, "ldx ldsteps"),
        (c_void_p, "decay skip step_bias out"),
        (States, "states"),
    )


class DeltaArgs(Structure):
    _fields_ = _fields(
        (c_int32, "key_heads key_dim value_heads first count value_dim"),
        (c_void_p, "x gates"),
        (c_int64, "ldx ldgates"),
        (c_void_p, "decay step_bias out"),
        (States, "states"),
    )


class GatedNormArgs(Structure):
    _fields_ = _fields(
        (c_int32, "width first count group gate_first"),
        (c_float, "eps gate_scale"),
        (c_void_p, "x gate"),
        (c_int64, "ldgate"),
        (c_void_p, "weight out"),
    )


class CheckArgs(Structure):
    _fields_ = _fields(
        (c_void_p, "x"),
        (c_int32, "width"),
    )


class Routing(Structure):
    _fields_ = _fields(
        (c_int32, "num_experts top_k scoring normalize num_groups top_groups group_top"),
        (c_float, "scale"),
        (c_void_p, "correction"),
    )


class Expert(Structure):
    _fields_ = _fields(
        (Weight, "gate up down"),
        (c_void_p, "gate_bias up_bias down_bias"),
    )


class ExpertPlaces(Structure):
    _fields_ = _fields(
        (c_int32, "rank num_ranks"),
        (c_void_p, "begin ranks rows"),
    )


class ExpertsArgs(Structure):
    _fields_ = _fields(
        (c_int32, "hidden inner first_hidden num_hidden first_inner epilogue"),
        (c_float, "eps remainder_above inner_remainder_above"),
        (Routing, "routing"),
        (POINTER(Expert), "experts"),
        # "in": as of LinearArgs
        (c_void_p, "in norm logits residual out loads inner_rows output_rows"),
        (ExpertPlaces, "places"),
    )


class LoraSegment(Structure):
    _fields_ = _fields(
        (c_void_p, "b"),
        (c_int32, "rank first"),
    )


class LoraSite(Structure):
    _fields_ = _fields(
        (c_void_p, "a"),
        (c_int64, "a_bytes"),
        (c_int32, "rows"),
        (c_void_p, "scales"),
        (LoraSegment * OCT_MAX_SEGMENTS, "segments"),
    )


class Lora(Structure):
    _fields_ = _fields(
        (c_int32, "format num_sites"),
        (c_void_p, "sites"),
    )


class Node(Structure):
    _fields_ = _fields(
        (c_int32, "op meets own_rows lora_site"),
        (c_void_p, "args"),
    )


class SharedHead(Structure):
    _fields_ = _fields((c_void_p, "logits best_logits best_ids drawn"))


class Program(Structure):
    _fields_ = _fields(
        (POINTER(Node), "nodes"),
        (c_int32, "num_nodes num_head_nodes vocab max_tokens"),
        (c_void_p, "group"),
        (SharedHead, "shared_head"),
    )


class Batch(Structure):
    _fields_ = _fields(
        (Sequences, "seqs"),
        (c_void_p, "token_ids"),
        (c_int32, "num_multi_steps num_out head_only"),
        (c_void_p, "out_rows logits"),
        (POINTER(Sample), "samples"),
        (c_void_p, "logprobs probabilities tokens status row_finite masks_made needs_logits"),
        (c_int32, "first_own_seq num_own_seqs"),
        (c_void_p, "lora_of_seq loras"),
        (c_int32, "num_loras"),
        (c_void_p, "token_types"),
    )


def _name_in_c(struct: type[Structure]) -> str:
    """Return what the header calls a struct: ``oct_linear_args`` for LinearArgs."""
    return "oct_" + re.sub("(?<=[a-z])(?=[A-Z])", "_", struct.__name__).lower()


# In the order of their declaration.
STRUCTS: dict[str, type[Structure]] = {
    _name_in_c(struct): struct
    for struct in list(vars().values())
    if isinstance(struct, type) and issubclass(struct, Structure) and struct is not Structure
}

_pool = c_void_p
_group = c_void_p
_counter = c_void_p
_int64s = POINTER(c_int64)
_int32s = POINTER(c_int32)  # results of a few numbers, as in byref(c_int32())

# Result, arguments. A library.Pool passes as a pool, byref(struct) as a pointer to a struct.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "oct_abi_version": (c_int32, ()),
    "oct_isa": (c_char_p, ()),
    "oct_last_error": (c_char_p, ()),
    "oct_struct_sizes": (c_int32, (POINTER(_int32s),)),
    "oct_report_bus_errors": (None, ()),
    "oct_pool_new": (_pool, (c_int32, c_int32)),
    "oct_pool_free": (None, (_pool,)),
    "oct_pool_size": (c_int32, (_pool,)),
    "oct_pool_barrier_ns": (c_double, (_pool, c_int32)),
    "oct_abort": (None, (_pool,)),
    "oct_counter_new": (_counter, ()),
    "oct_counter_free": (None, (_counter,)),
    "oct_counter_add": (None, (_counter, c_uint32)),
    "oct_counter_reset": (None, (_counter,)),
    "oct_group_bytes": (c_int64, (c_int32,)),
    "oct_group_open": (_group, (c_void_p, c_int32, c_int32, c_int32)),
    "oct_group_close": (None, (_group,)),
    "oct_group_send": (c_int32, (_group, c_void_p, c_int32)),
    "oct_group_receive": (c_int32, (_group, c_void_p, c_int32)),
    "oct_group_abort": (None, (_group,)),
    "oct_group_meet": (c_int32, (_group, c_int32)),
    "oct_group_meet_ns": (c_double, (_group, c_int32)),
    "oct_group_barrier_ns": (c_double, (_group, _pool, c_int32)),
    "oct_group_counts": (None, (_group, _int64s, _int64s, _int64s)),
    "oct_packed_bytes": (c_int64, (c_int32, c_int32, c_int32, c_int32)),
    "oct_pack": (c_int32, (_pool, POINTER(Weight), c_void_p, c_void_p, c_void_p, c_void_p)),
    "oct_gguf_format": (c_int32, (c_int32, _int32s, _int32s)),
    "oct_pack_gguf": (c_int32, (_pool, POINTER(Weight), c_int32, c_void_p, c_void_p)),
    "oct_unpack": (c_int32, (_pool, POINTER(Weight), c_void_p)),
    "oct_linear": (c_int32, (_pool, POINTER(LinearArgs))),
    "oct_kv_chunk_bytes": (c_int64, (c_int32, c_int32)),
    "oct_attention": (c_int32, (_pool, POINTER(AttentionArgs), POINTER(Sequences))),
    "oct_shared_keys": (c_int64, (POINTER(Sequences), c_int32)),
    "oct_kv_read": (
        c_int32,
        (POINTER(AttentionArgs), POINTER(Sequences), c_int32, c_void_p, c_void_p),
    ),
    "oct_kv_move": (
        c_int32,
        (POINTER(KvMemory), c_void_p, c_int32, c_void_p, c_int32, c_int32),
    ),
    "oct_latent_row_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "oct_latent": (c_int32, (_pool, POINTER(LatentArgs), POINTER(Sequences))),
    "oct_latent_read": (
        c_int32,
        (POINTER(LatentArgs), POINTER(Sequences), c_int32, c_void_p),
    ),
    "oct_sample_rows": (
        c_int32,
        (_pool, c_int32, c_int32, c_void_p, POINTER(Sample), c_void_p, c_void_p, c_void_p),
    ),
    "oct_logprob_rows": (
        c_int32,
        (_pool, c_int32, c_int32, c_void_p, c_void_p, c_void_p),
    ),
    "oct_check_experts": (c_int32, (POINTER(ExpertsArgs),)),
    "oct_experts_bytes": (c_int64, (c_int32, c_int32, c_int32, c_int32)),
    "oct_experts": (c_int32, (_pool, POINTER(ExpertsArgs), c_int32)),
    "oct_step": (c_int32, (_pool, POINTER(Program), POINTER(Batch))),
    "oct_needed_logits": (None, (POINTER(Batch), c_void_p)),
    "oct_probe_products": (c_int64, (_pool, c_int32, c_int64)),
    "oct_probe_read": (c_int32, (_pool, c_void_p, c_int64)),
}


def bind(lib: ctypes.CDLL) -> list[str]:
    """Declare the types of all functions of a library to ctypes. Returns the names of missing
    functions."""
    missing = []
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            missing.append(name)
            continue
        function.restype = result
        function.argtypes = arguments
    return missing


def struct_sizes(lib: ctypes.CDLL) -> dict[str, int]:
    """Bytes of each struct as the library's compiler laid it out, by name."""
    sizes = _int32s()
    count = lib.oct_struct_sizes(ctypes.byref(sizes))
    return dict(zip(STRUCTS, sizes[:count], strict=False))
