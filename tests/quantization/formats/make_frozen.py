"""How the files in ``frozen`` were made: tiny weights, quantized and saved by the libraries that
people make checkpoints with, and the values that these libraries read back.

    python make_frozen.py autogptq FOLDER     the unpacked wheel auto-gptq 0.7.1
    python make_frozen.py gptqmodel FOLDER    the unpacked sources of gptqmodel 2.2.0
    python make_frozen.py autoawq FOLDER      the unpacked sources of autoawq 0.2.9
    python make_frozen.py compressed_tensors  with compressed-tensors 0.20.0 installed
    python make_frozen.py old_compressed_tensors             ... 0.12.2
    python make_frozen.py bitsandbytes                       bitsandbytes 0.50.2

All of them with torch 2.13 and transformers 5 on a CPU. The first three are imported without their
``__init__``, which asks for a GPU or for packages that packing does not need.

A file has the tensors of one linear layer ``m``, the values ``expected`` (float32 [N, K]), and as
metadata the ``quantization_config`` that the library writes into config.json.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

FROZEN = Path(__file__).with_name("frozen")
N, K, GROUP = 32, 96, 32


def save(name, config, tensors, expected):
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    metadata = {"quantization_config": json.dumps(config)}
    save_file(
        {**tensors, "expected": expected.float().contiguous()},
        FROZEN / f"{name}.safetensors",
        metadata,
    )


def random_linear(seed, n=N, k=K):
    torch.manual_seed(seed)
    return torch.nn.Linear(k, n, bias=False)


def import_below(folder, package, *parts):
    """Make packages importable without running their ``__init__``."""
    for part in ("", *parts):
        name = ".".join([package, *filter(None, [part])])
        module = types.ModuleType(name)
        module.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = module


def integer_grid(weight, bits, symmetric, lowest_zero, groups=None):
    """Scales and zeros of groups: float32 [N, groups] each; ``groups`` is the group of an input."""
    groups = torch.arange(weight.shape[1]) // GROUP if groups is None else groups
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        values = weight[:, groups == group]
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if symmetric:
            bound = torch.maximum(-low, high)
            scales.append(2 * bound / (2**bits - 1))
            zeros.append(torch.full_like(bound, 2 ** (bits - 1)))
        else:
            scale = (high - low) / (2**bits - 1)
            scales.append(scale)
            zeros.append((-low / scale).round().clamp(lowest_zero, 2**bits - 1))
    scales = torch.stack(scales, 1).half().float()  # as they will be in the file
    return scales, torch.stack(zeros, 1)


def in_act_order(seed):
    torch.manual_seed(seed)
    return (torch.arange(K) // GROUP)[torch.randperm(K)].int()


def autogptq(folder):
    import_below(folder, "auto_gptq", "nn_modules", "nn_modules.qlinear")
    linear_class = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            linear = random_linear(bits)
            groups = in_act_order(bits) if not symmetric else None
            # It cannot store a zero of 0: less one, that fills the rest of the word with ones.
            scales, zeros = integer_grid(linear.weight.data, bits, symmetric, 1, groups)
            packed = linear_class(bits, GROUP, K, N, bias=False)
            packed.pack(linear, scales, zeros, groups)
            tensors = {f"m.{name}": tensor for name, tensor in packed.state_dict().items()}
            tensors["m.scales"] = tensors["m.scales"].half()
            config = {"bits": bits, "group_size": GROUP, "damp_percent": 0.01}
            config |= {"desc_act": not symmetric, "sym": symmetric, "quant_method": "gptq"}
            expected = packed(torch.eye(K)).detach().T
            kind = "sym" if symmetric else "act-order"
            save(f"autogptq-{bits}bit-{kind}", config, tensors, expected)


def gptqmodel(folder):
    parts = ("models", "utils", "nn_modules", "adapter")
    import_below(folder, "gptqmodel", *parts)
    backend = importlib.import_module("gptqmodel.utils.backend").BACKEND
    sys.modules["gptqmodel.utils"].BACKEND = backend
    linear_class = importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchQuantLinear
    kernels = ("exllama_eora", "marlin", "qqq", "exllama", "exllamav2", "ipex")
    others = ("looper", "looper.named_module", "quantization", "quantization.config")
    for name in (*(f"nn_modules.qlinear.{k}" for k in kernels), *others, "utils.importer"):
        sys.modules[f"gptqmodel.{name}"] = mock.MagicMock()  # imported, and not used here
    to_v1 = importlib.import_module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    for bits in (2, 3, 4, 8):
        linear = random_linear(bits)
        linear.weight.data[::5] = linear.weight.data[::5].abs()  # rows whose zeros are 0
        scales, zeros = integer_grid(linear.weight.data, bits, False, 0)
        packed = linear_class(bits, GROUP, False, False, K, N)
        packed.pack(linear, scales, zeros)
        packed.scales = packed.scales.float()
        packed.optimized = True  # and not compiled
        packed.post_init()
        expected = packed.dequantize_weight().T
        for layout in ("gptq_v2", "gptq"):
            if layout == "gptq":
                to_v1(packed, types.SimpleNamespace(bits=bits))
            names = ("qweight", "qzeros", "scales", "g_idx")
            tensors = {f"m.{name}": getattr(packed, name).clone() for name in names}
            tensors["m.scales"] = tensors["m.scales"].half()
            config = {"bits": bits, "group_size": GROUP, "desc_act": False, "sym": False}
            config |= {"quant_method": "gptq", "checkpoint_format": layout}
            config |= {"meta": {"quantizer": ["gptqmodel:2.2.0"]}}
            save(f"gptqmodel-{bits}bit-{'v2' if layout == 'gptq_v2' else 'v1'}", config, tensors,
                 expected)  # fmt: skip


def autoawq(folder):
    import_below(folder, "awq", "modules", "modules.linear", "utils")
    gemm = importlib.import_module("awq.modules.linear.gemm")
    linear = random_linear(0)
    scales, zeros = integer_grid(linear.weight.data, 4, False, 0)
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scales.T, zeros.T)
    tensors = {f"m.{name}": tensor for name, tensor in packed.state_dict().items()}
    expected = gemm.dequantize_gemm(
        packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP
    ).T
    config = {"quant_method": "awq", "zero_point": True, "group_size": GROUP, "bits": 4}
    config |= {"version": "gemm", "modules_to_not_convert": None}
    save("autoawq-4bit", config, tensors, expected)


INTEGERS = {
    "pack-quantized-2bit-group": {"num_bits": 2, "strategy": "group", "group_size": GROUP},
    "pack-quantized-3bit-channel": {"num_bits": 3, "strategy": "channel"},
    "pack-quantized-4bit-group": {"num_bits": 4, "strategy": "group", "group_size": GROUP},
    "pack-quantized-5bit-tensor": {"num_bits": 5, "strategy": "tensor"},
    "pack-quantized-7bit-group": {"num_bits": 7, "strategy": "group", "group_size": GROUP},
    "pack-quantized-8bit-channel": {"num_bits": 8, "strategy": "channel"},
    "int-quantized-8bit-channel": {"num_bits": 8, "strategy": "channel"},
    "int-quantized-8bit-group": {"num_bits": 8, "strategy": "group", "group_size": GROUP},
}
ASYMMETRIC = ("3bit-channel", "7bit-group", "8bit-group", "2bit-group")
FLOATS = {
    "float-quantized-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "float-quantized-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float-quantized-block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [16, 64],
    },
    "mxfp8-quantized": {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    },
    "mxfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    },
    "nvfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
}


def bounds_of_blocks(weight, args):
    """Lowest and highest value of each block that shares a scale."""
    n, k = weight.shape
    rows, columns = args.get("block_structure", (1, args.get("group_size") or k))
    if args["strategy"] == "tensor":
        return weight.min().view(1), weight.max().view(1)
    padded = torch.zeros(-(-n // rows) * rows, -(-k // columns) * columns)
    padded[:n, :k] = weight
    blocks = padded.view(len(padded) // rows, rows, -1, columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    for name, given in {**INTEGERS, **FLOATS}.items():
        layout = name.split("quantized")[0] + "quantized"
        symmetric = not name.endswith(ASYMMETRIC) or "float" in name
        args = QuantizationArgs(**given, symmetric=symmetric)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        weight = random_linear(len(name)).weight.data
        low, high = bounds_of_blocks(weight, given)
        state = {"weight": weight}
        whole = None
        if given["strategy"] == "tensor_group":
            state["weight_global_scale"] = whole = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        state |= {"weight_scale": scale.float(), "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(layout)
        packed = compressor.compress(state, scheme)
        expected = compressor.decompress(packed, scheme)["weight"]
        if whole is not None:  # which it would round to bfloat16
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

            levels = unpack_fp4_from_uint8(packed["weight_packed"], N, K).float()
            scale = packed["weight_scale"].float()
            expected = dequantize(levels, scale, args=args, global_scale=whole,
                                  dtype=torch.float32)  # fmt: skip
        tensors = {f"m.{key}": value for key, value in packed.items()}
        config = {"quant_method": "compressed-tensors", "version": "0.20.0", "format": layout}
        config |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
        config |= {"config_groups": {"group_0": scheme.model_dump(mode="json")}}
        save(f"compressed-tensors-{name}", config, tensors, expected)


def old_compressed_tensors():
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    for bits, symmetric, actorder in ((3, False, None), (6, True, None), (4, False, "group")):
        given = {"num_bits": bits, "strategy": "group", "group_size": GROUP, "actorder": actorder}
        args = QuantizationArgs(**given, symmetric=symmetric)
        weight = random_linear(bits).weight.data
        low, high = bounds_of_blocks(weight, given)
        scale, zero = calculate_qparams(low, high, args)
        g_idx = in_act_order(bits) if actorder else None
        kwargs = {"scale": scale, "zero_point": zero, "g_idx": g_idx}
        packed = PackedQuantizationCompressor().compress_weight(
            weight, quantization_args=args, **kwargs
        )
        codes = quantize(weight, args=args, dtype=torch.int8, **kwargs)
        expected = dequantize(codes, args=args, **kwargs)
        tensors = {f"m.{key}": value for key, value in packed.items()}
        tensors["m.weight_scale"] = scale
        if g_idx is not None:
            tensors["m.weight_g_idx"] = g_idx
        weights = {**given, "type": "int", "symmetric": symmetric, "dynamic": False}
        config = {"quant_method": "compressed-tensors", "version": "0.12.2"}
        config |= {"format": "pack-quantized", "quantization_status": "compressed", "ignore": []}
        config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
        save(f"old-compressed-tensors-{bits}bit", config, tensors, expected)


def bitsandbytes():
    import bitsandbytes as bnb

    cases = (
        *(("nf4", False, K), ("nf4", True, 64), ("nf4", True, 16), ("fp4", False, 64)),
        *(("fp4", True, K),),
    )
    for kind, nested, k in cases:
        weight = random_linear(k, k=k).weight.data
        packed, state = bnb.functional.quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=nested
        )
        tensors = {"m.weight": packed}
        tensors |= {f"m.weight.{key}": v for key, v in state.as_dict(packed=True).items()}
        # Its kernel for CPUs takes the wrong scales where blocks span rows: so as one row.
        state.shape = torch.Size([weight.numel()])
        expected = bnb.functional.dequantize_4bit(packed, state).view(weight.shape)
        assert (expected - weight).abs().max() < weight.abs().max() / 4
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        config |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
        save(f"bitsandbytes-{kind}{'-nested' * nested}-{k}", config, tensors, expected)
    weight = random_linear(8).weight.data
    codes, scb, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    tensors = {"m.weight": codes, "m.SCB": scb, "m.weight_format": torch.tensor(0).byte()}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    expected = bnb.functional.int8_vectorwise_dequant(codes, scb)
    save("bitsandbytes-int8", config, tensors, expected)


MAKERS = (autogptq, gptqmodel, autoawq, compressed_tensors, old_compressed_tensors, bitsandbytes)

if __name__ == "__main__":
    FROZEN.mkdir(exist_ok=True)
    makers = {maker.__name__: maker for maker in MAKERS}
    makers[sys.argv[1]](*sys.argv[2:])
