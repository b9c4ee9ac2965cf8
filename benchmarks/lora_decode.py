"""Decoding with adapters beside decoding without, in turns: what an adapter for every stream costs.

    python benchmarks/lora_decode.py qwen2.5-coder-0.5b

Adapters of random numbers are made for all linears of the model: 8 of rank 16. 32 streams decode
with one of these each, and without, in A B A B order. What is printed is the best rate of the
repetitions of each, and the least processor time of a token, for machines that do other things too;
their ratios; and the bytes of A and B that a step reads beside the weights. These are the floor: a
step takes at least as much longer as it takes to read them, where memory is what steps wait for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo import LLM, LoRARequest, SamplingParams
from octavo.models.config import EMBEDDING, HEAD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-0.5b")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--lora-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        lora_memory="8GiB",
        max_loras=args.adapters,
        lora_dtype=args.lora_dtype,
        threads=args.threads,
    )
    with tempfile.TemporaryDirectory() as folder:
        loras = [
            LoRARequest(f"a{i}", i + 1, str(write(Path(folder) / f"{i}", llm, args.rank, i)))
            for i in range(args.adapters)
        ]
        chosen = [loras[i % len(loras)] for i in range(args.streams)]
        rates: dict[str, list[tuple[float, float]]] = {"base": [], "adapters": []}
        measure(llm, args, chosen)  # loads them, and grows what is grown once
        for _ in range(args.repeat):
            rates["base"].append(measure(llm, args, None))
            rates["adapters"].append(measure(llm, args, chosen))
    pool = llm._loaded.adapters.pool
    best = {name: max(rate for rate, _ in found) for name, found in rates.items()}
    least = {name: min(cost for _, cost in found) for name, found in rates.items()}
    print(
        json.dumps(
            {
                "model": args.model,
                "isa": llm.engine_info()["isa"],
                "streams": args.streams,
                "adapters": args.adapters,
                "rank": args.rank,
                "tokens_per_second": {name: round(rate, 1) for name, rate in best.items()},
                "of_base": round(best["adapters"] / best["base"], 3),
                "cpu_ms_per_token": {name: round(1e3 * cost, 3) for name, cost in least.items()},
                "of_base_by_cpu": round(least["base"] / least["adapters"], 3),
                "adapter_bytes_of_a_step": pool.num_bytes,
                "weight_bytes": llm.engine_info()["weights_bytes"],
                "all": {name: [round(x, 1) for x, _ in found] for name, found in rates.items()},
            },
            indent=2,
        )
    )


def measure(
    llm: LLM, args: argparse.Namespace, loras: list[LoRARequest] | None
) -> tuple[float, float]:
    """Return the tokens per second of decoding, of short prompts that differ, and the seconds of
    all processors for a token."""
    prompts = [[1000 + 7 * i + j for j in range(8)] for i in range(args.streams)]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    begin, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, lora_request=loras)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return count / seconds, cpu / count


def write(folder: Path, llm: LLM, rank: int, seed: int) -> Path:
    """Write an adapter of small random numbers for all linears of a model with plain names."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (rows, columns) in (llm._loaded.adapters.shapes or {}).items():
        if name in (EMBEDDING, HEAD):
            continue
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            values = random.standard_normal(shape, dtype=np.float32) * 0.01
            tensors[f"{module}.lora_{which}.weight"] = values
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


if __name__ == "__main__":
    main()
