"""How fast the native linear is: against memory with few rows, in operations with many.

    python benchmarks/kernels_linear.py [--threads 2] [--megabytes 60]

One matrix of about ``--megabytes`` stands for the layers of a model. With one row, the time is
compared with that of reading the same bytes, in turns, by as many threads; that reader is a few
lines of C, compiled on the spot. The best of several turns counts, as neighbours only ever slow
one down; so on a busy machine figures of many rows are too low.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
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
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
SECONDS = 0.4  # for one figure

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


def make_call(library: Library, pool: Pool, weight: abi.Weight, rows: int) -> Callable[[], None]:
    x = np.random.default_rng(0).normal(size=(rows, weight.k)).astype(np.float32)
    y = np.empty((rows, weight.n), dtype=np.float32)
    args = abi.LinearArgs(rows=rows, k=weight.k, ldin=weight.k, num_segments=1)
    args.remainder_above = math.inf
    setattr(args, "in", x.ctypes.data)
    args.segments[0] = abi.Segment(weight, None, y.ctypes.data, weight.n)
    kept = (x, y, args)

    def call() -> None:
        library.check(library.lib.oct_linear(pool, ctypes.byref(kept[2])))

    return call


def best_times(*actions: Callable[[], None]) -> list[float]:
    """Seconds of each, in turns."""
    best, end = [float("inf")] * len(actions), time.perf_counter() + SECONDS * len(actions)
    while time.perf_counter() < end:
        for i, action in enumerate(actions):
            start = time.perf_counter()
            action()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--inputs", type=int, default=576)
    options = parser.parse_args()
    library, read = load(), make_reader(options.threads)
    rng = np.random.default_rng(0)
    print(f"{library.isa}, {options.threads} threads, {options.inputs} inputs")
    print(f"{'format':<10}{'GB/s':>6}{'of read':>9}   GOPS per core with rows of")
    print(" " * 28 + "".join(f"{rows:>6}" for rows in ROWS))
    with Pool(library, options.threads) as pool:
        for name, (format, group) in FORMATS.items():
            tile = packing.plain_format(format, 16, options.inputs, group, library).num_bytes
            n = options.megabytes * 1_000_000 // tile * 16
            spec = packing.plain_format(format, n, options.inputs, group, library)
            data = packing.aligned(spec.num_bytes)
            data[:] = np.resize(rng.integers(0, 64, 1 << 16, dtype=np.uint8), len(data))
            weight = spec.as_struct(data.ctypes.data)
            reading, one_row = best_times(
                lambda data=data: read(data), make_call(library, pool, weight, 1)
            )
            line = f"{name:<10}{len(data) / one_row / 1e9:>6.1f}{reading / one_row:>8.0%}  "
            for rows in ROWS:
                # With many rows, a part of the matrix is enough.
                part = spec.as_struct(data.ctypes.data)
                part.n = min(n, 16 * max(1, 200_000 // max(rows, 4)))
                [seconds] = best_times(make_call(library, pool, part, rows))
                operations = 2 * rows * part.n * part.k
                line += f"{operations / seconds / options.threads / 1e9:>6.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
