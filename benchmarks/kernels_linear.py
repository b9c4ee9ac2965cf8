"""How fast the native linear is: against memory with few rows, in operations with many.

    python benchmarks/kernels_linear.py [--threads 2] [--megabytes 60]
    python benchmarks/kernels_linear.py --against-bf16 [--inputs 2048] [--rows 64]

One matrix of about ``--megabytes`` stands for the layers of a model. With one row, the time is
compared with that of reading the same bytes, in turns, by as many threads; that reader is a few
lines of C, compiled on the spot. The best of several turns counts, as neighbours only ever slow
one down; so on a busy machine figures of many rows are too low.

With ``--against-bf16``, matrices of the same shape in all formats take turns, with one thread: the
processor time of each as a share of that of bfloat16 in the same turn, median and quartiles. With
one row that is what a format is worth to one stream, with 64 rows to prompts; neighbours change it
little.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from octavo.kernels.cpu import abi, packing
from octavo.kernels.cpu.library import Library, Pool, load

FORMATS = {
    "W4S g32": (abi.OCT_W4S, 32),
    "W4A g32": (abi.OCT_W4A, 32),
    "W4A g128": (abi.OCT_W4A, 128),
    "W8S g32": (abi.OCT_W8S, 32),
    "BF16": (abi.OCT_BF16, 0),
}
# Of the second table: formats, inputs of a group, and whether columns are in another order. What
# becomes of checkpoints is in octavo/kernels/cpu/coded.py.
ALL_FORMATS = {
    "BF16": (abi.OCT_BF16, 0),
    "F16": (abi.OCT_F16, 0),
    "E4M3": (abi.OCT_E4M3, 128),
    "NF4": (abi.OCT_NF4, 64),
    "FP4": (abi.OCT_FP4, 64),
    "W8S g128": (abi.OCT_W8S, 128),
    "W5S g32": (abi.OCT_W5S, 32),
    "W4S g64": (abi.OCT_W4S, 64),
    "desc_act": (abi.OCT_W4S, 64, True),
    "W4A g64": (abi.OCT_W4A, 64),
    "W4F g16": (abi.OCT_W4F, 16),
    "W4F g32": (abi.OCT_W4F, 32),
    "K4A": (abi.OCT_K4A, 32),
    "W3S g64": (abi.OCT_W3S, 64),
    "W3A g32": (abi.OCT_W3A, 32),
    "W3A g64": (abi.OCT_W3A, 64),
    "W2S g64": (abi.OCT_W2S, 64),
    "W2A g32": (abi.OCT_W2A, 32),
    "W2A g64": (abi.OCT_W2A, 64),
    "K2A": (abi.OCT_K2A, 16),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
SECONDS = 0.4  # for one figure
PARAMS = 150_000_000  # of a matrix of the second table: no cache holds them, of 2 bits either
TURNS = 15

READER = """
#include <stdint.h>
uint64_t read_all(const uint64_t* p, int64_t n) {
  uint64_t a[32] = {0}, sum = 0;
  for (int64_t i = 0; i + 32 <= n; i += 32)
    for (int j = 0; j < 32; j++) a[j] ^= p[i + j];
  for (int j = 0; j < 32; j++) sum ^= a[j];
  return sum;
}
"""


def make_reader(num_threads: int) -> Callable[[np.ndarray], None]:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "reader.c"), Path(folder, "reader.so")
        source.write_text(READER)
        command = ["gcc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library]
        subprocess.run(command, check=True)
        read_all = ctypes.CDLL(str(library)).read_all
    read_all.argtypes, read_all.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint64
    threads = ThreadPoolExecutor(num_threads)

    def read(data: np.ndarray) -> None:
        words = data.nbytes // 8 // num_threads
        starts = [data.ctypes.data + 8 * words * i for i in range(num_threads)]
        list(threads.map(lambda start: read_all(start, words), starts))

    return read


def make_call(
    library: Library, pool: Pool, weight: abi.Weight, rows: int, *kept_too: np.ndarray
) -> Callable[[], None]:
    x = np.random.default_rng(0).normal(size=(rows, weight.k)).astype(np.float32)
    y = np.empty((rows, weight.n), dtype=np.float32)
    args = abi.LinearArgs(rows=rows, k=weight.k, ldin=weight.k, num_segments=1)
    args.remainder_above = math.inf
    setattr(args, "in", x.ctypes.data)
    args.segments[0] = abi.Segment(weight, None, y.ctypes.data, weight.n)
    kept = (x, y, args, kept_too)

    def call() -> None:
        library.check(library.lib.oct_linear(pool, ctypes.byref(kept[2])))

    return call


def best_times(*actions: Callable[[], None]) -> list[float]:
    """Seconds of each, in turns."""
    best, end = [float("inf")] * len(actions), time.perf_counter() + SECONDS * len(actions)
    while time.perf_counter() < end:
        for i, action in enumerate(actions):
            best[i] = min(best[i], time_of(action))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2, help="of the first table")
    parser.add_argument("--megabytes", type=int, default=60, help="of the first table")
    parser.add_argument("--inputs", type=int, default=576)
    parser.add_argument("--against-bf16", action="store_true")
    parser.add_argument("--rows", type=int, default=1, help="of the second table")
    parser.add_argument("--formats", help="some of the second table, with commas between them")
    options = parser.parse_args()
    library = load()
    print(f"{library.isa}, {options.inputs} inputs")
    if options.against_bf16:
        names = options.formats.split(",") if options.formats else ALL_FORMATS
        with Pool(library, 1) as pool:
            names = list(dict.fromkeys(["BF16", *names]))
            against_bf16(library, pool, options.inputs, options.rows, names)
    else:
        of_the_machine(library, options)


def against_bf16(library: Library, pool: Pool, k: int, rows: int, names: Sequence[str]) -> None:
    """All formats in turns."""
    n, calls, sizes = max(PARAMS // rows // k // 16, 16) * 16, [], []
    for name in names:
        weight, data = random_weight(library, n, k, *ALL_FORMATS[name])
        calls.append(make_call(library, pool, weight, rows, data))
        sizes.append(len(data))
    clock = time.thread_time
    seconds = np.array([[time_of(call, clock) for call in calls] for _ in range(TURNS)])
    shares = np.quantile(seconds / seconds[:, :1], (0.5, 0.25, 0.75), axis=0)
    print(
        f"{'format':<10}{'bytes':>7}{'time':>7}   of those of bfloat16, rows: {rows}, {TURNS} turns"
    )
    for name, size, (middle, low, high) in zip(names, sizes, shares.T, strict=True):
        print(f"{name:<10}{size / sizes[0]:>7.2f}{middle:>7.2f}   {low:.2f} to {high:.2f}")


def random_weight(
    library: Library, n: int, k: int, format: int, group: int, is_reordered: bool = False
) -> tuple[abi.Weight, np.ndarray]:
    """A packed matrix, and its memory: of bytes that are no subnormal scales or floats, which take
    longer, and of which models have next to none."""
    spec = packing.plain_format(format, n, k, group, library, is_reordered)
    data, rng = packing.aligned(spec.num_bytes), np.random.default_rng(0)
    data[:] = np.resize(rng.integers(32, 96, 1 << 16, dtype=np.uint8), len(data))
    if is_reordered:
        spec.columns(data)[:] = rng.permutation(k)
    return spec.as_struct(data.ctypes.data), data


def time_of(action: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    action()
    return clock() - start


def of_the_machine(library: Library, options: argparse.Namespace) -> None:
    """Bytes a second with one row, operations with more."""
    read = make_reader(options.threads)
    print(f"{options.threads} threads")
    print(f"{'format':<10}{'GB/s':>6}{'of read':>9}   GOPS per core with rows of")
    print(" " * 28 + "".join(f"{rows:>6}" for rows in ROWS))
    with Pool(library, options.threads) as pool:
        for name, (format, group) in FORMATS.items():
            tile = packing.plain_format(format, 16, options.inputs, group, library).num_bytes
            n = options.megabytes * 1_000_000 // tile * 16
            weight, data = random_weight(library, n, options.inputs, format, group)
            reading, one_row = best_times(
                lambda data=data: read(data), make_call(library, pool, weight, 1)
            )
            line = f"{name:<10}{len(data) / one_row / 1e9:>6.1f}{reading / one_row:>8.0%}  "
            for rows in ROWS:
                # With many rows, a part of the matrix is enough.
                part = abi.Weight.from_buffer_copy(weight)
                part.n = min(n, 16 * max(1, 200_000 // max(rows, 4)))
                [seconds] = best_times(make_call(library, pool, part, rows))
                operations = 2 * rows * part.n * part.k
                line += f"{operations / seconds / options.threads / 1e9:>6.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
