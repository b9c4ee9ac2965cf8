from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import cli, hub
from octavo.hub import store
from octavo.hub.store import StoredFile


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def stored(home: Path) -> Path:
    """A model of 2048 bytes in the store, as ``smollm2-135m``."""
    folder = store.staging_folder("x")
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"G" * 2048)
    model = store.publish(
        folder,
        "smollm2-135m",
        entry="model.gguf",
        files=(StoredFile("model.gguf", 2048, "ab" * 32),),
        license="Apache-2.0",
        source="test",
    )
    return model.path


def test_models_of_an_empty_home(home: Path, capsys) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "LICENSE", "WHERE"]
    assert lines[1].split()[:3] == ["smollm2-135m", "93.8", "MiB"]
    assert lines[1].endswith("not fetched yet")
    assert not home.exists()  # looking does not write


def test_models_lists_path_and_size(stored: Path, capsys) -> None:
    cli.main(["models"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["smollm2-135m", "2.0", "KiB", "Apache-2.0", str(stored)]
    assert lines[2].startswith("gemma3-270m")


def test_models_json(stored: Path, home: Path, capsys) -> None:
    assert cli.main(["models", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["home"] == str(home)
    (model,) = document["models"]
    assert (model["name"], model["path"], model["bytes"]) == ("smollm2-135m", str(stored), 2048)
    assert {entry["name"] for entry in document["available"]} == {*hub.CATALOG} - {"smollm2-135m"}


def test_pull_of_what_is_here_prints_the_path(stored: Path, capsys) -> None:
    assert cli.main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr() == (f"{stored}\n", "")
    assert cli.main(["pull", "smollm2-135m", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(stored)
    assert document["sha256"] == {"model.gguf": "ab" * 32}


def test_pull_without_accepting_the_terms(home: Path, capsys) -> None:
    assert cli.main(["pull", "gemma3-270m"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "https://ai.google.dev/gemma/terms" in err
    assert "octavo pull gemma3-270m --accept-terms" in err


def test_pull_shows_the_terms_and_quiet_progress(home: Path, capsys, monkeypatch) -> None:
    def pull(name: str, *, accept_terms: bool, verify: bool, progress) -> Path:
        assert accept_terms and not verify
        for done in (10, 20, 40):
            progress(done, 40)
        return home / "x.gguf"

    monkeypatch.setattr(hub, "pull", pull)
    assert cli.main(["pull", "gemma3-270m", "--accept-terms"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{home / 'x.gguf'}\n"
    first, *_, last = captured.err.splitlines()
    assert first == "gemma3-270m: Gemma Terms of Use, https://ai.google.dev/gemma/terms"
    assert last == "fetching gemma3-270m (40 B)"


def test_rm(stored: Path, capsys) -> None:
    assert cli.main(["rm", "smollm2-135m", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "smollm2-135m" and document["freed_bytes"] > 2048
    assert not stored.exists()
    assert cli.main(["rm", "smollm2-135m"]) == 1
    assert "not among the fetched models" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["pull", "rm"])
def test_name_is_needed(command: str, capsys) -> None:
    assert cli.main([command]) == 2
