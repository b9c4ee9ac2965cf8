"""Packed weights on disk: written once, found again, and never mistaken for another model's."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from weights import stored

from octavo.kernels.cpu import abi, pack_cache, packed_weights
from octavo.kernels.cpu.library import Pool, load, runnable
from octavo.kernels.cpu.mapped_memory import let_go
from octavo.kernels.cpu.pack_cache import open_or_pack
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.tensors import BlockTensor
from octavo.system import machine

pytestmark = pytest.mark.skipif(not runnable(), reason="no native library was built")


@pytest.fixture(scope="module")
def pool():
    with Pool(load(), 2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def kept(request):
    """Floats are packed into files too, but where a test is about that."""
    with pytest.MonkeyPatch.context() as patch:
        if "real_rule" not in request.fixturenames:
            patch.setattr(pack_cache, "_is_worth_a_file", lambda *_: True)
        yield


@pytest.fixture
def real_rule() -> None:
    """Whether a file is written is decided as it always is."""


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


def packed(values, model, pool, home=None):
    """The weights, and what progress was made in packing them."""
    calls = []
    result = open_or_pack(
        {name: stored(value) for name, value in values.items()},
        [model],
        load(),
        pool,
        home=home or model.parent.parent / "home",
        progress=lambda *done: calls.append(done),
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
        lambda data: data[:16] + b"\0" * 32 + data[48:],
        lambda data: data[:48] + b"[]" + data[50:],
        lambda data: data[:48] + b"\xff\xfe" + data[50:],
        lambda data: data.replace(b'"layout": "', b'"layout": "x', 1),
        lambda data: data[:4096] + bytes([data[4096] ^ 1]) + data[4097:],  # a bit of a weight
        lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    ],
)
def test_a_damaged_file_is_replaced(model, pool, damage):
    values = weights()
    packed(values, model, pool)
    path = cache_file(model)
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)
    _, calls = packed(values, model, pool)
    assert not calls


def test_what_nobody_touched_is_not_read_through(model, pool, monkeypatch):
    values = weights()
    packed(values, model, pool)
    monkeypatch.setattr(pack_cache, "digest", None)
    assert not packed(values, model, pool)[1]


def test_what_was_touched_is_read_through_once(model, pool, monkeypatch):
    values = weights()
    packed(values, model, pool)
    os.utime(cache_file(model))
    result, calls = packed(values, model, pool)
    assert not calls and is_right(result, values, pool)
    monkeypatch.setattr(pack_cache, "digest", None)
    assert not packed(values, model, pool)[1]


def test_a_change_is_noticed_whatever_its_time_says(model, pool):
    values = weights()
    packed(values, model, pool)
    path = cache_file(model)
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)


def test_packed_weights_that_came_with_the_model_are_not_used(model, pool, tmp_path):
    """All in them is as it should be, but for the weights."""
    packed(weights(1), model, pool, tmp_path / "home of whoever made them")
    values = weights()
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)


def test_a_stolen_digest_does_not_help(model, pool, tmp_path):
    values = weights()
    packed(values, model, pool)
    known = cache_file(model).read_bytes()[16:48]
    packed(weights(1), model, pool, tmp_path / "another home")
    forged = bytearray(cache_file(model).read_bytes())
    forged[16:48] = known
    cache_file(model).write_bytes(forged)
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)


def test_a_note_that_others_could_have_written_is_none(model, pool, tmp_path):
    values = weights()
    packed(values, model, pool)
    (seal,) = (tmp_path / "home").glob("*.seal")
    seal.chmod(0o666)
    assert packed(values, model, pool)[1]
    (seal,) = (tmp_path / "home").glob("*.seal")
    seal.write_text("not json")
    assert packed(values, model, pool)[1]
    assert not packed(values, model, pool)[1]


def test_a_model_that_was_moved_keeps_its_packed_weights(model, pool, tmp_path):
    values = weights()
    packed(values, model, pool)
    model.parent.rename(tmp_path / "moved")
    assert not packed(values, tmp_path / "moved" / model.name, pool)[1]


def test_old_notes_of_models_that_are_gone_are_removed(model, pool, tmp_path):
    packed(weights(), model, pool)
    (gone,) = (tmp_path / "home").glob("*.seal")
    model.parent.rename(tmp_path / "moved")
    (tmp_path / "another").mkdir()
    another = tmp_path / "another" / "weights.safetensors"
    another.write_bytes(b"of another model")
    packed(weights(1), another, pool)
    assert gone.exists()  # the disk may be away
    os.utime(gone, (1, 1))
    cache_file(another).unlink()
    packed(weights(2), another, pool)
    assert not gone.exists() and len(list((tmp_path / "home").glob("*.seal"))) == 2


def test_a_link_is_not_written_through(model, pool, tmp_path):
    (tmp_path / "victim").mkdir()
    cache_file(model).parent.symlink_to(tmp_path / "victim")
    packed(weights(), model, pool)
    assert list((tmp_path / "victim").iterdir()) == []
    assert not packed(weights(), model, pool)[1]


def test_memory_if_nothing_can_be_noted(model, pool, tmp_path, caplog):
    (tmp_path / "home").write_text("a file where the folder would be")
    values = weights()
    for _ in range(2):
        result, calls = packed(values, model, pool)
        assert calls and is_right(result, values, pool)
    assert not cache_file(model).exists() and "packed at every start" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interruption_leaves_nothing(model, pool, monkeypatch, error):
    def interrupted(*arguments):
        raise error

    monkeypatch.setattr(packed_weights, "pack_into", interrupted)
    with pytest.raises(error):
        packed(weights(), model, pool)
    assert list(cache_file(model).parent.iterdir()) == []


def test_what_a_killed_process_left_is_taken_away(model, pool):
    """Unless its process goes on."""
    folder = cache_file(model).parent
    folder.mkdir()
    left = folder / f"{cache_file(model).name}.x.octavo.part"
    held = folder / f"{cache_file(model).name}.y.octavo.part"
    for path in (left, held):
        path.write_bytes(b"half of it")
        os.utime(path, (1, 1))
    with open(held, "rb") as process:
        fcntl.flock(process, fcntl.LOCK_EX)
        packed(weights(), model, pool)
    assert sorted(folder.iterdir()) == sorted([cache_file(model), held])


def test_the_digest_does_not_depend_on_threads():
    content = np.arange(40 << 20, dtype=np.uint8)
    whole = pack_cache.digest(b"header", content, 1)
    assert pack_cache.digest(b"header", content, 3) == whole
    for header, other in (
        (b"headex", content),
        (b"header", content[:-1]),
        (b"header", content[1:]),
    ):
        assert pack_cache.digest(header, other, 1) != whole


def test_another_place_if_the_folder_cannot_be_written(model, pool, tmp_path):
    cache_file(model).parent.write_text("a file where the folder would be")
    values = weights()
    home = tmp_path / "elsewhere"
    result, calls = packed(values, model, pool, home)
    assert calls and is_right(result, values, pool)
    _, calls = packed(values, model, pool, home)
    assert not calls
    assert sorted(path.suffix for path in home.iterdir()) == [".seal", ".v16"]


def test_a_folder_that_the_environment_names_is_the_only_place(model, pool, tmp_path, monkeypatch):
    named = tmp_path / "named"
    monkeypatch.setenv("OCTAVO_PACKED_DIR", str(named))
    values = weights()
    result, calls = packed(values, model, pool, tmp_path / "unused")
    assert calls and is_right(result, values, pool)
    _, calls = packed(values, model, pool)
    assert not calls
    assert sorted(path.suffix for path in named.iterdir()) == [".seal", ".v16"]
    assert not cache_file(model).exists() and not (tmp_path / "unused").exists()


def test_memory_if_nothing_can_be_written(model, pool, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_cache.os, "posix_fallocate", full)
    values = weights()
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)
    assert list(cache_file(model).parent.iterdir()) == []  # no piece is left behind


def test_a_system_that_cannot_reserve_space_gets_it_written(model, pool, monkeypatch):
    """As macOS: the file is as long, and as right."""
    monkeypatch.delattr(pack_cache.os, "posix_fallocate")
    values = weights()
    result, calls = packed(values, model, pool)
    assert calls and is_right(result, values, pool)
    size = cache_file(model).stat().st_size
    result, calls = packed(values, model, pool)
    assert not calls and is_right(result, values, pool)
    monkeypatch.undo()
    cache_file(model).unlink()
    packed(values, model, pool)
    assert cache_file(model).stat().st_size == size


def test_a_model_without_files_stays_in_memory(pool, tmp_path):
    values = weights()
    kept = {name: stored(value) for name, value in values.items()}
    result = open_or_pack(kept, [], load(), pool, home=tmp_path / "unused")
    assert is_right(result, values, pool) and not (tmp_path / "unused").exists()


def quantized() -> dict[str, BlockTensor]:
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (32, 34 * 8), np.uint8))
    return {"c.weight": BlockTensor(GGMLType.Q8_0, rows, (32, 256))}


@pytest.mark.usefixtures("real_rule")
def test_a_model_of_floats_is_packed_into_memory(model, pool):
    values = weights()
    for _ in range(2):
        result, calls = packed(values, model, pool)
        assert calls and is_right(result, values, pool)
    assert not cache_file(model).exists()


@pytest.mark.usefixtures("real_rule")
def test_a_model_that_is_mostly_quantized_is_kept_whole(model, pool):
    values = weights() | quantized()
    packed(values, model, pool)
    result, calls = packed(values, model, pool)
    assert not calls and is_right(result, weights(), pool)


@pytest.mark.usefixtures("real_rule")
def test_floats_that_memory_would_not_hold_are_kept(model, pool, monkeypatch):
    nothing = machine.Memory(total=1 << 40, available=0, limit=None)
    monkeypatch.setattr(pack_cache.machine, "memory", lambda: nothing)
    packed(weights(), model, pool)
    assert cache_file(model).exists()


@pytest.mark.usefixtures("real_rule")
def test_floats_are_kept_in_a_folder_that_the_environment_names(model, pool, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_PACKED_DIR", str(tmp_path / "named"))
    packed(weights(), model, pool)
    assert not packed(weights(), model, pool)[1]


def test_rows_that_are_gathered_are_left_in_the_file(model, pool):
    values = weights() | quantized()
    given = {name: stored(value) for name, value in values.items()}
    result = open_or_pack(given, [model], load(), pool, home=None, gathered={"c.weight"})
    struct = result.struct("c.weight")
    assert struct.format == abi.OCT_STORED + GGMLType.Q8_0
    assert struct.data == given["c.weight"].data.ctypes.data
    assert is_right(result, weights(), pool)


def resident_kb(path) -> int:
    """Of the mappings of a file in this process."""
    sizes, is_its = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_its = line.endswith(str(path))
        elif is_its and line.startswith("Rss:"):
            sizes.append(int(line.split()[1]))
    return sum(sizes)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_what_has_been_packed_is_let_go(tmp_path):
    path, size = tmp_path / "file", 1 << 20
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path.write_bytes(content.tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = np.frombuffer(mapped, np.uint8, size - 200, 100).reshape(-1, 4)
    expected, before = view.copy(), resident_kb(path)
    let_go(view)
    assert resident_kb(path) < before / 4
    np.testing.assert_array_equal(view, expected)
    let_go(content)  # memory that nothing would bring back
    assert content.tobytes() == path.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_packing_holds_a_piece_at_a_time(model, pool, monkeypatch):
    """Of the model's file and of the new one, while it goes on and when it is done."""
    monkeypatch.setattr(packed_weights, "_PIECE_BYTES", 1 << 18)
    size = 1024 * 1024 * 4
    model.write_bytes(os.urandom(size))
    with model.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = np.frombuffer(mapped, np.uint8).reshape(1024, 4096)
    held = []

    def progress(*_):
        held.append((resident_kb(model), resident_kb(written())))

    def written():
        return next(cache_file(model).parent.iterdir())

    weight = StoredWeight(GGMLType.F32, data, (1024, 1024))
    home = model.parent.parent / "home"
    result = open_or_pack({"a": weight}, [model], load(), pool, home=home, progress=progress)
    assert len(held) == 16
    assert max(max(each) for each in held) < 1024 and resident_kb(cache_file(model)) < 1024
    np.testing.assert_array_equal(unpacked(result, "a", pool).numpy(), data.view("<f4"))
