"""Adapters that tests make, as folders that PEFT would have written, and models with them merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDING = "model.embed_tokens"


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
    **settings: Any,
) -> Path:
    """An adapter of random numbers for a model's folder of plain float32 tensors."""
    weights = load_file(model / "model.safetensors")
    random = np.random.default_rng(seed)
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
        rows, columns = weights.get(f"{module}.weight", weights[f"{EMBEDDING}.weight"]).shape
        is_embedding = module.endswith("embed_tokens")
        if is_embedding:
            rows, columns = columns, rows
        its_rank = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding else (
            "lora_A.weight",
            "lora_B.weight",
        )
        shape_a, shape_b = (its_rank, columns), (rows, its_rank)
        full = f"base_model.model.{module}"
        tensors[f"{full}.{a}"] = _normal(random, shape_a, size)
        tensors[f"{full}.{b}"] = _normal(random, shape_b, size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


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
        if "embedding" in name:
            change = change.T
        if f"{module}.weight" not in weights or model_config["tie_word_embeddings"] and (
            module in ("lm_head", EMBEDDING)
        ):
            weights["lm_head.weight"] = weights.get(
                "lm_head.weight", weights[f"{EMBEDDING}.weight"]
            ).copy()
            model_config["tie_word_embeddings"] = False
        before = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (before + change).astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model_config))
    return folder
