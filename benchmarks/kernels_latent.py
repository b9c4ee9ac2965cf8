"""What native latent attention costs, beside the same heads with keys and values of their own.

    python benchmarks/kernels_latent.py
    python benchmarks/kernels_latent.py --heads 128 --layers 2 --only "decode"

Sizes of a layer are DeepSeek-V2's and V3's: rows of 512 and 64 numbers, queries of 128 and 64,
values of 128; ``--heads`` 16 is V2-Lite, 64 Kimi K2, 128 V2 and V3. ``expanded`` is
``oct_attention`` with as many key heads as query heads, of 160 numbers each, which is as many as
keys of 192 and values of 128 have together; it does not make them of latents, as nobody would
twice. Each layer has KV memory of its own. Prints milliseconds of processor time of one thread,
which a machine with others on it disturbs least, the median of some turns; and the megabytes of KV
that a step reads of both.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

import numpy as np
from kernels_attention import FORMATS, Work

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.latent_weights import as_read
from octavo.kernels.cpu.library import Library, Pool, load

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
EXPANDED_DIM = (NOPE + ROPE + VALUE) // 2
BLOCK_SIZE = 32
WEIGHTS = {"bf16": abi.OCT_BF16, "f16": abi.OCT_F16, "f32": abi.OCT_F32}
WORKS = [
    ("decode @512", 1, 1, 512),
    ("decode @2048", 1, 1, 2048),
    ("decode @8192", 1, 1, 8192),
    ("8 x decode @1024", 8, 1, 1024),
    ("prefill 512", 1, 512, 512),
    ("prefill 2048", 1, 2048, 2048),
    ("prefill 4096", 1, 4096, 4096),
]


class LatentWork(Work):
    """A step of latent attention nodes only."""

    def __init__(  # of another kind of memory
        self,
        library: Library,
        options: argparse.Namespace,
        kv: str,
        seqs: int,
        new: int,
        context: int,
    ):
        self.library = library
        heads, layers = options.heads, options.layers
        rng = np.random.default_rng(0)
        blocks = -(-context // BLOCK_SIZE)
        tables = rng.permutation(seqs * blocks).astype(np.int32).reshape(seqs, blocks)
        tokens = seqs * new
        self.ints = [
            (np.arange(seqs + 1) * new).astype(np.int32),
            np.full(seqs, context, np.int32),
            tables,
            np.zeros(tokens, np.int32),
        ]
        self.floats = [
            rng.standard_normal((tokens, heads * (NOPE + ROPE)), np.float32),
            rng.standard_normal((tokens, RANK + ROPE), np.float32),
            np.ones(RANK, np.float32),
            rng.standard_normal((context, ROPE), np.float32),
            np.empty((tokens, heads * VALUE), np.float32),
        ]
        q, ckv, norm, cos_sin, out = (each.ctypes.data for each in self.floats)
        row = library.check(library.lib.oct_latent_row_bytes(FORMATS[kv], RANK, ROPE))
        self.layer_bytes = seqs * blocks * BLOCK_SIZE * row
        # Numbers that can be: rows of 0x2f2f... are small floats, in every format.
        self.kv = np.full((layers, self.layer_bytes + 4096), 0x2F, np.uint8)
        format = WEIGHTS[options.weights]
        shapes = (heads, NOPE, RANK), (heads, RANK, VALUE)
        self.weights = [
            [as_read(rng.standard_normal(shape, np.float32) / 16, format) for shape in shapes]
            for _ in range(layers)
        ]
        self.args = [
            abi.LatentArgs(
                num_heads=heads,
                rank=RANK,
                rope_dim=ROPE,
                nope_dim=NOPE,
                value_dim=VALUE,
                kv_format=FORMATS[kv],
                rope_interleaved=1,
                weight_format=format,
                scale=(NOPE + ROPE) ** -0.5,
                eps=1e-6,
                norm=norm,
                cos_sin=cos_sin,
                key_up=keys.ctypes.data,
                value_up=values.ctypes.data,
                q=q,
                ckv=ckv,
                ldq=heads * (NOPE + ROPE),
                ldckv=RANK + ROPE,
                kv=(memory.ctypes.data + 63) // 64 * 64,
                kv_block_bytes=BLOCK_SIZE * row,
                out=out,
                ldo=heads * VALUE,
                num_blocks=seqs * blocks,
            )
            for memory, (keys, values) in zip(self.kv, self.weights, strict=True)
        ]
        nodes = (abi.Node * layers)()
        for node, args in zip(nodes, self.args, strict=True):
            node.op, node.args = abi.OCT_OP_LATENT, ctypes.addressof(args)
        self.program = abi.Program(nodes=nodes, num_nodes=layers, vocab=1, max_tokens=tokens)
        self.batch = abi.Batch(num_multi_steps=1, token_ids=self.ints[3].ctypes.data)
        self.batch.seqs = abi.Sequences(
            seqs,
            tokens,
            *(array.ctypes.data for array in self.ints[:3]),
            table_stride=blocks,
            block_size=BLOCK_SIZE,
        )


def measure(works: list[Work], pool: Pool, seconds: float, turns: int) -> list[float]:
    """Milliseconds of a step of each, in turns."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(turns):
        for work, found in zip(works, times, strict=True):
            work.run(pool)
            begin, steps = time.process_time(), 0
            while steps == 0 or time.process_time() - begin < seconds:
                work.run(pool)
                steps += 1
            found.append((time.process_time() - begin) / steps * 1e3)
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv", choices=("bf16", "f32", "int8", "fp8"), default="bf16")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="what U and V are in")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--only", default="", help="lines with this in their name")
    options = parser.parse_args()
    options.kv_heads, options.dim, options.threads = options.heads, EXPANDED_DIM, 1
    library = load(options.isa)
    kinds = f"{options.kv} KV, {options.weights} weights"
    print(f"{library.isa}, 1 thread, {options.heads} heads, {kinds}")
    print(f"{'ms of a layer':18}{'latent':>9}{'expanded':>10}{'MB of KV':>10}{'expanded':>10}")
    with Pool(library, 1) as pool:
        for name, *sizes in WORKS:
            if options.only not in name:
                continue
            works = [kind(library, options, options.kv, *sizes) for kind in (LatentWork, Work)]
            times = measure(works, pool, options.seconds, options.turns)
            latent, expanded = (each / options.layers for each in times)
            line = "".join(f"{work.layer_bytes / 1e6:10.1f}" for work in works)
            print(f"{name:18}{latent:9.3f}{expanded:10.3f}{line}", flush=True)


if __name__ == "__main__":
    main()
