from __future__ import annotations

import json
import stat

import pytest

from octavo.base.errors import BenchmarkError
from octavo.measure.results import write_bytes, write_json, write_json_lines


def test_files_are_made_with_their_folders(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"é": [1, None]})
    assert json.loads(path.read_text()) == {"é": [1, None]}
    assert "é" in path.read_text()
    write_json_lines(path, [{"a": 1}, {"b": 2}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"b": 2}]
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_what_is_no_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "b.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "b.json"
    write_json(path, {"a": 1})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.base.files.os.replace", fail)
    with pytest.raises(BenchmarkError, match=r"b\.json cannot be written: No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_place_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchmarkError, match="cannot be written"):
        write_bytes(tmp_path / "file" / "below", b"")
