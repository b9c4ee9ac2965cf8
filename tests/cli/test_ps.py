"""The servers that run here, by the notes that they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from small_server import small_server

from octavo import cli
from octavo.server.running_servers import noted, running_servers

SEVERAL = {
    "data": [
        {
            "id": "a",
            "max_model_len": 64,
            "status": {"value": "loaded"},
            "memory_bytes": {"total": 3 << 20},
            "num_requests": 2,
            "pinned": True,
            "unload_after": None,
        },
        {"id": "b", "max_model_len": None, "status": {"value": "unloaded"}, "num_requests": 0},
    ]
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    return tmp_path


def test_servers_are_listed_with_their_models(capsys):
    with small_server({"/v1/models": SEVERAL}) as server, noted(server.url):
        assert cli.main(["ps"]) == 0
        head, first, second = capsys.readouterr().out.splitlines()
        assert head.split()[:4] == ["URL", "MODEL", "STATE", "MEMORY"]
        assert first.split()[:6] == [server.url, "a", "loaded,", "pinned", "3.0", "MiB"]
        assert second.split()[1:3] == ["b", "unloaded"]
        assert cli.main(["ps", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["servers"]
        assert (found["pid"], found["url"], found["error"]) == (os.getpid(), server.url, None)
    assert cli.main(["ps"]) == 0
    assert "no server runs here" in capsys.readouterr().err


def test_one_model_is_loaded_or_loading(capsys):
    only = {"data": [{"id": "a", "max_model_len": None}]}
    with small_server({"/v1/models": only}) as server:
        assert cli.main(["ps", "--url", server.url, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["servers"]
        assert [(m["name"], m["state"]) for m in found["models"]] == [("a", "loading")]


def test_a_server_that_does_not_answer_is_listed_and_asked_for_is_an_error(capsys):
    with noted("http://127.0.0.1:9"):
        assert cli.main(["ps"]) == 0
        assert "unknown" in capsys.readouterr().out
    assert cli.main(["ps", "--url", "127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_notes_of_ended_processes_and_damaged_ones_are_removed(home):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = home / "servers"
    folder.mkdir()
    note = {"pid": ended.pid, "url": "http://x", "started": 1.0}
    (folder / f"{ended.pid}.json").write_text(json.dumps(note))
    (folder / "7.json").write_text("{")
    (folder / "8.json").write_text(json.dumps({**note, "pid": os.getpid()}))  # not its own
    assert running_servers() == []
    assert list(folder.iterdir()) == []


def test_a_server_runs_also_where_no_note_can_be_written(home):
    (home / "servers").write_text("a file")
    with noted("http://x"):
        assert running_servers() == []
