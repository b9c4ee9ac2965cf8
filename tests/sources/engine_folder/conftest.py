from __future__ import annotations

from pathlib import Path

import pytest

from octavo.kernels.cpu import library
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder.writer import build_engine_folder


@pytest.fixture(autouse=True)
def _needs_native() -> None:
    if not library.runnable():
        pytest.skip("no native library was built")


@pytest.fixture(scope="session")
def tiny_engine(tiny_model, tmp_path_factory) -> Path:
    """An engine folder of the tiny model. Not to be written to."""
    if not library.runnable():
        pytest.skip("no native library was built")
    out = tmp_path_factory.mktemp("engines") / "tiny"
    build_engine_folder(EngineArgs.from_kwargs(str(tiny_model)), out)
    return out
