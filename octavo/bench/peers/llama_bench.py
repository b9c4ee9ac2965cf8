"""Command lines of llama.cpp's own benchmarks, and parsers of their output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.peers.workers.workloads import PeerWorkload, batch_figures

# Flash attention; the other settings are the programs' defaults, which were the best of those
# tried (a unified KV cache was several times slower with many sequences).
_BATCH, _MICRO_BATCH = 2048, 512


@dataclass(frozen=True, slots=True)
class LlamaPrograms:
    """The programs of llama.cpp in a folder, and the threads that they are to use."""

    folder: Path
    threads: int

    def bench_command(self, model: Path, workload: PeerWorkload) -> list[str]:
        """Return the command that measures ``workload``; `parse` reads its output."""
        if workload.kind == "batch":
            # Each sequence decodes one token less than it answers: see workloads.py.
            steps = workload.output_len - 1
            context = workload.num_seqs * (workload.input_len + workload.output_len)
            return [
                *(self._program("llama-batched-bench"), "-m", str(model)),
                *("-npp", str(workload.input_len), "-ntg", str(steps)),
                *("-npl", str(workload.num_seqs), "-c", str(context)),
                *("-b", str(_BATCH), "-ub", str(_MICRO_BATCH), "-fa", "on"),
                *("-t", str(self.threads), "-tb", str(self.threads), "--output-format", "jsonl"),
            ]
        prefill, steps, depth = workload.input_len, 0, 0
        if workload.kind == "decode":
            prefill, steps, depth = 0, workload.output_len - 1, workload.input_len
        return [
            *(self._program("llama-bench"), "-m", str(model), "-o", "json"),
            *("-p", str(prefill), "-n", str(steps), "-d", str(depth)),
            *("-r", str(workload.repeat), "-b", str(_BATCH), "-ub", str(_MICRO_BATCH)),
            *("-t", str(self.threads), "-fa", "1"),
        ]

    def first_token_command(self, model: Path) -> list[str]:
        """Return the command of a process that prints one token and nothing before it."""
        return [
            *(self._program("llama-completion"), "-m", str(model), "-p", "Hello", "-n", "1"),
            *("-no-cnv", "--no-display-prompt", "--temp", "0", "-c", "512", "-fa", "on"),
            *("-t", str(self.threads)),
        ]

    def quantize_command(self, source: Path, target: Path, kind: str) -> list[str]:
        command = [self._program("llama-quantize"), "--allow-requantize"]
        return [*command, str(source), str(target), kind, str(self.threads)]

    def _program(self, name: str) -> str:
        return str(self.folder / name)


def parse(workload: PeerWorkload, output: str) -> list[dict[str, float]]:
    """Return the figures of every repetition, from the output of `LlamaPrograms.bench_command`.

    Raises:
        ValueError: it is not the output of that command.
    """
    if workload.kind == "batch":
        return [_parse_batched_bench(workload, output)]
    figure, steps = "prefill_tps", workload.input_len
    if workload.kind == "decode":
        figure, steps = "decode_tps", workload.output_len - 1
    result = _parse_llama_bench(output)
    if result["n_gen" if workload.kind == "decode" else "n_prompt"] != steps:
        raise ValueError(f"llama-bench measured something else: {result}")
    return [{figure: rate} for rate in result["samples_ts"]]


def about(output: str) -> dict[str, Any]:
    """Return version and settings, from the output of llama-bench."""
    result = _parse_llama_bench(output)
    names = ("build_commit", "build_number", "model_type", "n_threads", "flash_attn", "type_k")
    return {name: result[name] for name in names if name in result}


def _parse_llama_bench(output: str) -> dict[str, Any]:
    try:
        (result,) = json.loads(output)
    except ValueError as error:
        raise ValueError(f"not llama-bench's JSON of one test: {output[:200]!r}") from error
    return result


def _parse_batched_bench(workload: PeerWorkload, output: str) -> dict[str, float]:
    lines = (line.strip() for line in output.splitlines())
    results = [json.loads(line) for line in lines if line.startswith("{")]
    shape = {"pl": workload.num_seqs, "pp": workload.input_len, "tg": workload.output_len - 1}
    if len(results) != 1 or any(results[0].get(name) != value for name, value in shape.items()):
        # It leaves out, without a word, what does not fit into the context.
        raise ValueError(f"llama-batched-bench has no result for {shape}: {output[:200]!r}")
    (result,) = results
    return batch_figures(workload, result["t_pp"] + result["t_tg"], result["t_pp"])
