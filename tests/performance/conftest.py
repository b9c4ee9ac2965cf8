"""What the performance guards share. None of them knows a time that is right or wrong: they count
what does not depend on time, or compare two times of one run.

A bound is far from what was measured (the comment beside it), so that only gross regressions
break it; after a change for the better that is meant to last, move it.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from octavo.bench.offline.session import OfflineSession
from octavo.kernels.cpu import library
from octavo.settings.engine import EngineArgs
from octavo.workload.requests import WorkloadRequest

NEEDS_NATIVE = "no native library was built"


class Prompts:
    """Random prompts, every one new: nothing is found in a prefix cache by chance."""

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        self._count = 0

    def __call__(self, count: int, input_len: int, output_len: int) -> list[WorkloadRequest]:
        self._count += count
        return [
            WorkloadRequest(
                f"{self._count}-{index}",
                prompt_token_ids=tuple(
                    self._random.randrange(1000, 49000) for _ in range(input_len)
                ),
                output_len=output_len,
            )
            for index in range(count)
        ]


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts()


def open_smollm2(path: Any, **settings: Any) -> OfflineSession:
    """SmolLM2 on one thread: a neighbour who takes a core for a while then costs that while, and
    does not keep a second thread waiting at every barrier."""
    limits = {"threads": 1, "max_model_len": 1024, "num_blocks": 256}
    return OfflineSession(EngineArgs(model=str(path), **{**limits, **settings}))


@pytest.fixture(scope="session")
def open_session(smollm2_gguf) -> Callable[..., OfflineSession]:
    return lambda **settings: open_smollm2(smollm2_gguf, **settings)


@pytest.fixture(scope="session")
def native(open_session):
    if not library.runnable():
        pytest.skip(NEEDS_NATIVE)
    with open_session() as session:
        yield session


@pytest.fixture
def program(native, runner_of) -> Any:
    """What the native engine runs, to be counted and slowed down."""
    return runner_of(native.loaded.text_engine.engine).forward.program


@pytest.fixture(scope="session")
def reference(open_session):
    import torch

    threads = torch.get_num_threads()
    with open_session(kernels="reference") as session:
        yield session
    torch.set_num_threads(threads)


class CallCount:
    """Calls of Python functions, and of C functions by Python, in a block."""

    def __init__(self) -> None:
        self.python = self.c = 0

    def __enter__(self) -> CallCount:
        self._before = sys.getprofile()
        sys.setprofile(self._notice)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(self._before)
        self.c -= 1  # sys.setprofile itself

    def _notice(self, frame: object, event: str, argument: object) -> None:
        if event == "call":
            self.python += 1
        elif event == "c_call":
            self.c += 1

    @property
    def total(self) -> int:
        return self.python + self.c


@pytest.fixture
def count_calls() -> Callable[[], CallCount]:
    return CallCount


class CountingLibrary:
    """Stands before a native library and counts the calls of its functions, by name."""

    def __init__(self, lib: Any):
        self._lib = lib
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._lib, name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call


@pytest.fixture
def count_native_calls(program, monkeypatch) -> CountingLibrary:
    counting = CountingLibrary(program.library.lib)
    monkeypatch.setattr(program.library, "lib", counting)
    return counting
