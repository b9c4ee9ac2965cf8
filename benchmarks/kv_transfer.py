"""Time of passing the KV of a prompt from one replica to another, against computing it.

    python benchmarks/kv_transfer.py MODEL [--tokens 1000] [--rounds 5] [--links]

Both engines are in this process, and have their threads to themselves in turns; the memory between
them, and all that is done with it, is that of ``octavo serve --prefill-replicas``; with ``--links``
the connection between them, over loopback, is that of replicas on several machines. In each round
the first engine computes a new prompt and saves its KV, and the second one goes on from it::

    computing   from the request to its first token, at the first engine
    saving      copies out of the pool, between two steps of the first engine
    passing on  from there until the second engine has its first token: writing, reading, copying
                into the pool, and one step
    step        a token of an answer at the second engine
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

from octavo.core.block_store import following_keys, root_key
from octavo.core.sampling_params import SamplingParams
from octavo.offload.open_peers import Transfer, TransferFiles
from octavo.offload.shared_blocks import create_region, read_only
from octavo.offload.transfer_links import TransferLinks
from octavo.serving.load import LoadedEngine, load_engine
from octavo.serving.text_engine import OutputSoFar, TextEngine
from octavo.settings.engine import EngineArgs

_NUM_BYTES = 1 << 30  # of blocks on their way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--links", action="store_true")
    args = parser.parse_args()
    first, second = linked(args.model) if args.links else sharing(args.model)
    rng = random.Random(1)
    rounds = [
        measure(first, second, [rng.randrange(1000, 20000) for _ in range(args.tokens)])
        for _ in range(args.rounds + 1)
    ][1:]  # the first one warms up
    print(f"{args.tokens} tokens of {args.model}, {args.rounds} rounds: median (least to most)")
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        middle, least, most = statistics.median(values), min(values), max(values)
        unit, factor = ("x computing", 1) if name == "ratio" else ("ms", 1e3)
        shown = f"{middle * factor:9.3f} ({least * factor:.3f} to {most * factor:.3f}) {unit}"
        print(f"{name:12}{shown}")


def sharing(model: str) -> tuple[LoadedEngine, LoadedEngine]:
    """Return two engines of which the second maps the memory that the first one writes."""
    region = create_region(_NUM_BYTES)
    first = load(model, TransferFiles(os.dup(region)))
    return first, load(model, TransferFiles(peers={0: read_only(region)}))


def linked(model: str) -> tuple[LoadedEngine, LoadedEngine]:
    """Return two engines of which the second is connected to the first one."""
    there, here = TransferLinks("127.0.0.1", (), _NUM_BYTES), TransferLinks(None, [0], _NUM_BYTES)
    first, second = load(model, there), load(model, here)
    ticket = there.invite(1)
    assert ticket is not None
    here.connect(0, ticket)
    while not here.is_linked(0):
        time.sleep(0.01)
    return first, second


def load(model: str, transfer: Transfer) -> LoadedEngine:
    settings = {"max_model_len": 4096, "kv_cache_memory": "512MiB", "kv_buffer_size": "512MiB"}
    args = EngineArgs(model, data_parallel_size=2, prefill_replicas=1, **settings)
    return load_engine(args, is_served=True, is_replica=True, transfer=transfer)


def measure(first: LoadedEngine, second: LoadedEngine, prompt: list[int]) -> dict[str, float]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    first.text_engine.add("a", None, prompt, params)
    ids = step(first.text_engine)
    computed = time.perf_counter()
    num_saved = first.text_engine.hand_over("a")
    saved = time.perf_counter()
    size = second.config.cache.block_size
    assert second.peers is not None and num_saved > len(prompt) - size
    second.peers.expect(0, following_keys(root_key(""), prompt[:num_saved], size))
    second.text_engine.add("a", None, prompt, params, resumed=[OutputSoFar(0, ids)])
    step(second.text_engine)
    passed_on = time.perf_counter()
    step(second.text_engine)
    stepped = time.perf_counter()
    while second.text_engine.has_unfinished_requests:
        second.text_engine.step()
    assert second.peers.figures["kv_transfer_misses_late"] == 0
    return {
        "computing": computed - begin,
        "saving": saved - computed,
        "passing on": passed_on - saved,
        "step": stepped - passed_on,
        # The step that the answer needs anyway is no part of the transfer.
        "ratio": (passed_on - computed - (stepped - passed_on)) / (computed - begin),
    }


def step(engine: TextEngine) -> list[int]:
    """Step until there are tokens, and return them."""
    while True:
        deltas, _ = engine.step()
        if deltas:
            return deltas[0].token_ids


if __name__ == "__main__":
    main()
