"""The thread pool: csrc/pool.cpp, from C++ as kernels use it, and through its C interface."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from octavo.base.errors import EngineError
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.library import Pool

CSRC = Path(__file__).parents[3] / "csrc"
LONG = 2**31 - 1  # rounds of barriers: minutes at the least


@pytest.fixture(scope="module")
def stress(compile_stress):
    """``stress(threads, rounds, flags)`` compiles and runs pool_stress.cpp."""
    return compile_stress("pool_stress.cpp")


@pytest.mark.parametrize(("threads", "rounds"), [(1, 2000), (2, 2000), (3, 300), (4, 300)])
def test_it_keeps_its_promises(stress, threads, rounds):
    done = stress(threads, rounds)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_thread_sanitizer_finds_no_race(stress):
    try:
        done = stress(3, 100, flags=["-fsanitize=thread"])
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no thread sanitizer")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_sizes_and_barriers(native, make_pool, threads):
    pool = make_pool(threads)
    assert native.lib.oct_pool_size(pool) == threads
    assert 0 < native.lib.oct_pool_barrier_ns(pool, 100) < 1e8


@pytest.mark.parametrize(("threads", "spin_us"), [(0, 0), (-1, 0), (257, 0), (2, -1)])
def test_impossible_pools(native, threads, spin_us):
    with pytest.raises(EngineError, match=f"a pool of {threads} threads that spin for {spin_us}"):
        Pool(native.library, threads, spin_us)


def test_errors_of_a_call(native):
    assert native.lib.oct_pool_barrier_ns(native.pool, 0) == abi.OCT_ERR_ARGUMENT
    assert "0 rounds" in native.library.last_error()
    assert native.lib.oct_pool_barrier_ns(None, 10) == abi.OCT_ERR_ARGUMENT
    assert "NULL" in native.library.last_error()
    native.lib.oct_abort(None)
    native.lib.oct_pool_free(None)


def test_an_abort_from_another_thread(native, make_pool):
    pool = make_pool(2)
    results = []

    def call():
        results.append(native.lib.oct_pool_barrier_ns(pool, LONG))

    thread = threading.Thread(target=call)
    thread.start()
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
        pool.abort()  # until it has begun
    thread.join(1)
    assert results == [abi.OCT_ERR_ABORTED]
    assert native.lib.oct_pool_barrier_ns(pool, 10) > 0
    with pytest.raises(EngineError, match="aborted"):
        native.check(abi.OCT_ERR_ABORTED)


def test_an_abort_of_nothing_does_nothing(native, make_pool):
    pool = make_pool(2)
    pool.abort()
    assert native.lib.oct_pool_barrier_ns(pool, 10) > 0


@pytest.mark.timing
def test_idle_threads_use_no_processor(native, make_pool):
    pools = [make_pool(3, spin_us=1000), make_pool(2)]
    for pool in pools:
        assert native.lib.oct_pool_barrier_ns(pool, 10) > 0
    time.sleep(0.05)
    begin, used = time.perf_counter(), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.04 * (time.perf_counter() - begin)


def threads_named(prefix: str) -> list[Path]:
    tasks = [task.parent for task in Path("/proc/self/task").glob("*/comm")]
    return [task for task in tasks if (task / "comm").read_text().startswith(prefix)]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_threads_have_names_take_no_signals_and_end_with_the_pool(native):
    before = set(threads_named("octavo-"))
    with Pool(native.library, 3) as pool:
        native.lib.oct_pool_barrier_ns(pool, 10)  # they have begun
        made = set(threads_named("octavo-")) - before
        assert {(task / "comm").read_text().strip() for task in made} == {"octavo-1", "octavo-2"}
        for task in made:
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            blocked = int(status["SigBlk"], 16)
            assert all(blocked >> (signal - 1) & 1 for signal in (1, 2, 10, 15, 17))
    deadline = time.monotonic() + 5  # the kernel may take a moment to forget an ended thread
    while set(threads_named("octavo-")) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threads_named("octavo-")) - before


def test_a_pool_that_is_dropped_is_freed(native):
    pool = Pool(native.library, 2)
    finalizer = pool._free
    del pool
    assert not finalizer.alive


FORK = """
import os, sys
from octavo.kernels.cpu.library import Pool, load
library = load(sys.argv[1])
pool = Pool(library, 2)
assert library.lib.oct_pool_barrier_ns(pool, 100) > 0
for _ in range(2):
    child = os.fork()
    if child == 0:
        assert library.lib.oct_pool_barrier_ns(pool, 100) > 0
        grandchild = os.fork()
        if grandchild == 0:
            pool.close()
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        assert library.lib.oct_pool_barrier_ns(pool, 100) > 0
        pool.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert library.lib.oct_pool_barrier_ns(pool, 100) > 0
print("done")
"""


def test_a_fork_after_use(native):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, native.isa],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout == "done\n", done.stderr
