"""csrc/octavo.h in ctypes: its constants, its structs field by field, its functions.

Pointers to arrays are plain addresses (``tensor.data_ptr()``), as making typed pointers costs more
than the call; pointers to structs are typed. The caller keeps alive what the addresses point to.
tests/kernels/cpu/test_abi.py compares all of this with the header as a C compiler reads it.
"""

from __future__ import annotations

import ctypes
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

OCT_ABI_VERSION = 13

OCT_OK = 0
OCT_ERR_ARGUMENT = -1
OCT_ERR_MEMORY = -2
OCT_ERR_ABORTED = -3

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


class Weight(Structure):
    _fields_ = (
        ("format", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("group", c_int32),
        ("data", c_void_p),
        ("columns", c_void_p),
    )


class Segment(Structure):
    _fields_ = (
        ("weight", Weight),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("ldy", c_int64),
    )


class Head(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("best_logit", c_void_p),
        ("best_id", c_void_p),
        ("softcap", c_float),
    )


class LinearArgs(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("k", c_int32),
        ("in", c_void_p),  # a keyword of Python: give it by position, or with setattr
        ("ldin", c_int64),
        ("row_index", c_void_p),
        ("add", c_void_p),
        ("add_norm", c_void_p),
        ("x_out", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("add_eps", c_float),
        ("remainder_above", c_float),
        ("epilogue", c_int32),
        ("num_segments", c_int32),
        ("segments", Segment * OCT_MAX_SEGMENTS),
        ("residual", c_void_p),
        ("head", POINTER(Head)),
        ("scale", c_float),
    )


class SinkWindow(Structure):
    _fields_ = (
        ("sinks", c_int32),
        ("window", c_int32),
        ("stride", c_int32),
        ("turn", c_int32),
        ("left_out", c_int64),
    )


class Sequences(Structure):
    _fields_ = (
        ("num_seqs", c_int32),
        ("num_tokens", c_int32),
        ("q_start", c_void_p),
        ("kv_len", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int32),
        ("block_size", c_int32),
        ("parents", c_void_p),
        ("group_stride", c_int64),
        ("share_prefixes", c_int32),
        ("sink_windows", c_void_p),
        ("state_source", c_void_p),
        ("state_target", c_void_p),
    )


class AttentionArgs(Structure):
    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("head_size", c_int32),
        ("kv_format", c_int32),
        ("window", c_int32),
        ("rotary_dim", c_int32),
        ("rope_interleaved", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("qk_norm_eps", c_float),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("cos_sin", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("ldq", c_int64),
        ("ldk", c_int64),
        ("ldv", c_int64),
        ("kv", c_void_p),
        ("kv_block_bytes", c_int64),
        ("out", c_void_p),
        ("num_blocks", c_int32),
        ("group", c_int32),
    )


class KVMemory(Structure):
    _fields_ = (
        ("kv_format", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_layers", c_int32),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("layer_bytes", c_int64),
        ("block_bytes", c_int64),
        ("kv", c_void_p),
    )


class LatentArgs(Structure):
    _fields_ = (
        ("num_heads", c_int32),
        ("rank", c_int32),
        ("rope_dim", c_int32),
        ("nope_dim", c_int32),
        ("value_dim", c_int32),
        ("kv_format", c_int32),
        ("rope_interleaved", c_int32),
        ("weight_format", c_int32),
        ("scale", c_float),
        ("eps", c_float),
        ("norm", c_void_p),
        ("cos_sin", c_void_p),
        ("key_up", c_void_p),
        ("value_up", c_void_p),
        ("q", c_void_p),
        ("ckv", c_void_p),
        ("ldq", c_int64),
        ("ldckv", c_int64),
        ("kv", c_void_p),
        ("kv_block_bytes", c_int64),
        ("out", c_void_p),
        ("num_blocks", c_int32),
        ("group", c_int32),
    )


class Sample(Structure):
    _fields_ = (
        ("temperature", c_float),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("top_p", c_double),
        ("min_p", c_double),
        ("typical_p", c_double),
        ("top_k", c_int32),
        ("num_prompt_ids", c_int32),
        ("num_output_ids", c_int32),
        ("sample_index", c_uint32),
        ("prompt_ids", c_void_p),
        ("output_ids", c_void_p),
        ("seed", c_uint64),
        ("position", c_uint64),
        ("mask", c_void_p),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("num_biases", c_int64),
    )


class Logprobs(Structure):
    _fields_ = (
        ("num_top", c_int32),
        ("rank", c_int32),
        ("logprob", c_double),
        ("top_ids", c_void_p),
        ("top", c_void_p),
    )


class EmbedArgs(Structure):
    _fields_ = (
        ("table", Weight),
        ("scale", c_float),
        ("out", c_void_p),
        ("positions", Weight),
        ("position_offset", c_int32),
    )


class RowsArgs(Structure):
    _fields_ = (
        ("kind", c_int32),
        ("width", c_int32),
        ("per_token", c_int32),
        ("eps", c_float),
        ("a", c_void_p),
        ("b", c_void_p),
        ("out", c_void_p),
        ("bias", c_void_p),
        ("factor", c_float),
    )


class States(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("slot_floats", c_int64),
        ("num_slots", c_int32),
    )


class ConvArgs(Structure):
    _fields_ = (
        ("channels", c_int32),
        ("kernel", c_int32),
        ("gated", c_int32),
        ("x", c_void_p),
        ("ldx", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("states", States),
    )


class ScanArgs(Structure):
    _fields_ = (
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("groups", c_int32),
        ("state_dim", c_int32),
        ("step_min", c_float),
        ("step_max", c_float),
        ("step_scale", c_float),
        ("x", c_void_p),
        ("steps", c_void_p),
        ("ldx", c_int64),
        ("ldsteps", c_int64),
        ("decay", c_void_p),
        ("skip", c_void_p),
        ("step_bias", c_void_p),
        ("out", c_void_p),
        ("states", States),
    )


class DeltaArgs(Structure):
    _fields_ = (
        ("key_heads", c_int32),
        ("key_dim", c_int32),
        ("value_heads", c_int32),
        ("value_dim", c_int32),
        ("x", c_void_p),
        ("gates", c_void_p),
        ("ldx", c_int64),
        ("ldgates", c_int64),
        ("decay", c_void_p),
        ("step_bias", c_void_p),
        ("out", c_void_p),
        ("states", States),
    )


class GatedNormArgs(Structure):
    _fields_ = (
        ("width", c_int32),
        ("group", c_int32),
        ("gate_first", c_int32),
        ("eps", c_float),
        ("gate_scale", c_float),
        ("x", c_void_p),
        ("gate", c_void_p),
        ("ldgate", c_int64),
        ("weight", c_void_p),
        ("out", c_void_p),
    )


class CheckArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("width", c_int32),
    )


class Routing(Structure):
    _fields_ = (
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("normalize", c_int32),
        ("num_groups", c_int32),
        ("top_groups", c_int32),
        ("group_top", c_int32),
        ("scale", c_float),
        ("correction", c_void_p),
    )


class Expert(Structure):
    _fields_ = (
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("gate_bias", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
    )


class ExpertsArgs(Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("inner", c_int32),
        ("epilogue", c_int32),
        ("eps", c_float),
        ("remainder_above", c_float),
        ("inner_remainder_above", c_float),
        ("routing", Routing),
        ("experts", POINTER(Expert)),
        ("in", c_void_p),  # as of LinearArgs
        ("norm", c_void_p),
        ("logits", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("loads", c_void_p),
    )


class Node(Structure):
    _fields_ = (
        ("op", c_int32),
        ("reserved", c_int32),
        ("args", c_void_p),
    )


class Program(Structure):
    _fields_ = (
        ("nodes", POINTER(Node)),
        ("num_nodes", c_int32),
        ("num_head_nodes", c_int32),
        ("vocab", c_int32),
        ("max_tokens", c_int32),
    )


class Batch(Structure):
    _fields_ = (
        ("seqs", Sequences),
        ("token_ids", c_void_p),
        ("num_multi_steps", c_int32),
        ("num_out", c_int32),
        ("head_only", c_int32),
        ("out_rows", c_void_p),
        ("logits", c_void_p),
        ("samples", POINTER(Sample)),
        ("logprobs", c_void_p),
        ("probabilities", c_void_p),
        ("tokens", c_void_p),
        ("status", c_void_p),
        ("row_finite", c_void_p),
    )


# In the order of their declaration.
STRUCTS: dict[str, type[Structure]] = {
    "oct_weight": Weight,
    "oct_segment": Segment,
    "oct_head": Head,
    "oct_linear_args": LinearArgs,
    "oct_sink_window": SinkWindow,
    "oct_sequences": Sequences,
    "oct_attention_args": AttentionArgs,
    "oct_kv_memory": KVMemory,
    "oct_latent_args": LatentArgs,
    "oct_sample": Sample,
    "oct_logprobs": Logprobs,
    "oct_embed_args": EmbedArgs,
    "oct_rows_args": RowsArgs,
    "oct_states": States,
    "oct_conv_args": ConvArgs,
    "oct_scan_args": ScanArgs,
    "oct_delta_args": DeltaArgs,
    "oct_gated_norm_args": GatedNormArgs,
    "oct_check_args": CheckArgs,
    "oct_routing": Routing,
    "oct_expert": Expert,
    "oct_experts_args": ExpertsArgs,
    "oct_node": Node,
    "oct_program": Program,
    "oct_batch": Batch,
}

_pool = c_void_p
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
        (POINTER(KVMemory), c_void_p, c_int32, c_void_p, c_int32, c_int32),
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
