"""What serving costs: many streams over HTTP, beside the same work done offline.

    python benchmarks/server.py [MODEL] [--streams 32] [--input-len 128] [--output-len 128]

The two take turns on the same machine; each round has prompts of its own, so that no prefix is
cached. The ratio of output tokens a second is what the server leaves of the engine's speed, with
the client on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time

from octavo import LLM, SamplingParams
from octavo.bench.http_stream import StreamResult, stream_request


def make_prompts(count: int, length: int, rng: random.Random, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(100, vocab_size) for _ in range(length)] for _ in range(count)]


def run_offline(llm: LLM, prompts: list[list[int]], output_len: int) -> float:
    """Output tokens a second."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed = time.perf_counter() - begin
    return sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed


async def run_streams(
    url: str, prompts: list[list[int]], output_len: int
) -> tuple[float, list[StreamResult]]:
    """Output tokens a second, and what each stream saw."""
    body = {
        "temperature": 0,
        "max_tokens": output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    results = await asyncio.gather(
        *(stream_request(url, {**body, "prompt": prompt}) for prompt in prompts)
    )
    elapsed = time.perf_counter() - begin
    errors = [result.error for result in results if result.error]
    if errors:
        raise SystemExit(f"{len(errors)} streams failed: {errors[0]}")
    return sum(result.num_output_tokens for result in results) / elapsed, results


def start_server(model: str, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port, and its URL."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"is ready on (http://\S+)", line):
            return server, found[1]
    raise SystemExit("the server did not start")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    rng = random.Random(0)
    server, url = start_server(args.model, "--log-level", "info")
    offline: list[float] = []
    served: list[float] = []
    ttft: list[float] = []
    itl: list[float] = []
    with LLM(args.model) as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        for number in range(args.rounds + 1):
            prompts = make_prompts(args.streams, args.input_len, rng, vocab_size)
            one = run_offline(llm, prompts, args.output_len)
            prompts = make_prompts(args.streams, args.input_len, rng, vocab_size)
            other, results = asyncio.run(
                run_streams(url + "/v1/completions", prompts, args.output_len)
            )
            if number == 0:
                continue  # to warm up
            offline.append(one)
            served.append(other)
            for result in results:
                assert result.first is not None
                ttft.append(result.first - result.sent)
                times = result.event_times
                itl += [b - a for a, b in zip(times, times[1:], strict=False)]
    server.terminate()
    server.wait()
    ratios = [b / a for a, b in zip(offline, served, strict=True)]
    print(
        json.dumps(
            {
                "streams": args.streams,
                "offline_tps": round(statistics.median(offline), 1),
                "served_tps": round(statistics.median(served), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "ttft_ms": {p: round(percentile(ttft, p) * 1e3, 1) for p in (0.5, 0.9, 0.99)},
                "itl_ms": {p: round(percentile(itl, p) * 1e3, 1) for p in (0.5, 0.9, 0.99)},
            }
        )
    )


if __name__ == "__main__":
    main()
