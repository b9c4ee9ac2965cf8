"""Time octavo on this machine: start, prefill, decode, the step's own overhead, memory.

Prints a table of medians (minimum – maximum). docs/metrics.md defines the figures.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time

from octavo import __version__
from octavo.build import LoadedEngine, load_engine
from octavo.config import EngineArgs
from octavo.core.sampling_params import SamplingParams


def start_to_first_token(args: argparse.Namespace) -> float:
    """Seconds from the start of a process to the first byte of its answer."""
    command = [sys.executable, "-m", "octavo", "generate", args.model, "--raw", "--prompt=Hello"]
    command += ["--max-tokens=1", "--temperature=0"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
        message = process.stderr.read()
    if process.returncode != 0:
        raise SystemExit(message.decode())
    return elapsed


def run_batch(loaded: LoadedEngine, batch_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Random prompts, answered together; every request generates all of its tokens."""
    text_engine = loaded.text_engine
    runner = text_engine.engine.executor.runner
    params = SamplingParams(
        temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False
    )
    rng = random.Random(batch_size)
    generations = []
    for index in range(batch_size):
        ids = [rng.randrange(100, text_engine.vocab_size - 100) for _ in range(args.input_len)]
        generations.append(text_engine.add(f"{batch_size}-{index}", None, ids, params))
    overheads = []
    start = time.perf_counter()
    while text_engine.has_unfinished_requests:
        in_kernels = runner.kernel_seconds
        step_start = time.perf_counter()
        deltas, step = text_engine.step()
        if step is not None and step.batch.is_pure_decode:
            outside = time.perf_counter() - step_start - (runner.kernel_seconds - in_kernels)
            overheads.append(outside / max(len(delta.token_ids) for delta in deltas))
    elapsed = time.perf_counter() - start
    stats = [generation.samples[0].request.stats for generation in generations]
    first_token = max(s.first_token_time for s in stats) - min(s.arrival_time for s in stats)
    return {
        "ttft": stats[0].ttft,
        "prefill_tps": batch_size * args.input_len / first_token,
        "decode_tps": batch_size * (args.output_len - 1) / (elapsed - first_token),
        "overhead_us": statistics.median(overheads) * 1e6,
    }


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Every figure by its label, one value a repetition."""
    first = [start_to_first_token(args) for _ in range(args.repeat + 1)][
        1:
    ]  # the first warms files
    figures = {"start to first token, new process (s)": first}
    settings = {} if args.threads is None else {"threads": args.threads}
    # No prefix is shared between repetitions, so nothing comes from the cache.
    loaded = load_engine(EngineArgs(model=args.model, enable_prefix_caching=False, **settings))
    run_batch(loaded, 1, args)
    for batch_size in args.batch_size:
        runs = [run_batch(loaded, batch_size, args) for _ in range(args.repeat)]
        where = f"batch {batch_size}"
        if batch_size == 1:
            label = f"TTFT, {args.input_len} prompt tokens (ms)"
            figures[label] = [run["ttft"] * 1e3 for run in runs]
        figures[f"prefill, {where} (tokens/s)"] = [run["prefill_tps"] for run in runs]
        figures[f"decode, {where} (tokens/s)"] = [run["decode_tps"] for run in runs]
        figures[f"outside the kernels, for a token of each, {where} (µs)"] = [
            run["overhead_us"] for run in runs
        ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    figures["peak RSS (MiB)"] = [peak / 2**20]
    figures["weights (MiB)"] = [loaded.info["weights_bytes"] / 2**20]
    info = loaded.info
    print(
        f"octavo {__version__}, {args.model}, {info['device']}, {info['dtype']}, kernels "
        f"{info['kernels']}, {args.input_len} prompt and {args.output_len} output tokens\n",
        file=sys.stderr,
    )
    loaded.text_engine.engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--input-len", type=int, default=256, metavar="N", help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="output tokens")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    figures = measure(args)
    if args.json:
        print(json.dumps(figures))
        return
    print("| figure | median | range |\n|---|---|---|")
    for label, values in figures.items():
        spread = f"{min(values):,.1f} – {max(values):,.1f}" if len(values) > 1 else ""
        print(f"| {label} | {statistics.median(values):,.1f} | {spread} |")


if __name__ == "__main__":
    main()
