from __future__ import annotations

import json
import struct
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.base.errors import BenchmarkError
from octavo.quality import logit_file
from octavo.quality.divergence import kl_divergence
from octavo.quality.logit_file import MAX_DISTANCE, LogitFile, LogitFileWriter, encode_row
from octavo.quality.scoring import log_sum_of
from octavo.quality.windows import ScoringWindows, cut

VOCAB = 301


@pytest.fixture
def windows() -> ScoringWindows:
    return cut(np.random.default_rng(1).integers(0, VOCAB, 30), 8)


@pytest.fixture
def logits(windows: ScoringWindows) -> np.ndarray:
    rng = np.random.default_rng(2)
    return rng.normal(scale=5, size=(windows.num_scored, VOCAB)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path, windows, logits, to_row) -> Path:
    """A file with the rows of ``logits``, written in a disorder."""
    path = tmp_path / "base.logits"
    with LogitFileWriter(path, windows, VOCAB, "tiny") as writer:
        for number in np.random.default_rng(3).permutation(windows.num_scored).tolist():
            assert not path.exists()
            writer.take(to_row(number, logits[number], target=number % VOCAB))
        writer.finish()
    return path


def test_a_round_trip(path, windows, logits) -> None:
    file = LogitFile(path)
    header = file.header
    assert (header.model, header.vocab_size, header.num_scored) == ("tiny", VOCAB, 9)
    assert np.array_equal(file.windows.token_ids, windows.token_ids)
    file.check_fits(windows, VOCAB)
    exact = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    targets = np.arange(windows.num_scored)
    np.testing.assert_allclose(file.nll, -exact[targets, targets % VOCAB], rtol=1e-6)
    for number, row in enumerate(exact):
        top, distances = file.distances(number)
        assert top == row.argmax()
        read = -distances - log_sum_of(distances)
        step = (row.max() - row.min()) / 65535
        assert np.abs(read - row).max() <= 1.02 * step  # half of it twice, and float32
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1.0, 20.0, 1e4])
def test_what_the_coding_adds_to_a_divergence(scale: float, to_row) -> None:
    """At most h^2 / 2 for rows of any range, outliers, ties and all."""
    rng = np.random.default_rng(4)
    bound = (MAX_DISTANCE / 65535 * 0.51) ** 2 / 2
    for _ in range(20):
        row = to_row(0, rng.normal(scale=scale, size=5000), 0)
        step, codes = encode_row(row.distances)
        coded = codes * np.float64(step)
        near = row.distances <= MAX_DISTANCE
        assert np.abs(coded - row.distances)[near].max() <= 0.51 * MAX_DISTANCE / 65535
        assert (codes[~near] == 65535).all()
        exact = row.distances.astype(np.float64)
        added = kl_divergence(exact, row.log_sum, coded, log_sum_of(coded))
        assert 0 <= added <= bound
        back = kl_divergence(coded, log_sum_of(coded), exact, row.log_sum)
        assert 0 <= back <= bound


def test_nothing_is_left_of_what_was_not_finished(tmp_path, windows, logits, to_row) -> None:
    path = tmp_path / "base.logits"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), LogitFileWriter(path, windows, VOCAB, "x") as writer:
        writer.take(to_row(0, logits[0], 0))
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"


def test_no_room(tmp_path, windows, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(logit_file.shutil, "disk_usage", lambda path: usage(9, 8, 5_000))
    with pytest.raises(BenchmarkError, match=r"0\.00 GB are free there: lower max_tokens"):
        LogitFileWriter(tmp_path / "base", windows, VOCAB, "x")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path, windows) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BenchmarkError, match="cannot be written"):
        LogitFileWriter(tmp_path / "file" / "base", windows, VOCAB, "x")


def edit_header(content: bytes, **changes) -> bytes:
    """The same file with other words in its header; None takes a field away."""
    (size,) = struct.unpack("<I", content[8:12])
    header = json.loads(content[12 : 12 + size]) | changes
    header = {name: value for name, value in header.items() if value is not None}
    return content[:12] + json.dumps(header).encode().ljust(size) + content[12 + size :]


def body(content: bytes) -> int:
    return 12 + struct.unpack("<I", content[8:12])[0]


# What is done to a good file, and what must be said of it.
DAMAGE = {
    "empty": (lambda c: b"", "is no logit file"),
    "another format": (lambda c: b"_logits_" + c[8:], "is no logit file"),
    "magic alone": (lambda c: c[:8], "ends within its header"),
    "half a header": (lambda c: c[:40], "ends within its header"),
    "a huge header": (lambda c: c[:8] + b"\xff" * 4 + c[12:], "ends within its header"),
    "no JSON": (lambda c: c[:12] + b"x" + c[13:], "header is not JSON"),
    "no text": (lambda c: c[:12] + b"\xff" + c[13:], "header is not JSON"),
    "another version": (lambda c: edit_header(c, version=2), "version 2 of the format"),
    "no version": (lambda c: edit_header(c, version=None), "version None of the format"),
    "a field less": (lambda c: edit_header(c, ctx=None), "the fields that it should"),
    "a field more": (lambda c: edit_header(c, more=1), "the fields that it should"),
    "another type": (lambda c: edit_header(c, ctx="8"), "ctx of its header"),
    "true": (lambda c: edit_header(c, ctx=True), "ctx of its header"),
    "another score": (lambda c: edit_header(c, score="odd"), "out of range"),
    "no windows": (lambda c: edit_header(c, num_windows=0, num_scored=0), "out of range"),
    "huge counts": (lambda c: edit_header(c, vocab_size=10**18), "out of range"),
    "other counts": (lambda c: edit_header(c, num_scored=10), "contradict"),
    "another size": (lambda c: edit_header(c, vocab_size=300), "bytes and should have"),
    "a byte less": (lambda c: c[:-1], "bytes and should have"),
    "a byte more": (lambda c: c + b"0", "bytes and should have"),
    "nothing but a header": (lambda c: c[: body(c)], "bytes and should have"),
    "another token": (lambda c: c[: body(c)] + b"\x7f" + c[body(c) + 1 :], "its tokens are not"),
    "another hash": (lambda c: edit_header(c, tokens_sha256="0" * 64), "its tokens are not"),
    "NaN": (
        lambda c: c[: body(c) + 96] + struct.pack("<f", float("nan")) + c[body(c) + 100 :],
        "a log-probability in it is none",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(path, name) -> None:
    damage, message = DAMAGE[name]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BenchmarkError, match=message) as caught:
        LogitFile(path)
    assert str(path) in str(caught.value) and "make it again with --save-base" in str(caught.value)


def test_any_cut_and_any_flipped_byte_is_an_error_of_ours(path, logits) -> None:
    """Or goes unnoticed; but nothing else is raised."""
    content = path.read_bytes()
    rng = np.random.default_rng(5)
    for place in [*range(0, body(content) + 200, 3), *rng.integers(0, len(content), 200).tolist()]:
        flipped = content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]
        for damaged in (content[:place], flipped):
            path.write_bytes(damaged)
            try:
                file = LogitFile(path)
                for number in range(len(file.nll)):
                    file.distances(number)
            except BenchmarkError:
                pass


def test_a_row_that_cannot_be(path, windows) -> None:
    content = path.read_bytes()
    row_bytes = 8 + 2 * VOCAB
    last = len(content) - row_bytes
    for place, value in ((0, struct.pack("<i", VOCAB)), (4, struct.pack("<f", float("nan")))):
        path.write_bytes(content[: last + place] + value + content[last + place + 4 :])
        file = LogitFile(path)
        file.distances(0)
        with pytest.raises(BenchmarkError, match="row 8 of it cannot be"):
            file.distances(8)


def test_no_file(tmp_path) -> None:
    with pytest.raises(BenchmarkError, match="nowhere cannot be read: No such file"):
        LogitFile(tmp_path / "nowhere")
    with pytest.raises(BenchmarkError, match="cannot be read: Is a directory"):
        LogitFile(tmp_path)


def test_a_file_of_something_else(path, windows) -> None:
    file = LogitFile(path)
    tokens = np.concatenate([windows.token_ids.ravel(), np.zeros(8, int)])
    for other, vocab_size, message in (
        (windows, VOCAB + 1, "of a model with 301 tokens .tiny., this one has 302"),
        (cut(tokens, 4), VOCAB, "with ctx 8, this run has 4: leave out --ctx"),
        (cut(tokens, 8, score="all"), VOCAB, "with score half, this run has all"),
        (cut(tokens, 8), VOCAB, "with windows 3, this run has 4"),
    ):
        with pytest.raises(BenchmarkError, match=message):
            file.check_fits(other, vocab_size)
    tokens[13] += 1
    with pytest.raises(BenchmarkError, match="made from other tokens, from number 13 on"):
        file.check_fits(cut(tokens[:24], 8), VOCAB)
