"""Adapters that tests make, as folders that PEFT would have written; and merged models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(model: Path, names: Sequence[str] = PROJECTIONS) -> list[str]:
    """The modules of a model's folder whose names end in one of these."""
    tensors = load_file(model / "model.safetensors")
    ends = tuple(f".{name}.weight" for name in names)
    return [name.removesuffix(".weight") for name in tensors if name.endswith(ends)]


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    names: Sequence[str] = PROJECTIONS,
    size: float = 0.3,
    head: bool = False,
    modules: Sequence[str] | None = None,
    **settings: Any,
) -> Path:
    """An adapter of random numbers for a model's folder of plain float32 tensors.

    ``names``: ends of the names of its modules, or ``modules``: all of them; and the ``head``.
    """
    weights = load_file(model / "model.safetensors")
    random = np.random.default_rng(seed)
    if modules is None:
        modules = modules_of(model, names) + (["lm_head"] if head else [])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "base_model_name_or_path": "somebody/else",
        **settings,
    }
    tensors = {}
    for module in modules:
        shape = weights[f"{module}.weight" if module != "lm_head" else _head_of(weights)].shape
        is_embedding = module.endswith(("embed_tokens", "wte"))
        is_turned = is_embedding or _is_conv1d(module)
        rows, columns = reversed(shape) if is_turned else shape
        its_rank = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        a, b = (
            ("lora_embedding_A", "lora_embedding_B")
            if is_embedding
            else (
                "lora_A.weight",
                "lora_B.weight",
            )
        )
        shape_a, shape_b = (its_rank, columns), (rows, its_rank)
        full = f"base_model.model.{module}"
        tensors[f"{full}.{a}"] = _normal(random, shape_a, size)
        tensors[f"{full}.{b}"] = _normal(random, shape_b, size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _head_of(weights) -> str:
    """The tensor of the head, which may be a tied embedding."""
    ends = ("lm_head.weight", "embed_tokens.weight", "wte.weight")
    return next(name for end in ends for name in weights if name.endswith(end))


def _is_conv1d(module: str) -> bool:
    """Whether it is one of GPT-2's layers, whose weights lie as [inputs, outputs]."""
    return module.startswith("transformer.h.")


def linear_modules(model: Path) -> list[str]:
    """The modules of a folder that adapters can change: all matrices but those of experts, of
    routers, of latent vectors and of positions."""
    tensors = load_file(model / "model.safetensors")
    others = ("experts.", ".gate.", "router", "kv_b_proj", "conv", "norm", "wpe", "embed_pos")
    return [
        name.removesuffix(".weight")
        for name, values in tensors.items()
        if name.endswith(".weight") and values.ndim == 2 and not any(o in name for o in others)
    ]


def _normal(random: np.random.Generator, shape: tuple[int, int], size: float) -> np.ndarray:
    return (random.standard_normal(shape) * size / np.sqrt(shape[0])).astype(np.float32)


def merged_by_hand(folder: Path, model: Path, adapter: Path) -> Path:
    """A copy of a model's folder with an adapter merged in float64, without octavo's own code."""
    weights = load_file(model / "model.safetensors")
    changes = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    shutil.copytree(model, folder, dirs_exist_ok=True)
    model_config = json.loads((model / "config.json").read_text())
    for name in [name for name in changes if "lora_A" in name or "lora_embedding_A" in name]:
        module = name.removeprefix("base_model.model.").split(".lora_")[0]
        last = module.rpartition(".")[2]
        a = changes[name].astype(np.float64)
        b = changes[name.replace("lora_A", "lora_B").replace("_embedding_A", "_embedding_B")]
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        rank = config.get("rank_pattern", {}).get(last, config["r"])
        scale = alpha / (np.sqrt(rank) if config.get("use_rslora") else rank)
        change = scale * (b.astype(np.float64) @ a)
        is_embedding = "embedding" in name
        if is_embedding or _is_conv1d(module):
            change = change.T
        if (is_embedding or module == "lm_head") and "lm_head.weight" not in weights:
            weights["lm_head.weight"] = weights[_head_of(weights)].copy()  # tied no longer
            model_config["tie_word_embeddings"] = False
        before = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (before + change).astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model_config))
    return folder
