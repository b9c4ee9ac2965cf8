"""What native attention costs: norm, rope, KV write and attention of all layers of a step.

    python benchmarks/kernels_attention.py --threads 2
    python benchmarks/kernels_attention.py --heads 32 --kv-heads 8 --dim 128 --layers 4
    python benchmarks/kernels_attention.py --turns 7 --only "decode @"
    python benchmarks/kernels_attention.py --shared 4096 --sequences 32 --layers 4

Each layer has KV memory of its own, as in a model, and one native call runs all of them. Prints the
best and the median of many steps; beside them the bytes of KV that a step reads, or the operations
of its two products. ``write`` is a step of as many tokens whose queries see only themselves
(a window of 1): what comes before attention proper.

With ``--shared`` sequences that decode have so many tokens in common, and 64 of their own: they see
these together and apart, in turns, in processor time of one thread.

With ``--turns`` all formats of KV are measured in turns, in processor time of one thread, which a
machine with others on it disturbs least: medians, and what they are of the time of ``bf16``.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

import numpy as np

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.library import Library, Pool, load

FORMATS = {
    "bf16": abi.OCT_KV_BF16,
    "f32": abi.OCT_KV_F32,
    "int8": abi.OCT_KV_INT8,
    "fp8": abi.OCT_KV_FP8,
    "k8v4": abi.OCT_KV_K8V4,
    "int4": abi.OCT_KV_INT4,
}
BLOCK_SIZE = 32
# (name, sequences, new tokens of each, context of each)
WORKS = [
    ("decode @128", 1, 1, 128),
    ("decode @512", 1, 1, 512),
    ("decode @1024", 1, 1, 1024),
    ("decode @4096", 1, 1, 4096),
    ("32 x decode @200", 32, 1, 200),
    ("8 x decode @1024", 8, 1, 1024),
    ("prefill 128", 1, 128, 128),
    ("prefill 512", 1, 512, 512),
    ("prefill 2048", 1, 2048, 2048),
    ("verify 8 @1024", 1, 8, 1024),
]


class Work:
    """A step of attention nodes only."""

    def __init__(
        self,
        library: Library,
        options: argparse.Namespace,
        kv: str,
        seqs: int,
        new: int,
        context: int,
        shared: int = 0,
    ):
        self.library = library
        heads, kv_heads, dim = options.heads, options.kv_heads, options.dim
        rng = np.random.default_rng(0)
        blocks = -(-context // BLOCK_SIZE)
        in_common = shared // BLOCK_SIZE
        num_blocks = in_common + seqs * (blocks - in_common)
        order = rng.permutation(num_blocks).astype(np.int32)
        tables = np.empty((seqs, blocks), np.int32)
        tables[:, :in_common] = order[:in_common]
        tables[:, in_common:] = order[in_common:].reshape(seqs, -1)
        self.ints = [
            (np.arange(seqs + 1) * new).astype(np.int32),
            np.full(seqs, context, np.int32),
            tables,
            np.zeros(seqs * new, np.int32),
        ]
        width = (heads + 2 * kv_heads) * dim
        self.qkv = rng.standard_normal((seqs * new, width), np.float32)
        self.out = np.empty((seqs * new, heads, dim), np.float32)
        self.cos_sin = rng.standard_normal((context, dim), np.float32)
        chunk = library.check(library.lib.oct_kv_chunk_bytes(FORMATS[kv], dim))
        self.layer_bytes = num_blocks * (BLOCK_SIZE // 16) * kv_heads * chunk
        self.kv = np.zeros((options.layers, self.layer_bytes + 4096), np.uint8)
        q = self.qkv.ctypes.data
        self.args = [
            abi.AttentionArgs(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                head_size=dim,
                kv_format=FORMATS[kv],
                rotary_dim=dim,
                scale=dim**-0.5,
                cos_sin=self.cos_sin.ctypes.data,
                q=q,
                k=q + 4 * heads * dim,
                v=q + 4 * (heads + kv_heads) * dim,
                ldq=width,
                ldk=width,
                ldv=width,
                kv=(layer.ctypes.data + 63) // 64 * 64,
                kv_block_bytes=self.layer_bytes // num_blocks,
                out=self.out.ctypes.data,
                ldo=heads * dim,
                num_blocks=num_blocks,
            )
            for layer in self.kv
        ]
        nodes = (abi.Node * options.layers)()
        for node, args in zip(nodes, self.args, strict=True):
            node.op, node.args = abi.OCT_OP_ATTENTION, ctypes.addressof(args)
        self.program = abi.Program(
            nodes=nodes, num_nodes=len(nodes), vocab=1, max_tokens=seqs * new
        )
        self.batch = abi.Batch(num_multi_steps=1, token_ids=self.ints[3].ctypes.data)
        self.batch.seqs = abi.Sequences(
            seqs,
            seqs * new,
            *(array.ctypes.data for array in self.ints[:3]),
            table_stride=blocks,
            block_size=BLOCK_SIZE,
        )
        # Keys and values everywhere, not only at the last positions.
        batch, fill = self.batch.seqs, abi.Sequences()
        rows = np.resize(self.qkv, (seqs * context, width))
        starts = (np.arange(seqs + 1) * context).astype(np.int32)
        ctypes.pointer(fill)[0] = batch
        fill.num_tokens, fill.q_start = seqs * context, starts.ctypes.data
        out = np.empty((seqs * context, heads, dim), np.float32)
        with Pool(library, options.threads) as pool:
            for args in self.args:
                copy = abi.AttentionArgs()
                ctypes.pointer(copy)[0] = args
                copy.window, copy.out, copy.q = 1, out.ctypes.data, rows.ctypes.data
                copy.k = rows.ctypes.data + 4 * heads * dim
                copy.v = rows.ctypes.data + 4 * (heads + kv_heads) * dim
                library.check(
                    library.lib.oct_attention(pool, ctypes.byref(copy), ctypes.byref(fill))
                )

    def run(self, pool: Pool) -> float:
        """Milliseconds of a step."""
        begin = time.perf_counter()
        code = self.library.lib.oct_step(pool, ctypes.byref(self.program), ctypes.byref(self.batch))
        took = time.perf_counter() - begin
        self.library.check(code)
        return took * 1e3

    def share_prefixes(self, share: bool) -> None:
        self.batch.seqs.share_prefixes = share

    def set_window(self, window: int) -> None:
        for args in self.args:
            args.window = window


def measure(work: Work, pool: Pool, seconds: float) -> tuple[float, float]:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        times.append(work.run(pool))
    return min(times), statistics.median(times)


def measure_in_turns(library: Library, options: argparse.Namespace) -> None:
    print(f"{library.isa}, 1 thread, {options.layers} layers: ms of processor time, of bf16's")
    print(f"{'':18}" + "".join(f"{kv:>16}" for kv in FORMATS))
    with Pool(library, 1) as pool:
        for name, *work in WORKS:
            if options.only not in name:
                continue
            works = {kv: Work(library, options, kv, *work) for kv in FORMATS}
            times: dict[str, list[float]] = {kv: [] for kv in FORMATS}
            for _ in range(options.turns):
                for kv, each in works.items():
                    each.run(pool)
                    begin, steps = time.process_time(), 0
                    while steps == 0 or time.process_time() - begin < options.seconds / 4:
                        each.run(pool)
                        steps += 1
                    times[kv].append((time.process_time() - begin) / steps * 1e3)
            medians = {kv: statistics.median(of) for kv, of in times.items()}
            line = "".join(f"{ms:10.3f} {ms / medians['bf16']:5.2f}" for ms in medians.values())
            print(f"{name:18}{line}", flush=True)


def measure_sharing(library: Library, options: argparse.Namespace) -> None:
    work = Work(
        library, options, options.kv, options.sequences, 1, options.shared + 64, options.shared
    )
    times: dict[bool, list[float]] = {True: [], False: []}
    with Pool(library, 1) as pool:
        for _ in range(options.turns or 9):
            for share, of in times.items():
                work.share_prefixes(share)
                begin = time.process_time()
                work.run(pool)
                of.append((time.process_time() - begin) * 1e3 / options.layers)
    together, apart = min(times[True]), min(times[False])
    print(
        f"{library.isa}, 1 thread, {options.kv} KV, {options.sequences} x decode behind "
        f"{options.shared}: {apart:.3f} ms a layer apart, {together:.3f} together, "
        f"{apart / together:.2f} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--kv", choices=FORMATS, default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each line")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--only", default="", help="lines with this in their name")
    parser.add_argument("--turns", type=int, default=0, help="compare all formats in so many turns")
    parser.add_argument("--shared", type=int, default=0, help="tokens that sequences share")
    parser.add_argument("--sequences", type=int, default=32, help="that share them")
    options = parser.parse_args()
    library = load(options.isa)
    if options.shared:
        measure_sharing(library, options)
        return
    if options.turns:
        measure_in_turns(library, options)
        return
    print(f"{library.isa}, {options.threads} threads, {options.layers} layers, {options.kv} KV")
    print(f"{'':18}{'best ms':>9}{'median':>9}{'write':>9}")
    with Pool(library, options.threads) as pool:
        for name, seqs, new, context in WORKS:
            if options.only not in name:
                continue
            work = Work(library, options, options.kv, seqs, new, context)
            best, median = measure(work, pool, options.seconds)
            work.set_window(1)
            write, _ = measure(work, pool, options.seconds / 2)
            line = f"{name:18}{best:9.3f}{median:9.3f}{write:9.3f}"
            if new == 1:
                gigabytes = work.layer_bytes * options.layers / 1e9
                line += f"   {gigabytes * 1e3:7.1f} MB of KV, {gigabytes / best * 1e3:6.1f} GB/s"
            else:
                seen = sum(range(context - new + 1, context + 1))
                operations = 4 * seen * options.heads * options.dim * options.layers * seqs
                line += f"   {operations / 1e9:7.2f} GFLOP, {operations / best / 1e6:8.0f} GFLOPS"
            print(line)


if __name__ == "__main__":
    main()
