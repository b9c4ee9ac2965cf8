"""The name of a server, and what it logs at its start."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import subprocess
import sys

import httpx
import pytest
from scripted_engine import READY, SILENCE, ScriptedLauncher

from octavo.base.errors import ConfigError, EngineError, ModelNotFoundError
from octavo.server import run
from octavo.server.api.openai import models
from octavo.server.engine.generation import EngineState
from octavo.server.http.errors import HttpError
from octavo.server.http.listener import listen
from octavo.server.one_model import OneModel
from octavo.server.served_model import ModelIdentity, ServedModel, ServerCommons, model_name
from octavo.server.server import OctavoServer, without_a_key
from octavo.server.settings import ServerSettings
from octavo.settings.engine import EngineArgs


def test_a_model_is_called_by_the_last_part_of_its_path(tmp_path, monkeypatch):
    folder = tmp_path / "secret" / "my-model"
    folder.mkdir(parents=True)
    assert model_name(str(folder)) == model_name(f"{folder}/") == "my-model"
    monkeypatch.chdir(folder)
    assert model_name(".") == "my-model"
    assert model_name("someone/some-model") == "someone/some-model"


def test_a_path_may_be_asked_for_and_is_never_shown(
    fake_engine, create_service, create_test_app, tmp_path
):
    path = str(tmp_path / "my-model")
    service = create_service(fake_engine, model_argument=path)
    service.check_model(path)
    with pytest.raises(HttpError, match="does not exist"):
        service.check_model(str(tmp_path))
    transport = httpx.ASGITransport(create_test_app(models.create_router(service)))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/v1/models")

    response = asyncio.run(ask())
    assert str(tmp_path) not in response.text
    assert [model["id"] for model in response.json()["data"]] == ["tiny", "also-tiny"]


def test_an_open_server_on_a_network_says_so_and_what_to_do():
    text = without_a_key("http://0.0.0.0:8000")
    for word in ("NO API KEY", "http://0.0.0.0:8000", "--api-key-file", "--allowed-host"):
        assert word in text


def test_one_engine_needs_nothing_of_several():
    code = (
        "import sys, octavo.server.run, octavo.server.server, octavo.server.one_model; "
        "print(*(name for name in sys.modules if name.startswith('octavo.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    loaded = done.stdout.split()
    assert "octavo.server.engine.client" in loaded, done.stderr
    assert not [name for name in loaded if "replica" in name and "server" in name]
    assert not [name for name in loaded if "registry" in name and "server" in name]


# -- the start ---------------------------------------------------------------------------------


def start(tiny_model, launcher, while_it_serves=None, **settings):
    """Run a server on a free port; what it returns, or raises."""
    chosen = ServerSettings(port=0, **settings)

    async def run(listener):
        commons = ServerCommons.create(chosen)
        model = ServedModel(
            ModelIdentity(("tiny",), tiny_model),
            EngineArgs(str(tiny_model)),
            launcher,
            commons,
            chat_template=chosen.chat_template,
        )
        server = OctavoServer(chosen, listener, commons.drain_state, OneModel(model))
        running = asyncio.create_task(server.run())
        if while_it_serves is not None:
            await while_it_serves(server)
        return await asyncio.wait_for(running, 20)

    with listen(chosen) as listener:
        return asyncio.run(run(listener))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}", "unexpected|Unexpected|expected"),
        ("{{ messages[7].content.nothing.more }}", "line 1"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_a_template_that_does_not_work_ends_the_start(tiny_model, tmp_path, template, words):
    """And not every chat; however long the model takes to load."""
    file = tmp_path / "template.jinja"
    file.write_text(template)
    launcher = ScriptedLauncher(SILENCE)
    with pytest.raises(ConfigError, match=f"chat_template {file} does not work: .*({words})"):
        start(tiny_model, launcher, chat_template=str(file))
    assert all(engine.is_over for engine in launcher.engines)


def test_a_model_without_a_template_is_served_and_says_so(tiny_model, tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("chat_template*"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    async def stop_it(server):
        while server.served.model.engine.state is not EngineState.READY:
            await asyncio.sleep(0.01)
        server._begin_stop()

    with caplog.at_level("WARNING", "octavo.server"):
        assert start(folder, ScriptedLauncher(READY), stop_it) == 0
    (line,) = [one.getMessage() for one in caplog.records if "chats" in one.getMessage()]
    assert line.startswith("chats will be refused: ")


def test_a_key_among_the_arguments_is_warned_of(monkeypatch, caplog):
    def end(model):
        raise ModelNotFoundError("enough")

    monkeypatch.setattr(run.hub, "resolve", end)
    monkeypatch.setattr(run, "configure_logging", lambda settings: None)
    for keys, num_warnings in (((), 0), (("k",), 1)):
        with caplog.at_level("WARNING", "octavo.server"), pytest.raises(ModelNotFoundError):
            run.serve(EngineArgs("m"), ServerSettings(api_key=keys))
        assert [one.getMessage() for one in caplog.records].count(
            run.VISIBLE_KEYS_WARNING
        ) == num_warnings
    assert "--api-key-file" in run.VISIBLE_KEYS_WARNING


REFUSAL = OSError(errno.ENOMEM, "Cannot allocate memory")


def test_an_engine_that_cannot_be_started_ends_the_start(tiny_model):
    with pytest.raises(EngineError, match="cannot be started: .*Cannot allocate memory"):
        start(tiny_model, ScriptedLauncher(REFUSAL))


def test_one_that_cannot_be_started_again_ends_the_server(tiny_model, monkeypatch):
    """After some tries, and with a status that says so."""
    monkeypatch.setattr("octavo.server.engine.supervisor._RESTART_PAUSES", (0.0,) * 5)
    launcher = ScriptedLauncher(READY, REFUSAL)

    async def kill_it(server):
        while server.served.model.engine.state is not EngineState.READY:
            await asyncio.sleep(0.01)
        launcher.engines[0].kill()

    assert start(tiny_model, launcher, kill_it, drain_timeout=0) == 1
    assert launcher.num_launches == 5


def test_a_router_of_one_engine_is_refused():
    with pytest.raises(ConfigError, match="chooses among replicas, and there is one engine"):
        run.serve(EngineArgs("no such model"), ServerSettings(router="round_robin"))
