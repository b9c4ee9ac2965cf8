from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where kernels run: in Triton's interpreter, or for real."""
    from triton_tools import interpreting

    if request.param == "cuda":
        yield "cuda"
        return
    with interpreting():
        yield "cpu"


@pytest.fixture(scope="session")
def _compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(autouse=True)
def no_cache_of_the_users(_compiled_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests compile is not kept in the user's folder, nor found there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(_compiled_here))
