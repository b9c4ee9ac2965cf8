"""What serving costs: many streams over HTTP, beside the same work done offline.

    python benchmarks/server.py [MODEL] [--streams 32] [--input-len 128] [--output-len 128]

The two take turns on the same machine; each round has prompts of its own, so that no prefix is
cached. The ratio of output tokens a second is what the server leaves of the engine's speed, with
the client on the same cores. (`octavo bench serve` measures a server by itself.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence

from octavo.bench.offline.session import OfflineSession
from octavo.bench.serving.http_stream import StreamResult, stream_request
from octavo.bench.serving.server_process import running_server
from octavo.measure.statistics import MedianRange, percentile
from octavo.settings.engine import EngineArgs
from octavo.workload.datasets import random_requests
from octavo.workload.requests import WorkloadRequest


def run_offline(session: OfflineSession, requests: Sequence[WorkloadRequest]) -> float:
    """Output tokens a second."""
    timing = session.run(requests)
    return timing.num_output_tokens / timing.elapsed_s


async def run_streams(
    url: str, requests: Sequence[WorkloadRequest]
) -> tuple[float, list[StreamResult]]:
    """Output tokens a second, and what each stream saw."""
    begin = time.perf_counter()
    results = await asyncio.gather(*(stream_request(url, body_of(each)) for each in requests))
    elapsed = time.perf_counter() - begin
    errors = [result.error for result in results if result.error]
    if errors:
        raise SystemExit(f"{len(errors)} streams failed: {errors[0]}")
    return sum(result.num_output_tokens for result in results) / elapsed, results


def body_of(request: WorkloadRequest) -> dict[str, object]:
    assert request.prompt_token_ids is not None
    return {
        "prompt": list(request.prompt_token_ids),
        "temperature": 0,
        "max_tokens": request.output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def gaps(results: Sequence[StreamResult]) -> list[float]:
    times = [result.event_times for result in results]
    return [b - a for each in times for a, b in zip(each, each[1:], strict=False)]


def percentiles_ms(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values, percent) * 1e3, 1) for percent in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    offline, served, streams = [], [], []
    with (
        running_server(args.model) as url,
        OfflineSession(EngineArgs(model=args.model)) as session,
    ):
        for number in range(args.rounds + 1):
            ours, theirs = (
                random_requests(
                    args.streams,
                    session.vocab_size,
                    args.input_len,
                    args.output_len,
                    seed=2 * number + which,
                )
                for which in (0, 1)
            )
            alone = run_offline(session, ours)
            tokens_per_s, results = asyncio.run(run_streams(url + "/v1/completions", theirs))
            if number == 0:
                continue  # to warm up
            offline.append(alone)
            served.append(tokens_per_s)
            streams += results
    ratios = [b / a for a, b in zip(offline, served, strict=True)]
    waits = [each.first - each.sent for each in streams if each.first is not None]
    found = {
        "streams": args.streams,
        "offline_tps": MedianRange.of(offline).as_json(),
        "served_tps": MedianRange.of(served).as_json(),
        "ratio": MedianRange.of(ratios).as_json(),
        "ttft_ms": percentiles_ms(waits),
        "itl_ms": percentiles_ms(gaps(streams)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
