"""Packed weights on disk: written once, found again, and never mistaken for another model's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import pack_cache
from octavo.kernels.cpu.library import Pool, load, runnable
from octavo.kernels.cpu.pack_cache import open_or_pack

pytestmark = pytest.mark.skipif(not runnable(), reason="no native library was built")


@pytest.fixture(scope="module")
def pool():
    with Pool(load(), 2) as pool:
        yield pool


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model" / "weights.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"the bytes of a model")
    return path


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(20, 33, generator=generator),
        "b.weight": torch.randn(7, 64, generator=generator).bfloat16(),
    }


def packed(values, model, pool, **options):
    calls = []
    result = open_or_pack(
        values, [model], load(), pool, progress=lambda *done: calls.append(done), **options
    )
    return result, calls


def unpacked(result, name, pool) -> torch.Tensor:
    struct = result.struct(name)
    out = np.zeros((struct.n, struct.k), dtype=np.float32)
    load().check(load().lib.oct_unpack(pool, struct, out.ctypes.data))
    return torch.from_numpy(out)


def is_right(result, values, pool) -> bool:
    return all(torch.equal(unpacked(result, n, pool), w.float()) for n, w in values.items())


def cache_file(model: Path) -> Path:
    return model.parent / ".octavo" / "weights.safetensors.v16"


def test_the_second_start_packs_nothing(model, pool):
    values = weights()
    first, calls = packed(values, model, pool)
    assert is_right(first, values, pool) and calls[-1][0] == calls[-1][1] == first.num_bytes
    second, calls = packed(values, model, pool)
    assert is_right(second, values, pool) and not calls
    assert second.struct("a.weight").data % 64 == 0
    assert [path.name for path in cache_file(model).parent.iterdir()] == [cache_file(model).name]


def test_a_changed_model_is_packed_again(model, pool):
    packed(weights(), model, pool)
    model.write_bytes(b"the bytes of a MODEL")
    os.utime(model, ns=(1, 1))
    values = weights(1)
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)


def test_a_model_that_was_only_touched_is_not(model, pool):
    packed(weights(), model, pool)
    os.utime(model, ns=(12345, 12345))
    _, calls = packed(weights(), model, pool)
    assert not calls


def test_other_shapes_are_not_mistaken(model, pool):
    packed(weights(), model, pool)
    values = {"a.weight": torch.randn(20, 34)}
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:11],
        lambda data: data[:5000],
        lambda data: data[:-1],
        lambda data: b"octavo17" + data[8:],
        lambda data: data[:8] + b"\xff" * 8 + data[16:],
        lambda data: data[:16] + b"[]" + data[18:],
        lambda data: data[:16] + b"\xff\xfe" + data[18:],
        lambda data: data.replace(b'"layout": "', b'"layout": "x', 1),
    ],
)
def test_a_damaged_file_is_replaced(model, pool, damage):
    values = weights()
    packed(values, model, pool)
    path = cache_file(model)
    path.write_bytes(damage(path.read_bytes()))
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)
    _, calls = packed(values, model, pool)
    assert not calls


def test_another_place_if_the_folder_cannot_be_written(model, pool, tmp_path):
    cache_file(model).parent.write_text("a file where the folder would be")
    values = weights()
    fallback = tmp_path / "elsewhere"
    result, calls = packed(values, model, pool, fallback=fallback)
    assert calls and is_right(result, values, pool)
    _, calls = packed(values, model, pool, fallback=fallback)
    assert not calls
    assert len(list(fallback.iterdir())) == 1


def test_a_folder_that_the_environment_names_is_the_only_place(model, pool, tmp_path, monkeypatch):
    named = tmp_path / "named"
    monkeypatch.setenv("OCTAVO_PACKED_DIR", str(named))
    values = weights()
    result, calls = packed(values, model, pool, fallback=tmp_path / "unused")
    assert calls and is_right(result, values, pool)
    _, calls = packed(values, model, pool)
    assert not calls
    assert len(list(named.iterdir())) == 1
    assert not cache_file(model).exists() and not (tmp_path / "unused").exists()


def test_memory_if_nothing_can_be_written(model, pool, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_cache.os, "posix_fallocate", full)
    values = weights()
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)
    assert list(cache_file(model).parent.iterdir()) == []  # no piece is left behind


def test_a_model_without_files_stays_in_memory(pool, tmp_path):
    values = weights()
    result = open_or_pack(values, [], load(), pool, fallback=tmp_path / "unused")
    assert is_right(result, values, pool) and not (tmp_path / "unused").exists()
