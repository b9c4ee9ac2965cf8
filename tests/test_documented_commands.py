"""The commands in README, docs/*.md and the examples of ``--help`` are run, and end as they should.

As they stand where they need no model; else on a tiny one, with smaller loads (`documented`). The
answers are not looked at: other tests do that, of each command.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from documented import (
    Command,
    documented_commands,
    fill_workbench,
    smaller,
    with_stand_ins,
)
from live_server import LiveServer

from octavo import cli
from tests.conftest import write_tiny_model

pytestmark = pytest.mark.slow

# What cannot be run here, by words that are in the command, and why.
NOT_RUN = {
    "pull": "fetches a model from a hub or a registry: tests/hub does, from servers of its own",
    "rm": "deletes what `pull` has fetched",
    "compare": "needs llama.cpp and others beside octavo: tests/bench/test_peers.py has stand-ins",
    "--model-dir": "needs a folder of models: tests/server/registry has some",
    "--model-memory": "needs several models: tests/server/live/test_several_models.py has two",
    "chat --url": "talks to a server: tests/cli/test_chat_url.py has a stand-in",
    "http://other-machine:8000": "is another machine",
    "chat qwen2.5-coder-1.5b --tools": "asks on a terminal: tests/cli/test_chat_tools.py has one",
    "cuda": "needs a GPU",
    "cluster": "needs ray: tests/cluster has clusters of its own",
    "--distributed": "needs a Ray cluster: tests/cluster has some",
    "--save-expert-loads": "needs a model with experts: tests/models/test_expert_parallel.py",
    "--enable-expert-parallel": "needs a model with experts: tests/models/test_expert_parallel.py",
    "--llama-server": "is a server of llama.cpp: tests/bench/structured has a stand-in",
    "https://api.example.org": "is somebody else's server",
    "http://gpu:8000": "is another machine",
    "10.0.0.5": "is the address of a machine that has others beside it",
    "calibrate --link": "measures no model: tests/cli/test_calibrate.py does it",
}
# What takes longer than a few seconds even so: with `-m long`. So do loads for servers that
# `bench serve` starts itself.
LONG = (
    *("calibrate", "validate", "tune", "train-draft", "bench ablation", "bench spec", "serve"),
    *("bench structured",),
    *("bench startup", "quantize --report", "quantize --compare", "advise --measure"),
    # tests/page/test_static_folder.py, `plan` of fewer devices, tests/bench/offline/test_sweep.py
    *("page", "plan any", "bench sweep --base-url"),
)
UNHAPPY = {"plan": {0, 2}}  # a plan that cannot be is no error, and says so by 2


class Bench(NamedTuple):
    """Where commands run."""

    folder: Path
    model: Path
    server: str
    seen: set[str]  # what has been run, as the parsers have it


def matches(command: Command, pattern: str) -> bool:
    """Whether the command has all words of the pattern, the first one first."""
    words = pattern.split()
    return command[0] == words[0] and all(word in command for word in words[1:])


def commands(is_long: bool) -> list[Command]:
    found = {shlex.join(command): command for command in documented_commands()}
    runnable = [command for command in found.values() if not reason_not_to(command)]
    return [command for command in runnable if takes_long(command) == is_long]


def takes_long(command: Command) -> bool:
    if command[:2] == ["bench", "serve"]:
        return "--base-url" not in command
    return any(matches(command, pattern) for pattern in LONG)


def reason_not_to(command: Command) -> str | None:
    text = shlex.join(command)
    return next((why for part, why in NOT_RUN.items() if part in command or part in text), None)


@pytest.fixture(scope="module")
def fake_server() -> Iterator[str]:
    script = Path(__file__).with_name("bench") / "fake_server.py"
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, fake_server: str) -> Bench:
    models, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("bench")
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 4096}
    model = write_tiny_model(models / "tiny", **shape)
    gguf = models / "tiny.gguf"
    assert cli.main(["quantize", str(model), str(gguf), "--method", "gguf", "--type", "Q8_0"]) == 0
    fill_workbench(folder, model, gguf)
    for name in ("smollm2", "qwen3"):
        assert cli.main(["build", str(model), str(folder / name), "--num-blocks", "512"]) == 0
    return Bench(folder, model, fake_server, set())


def remove(made: Path) -> None:
    shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)


@pytest.fixture
def run(bench: Bench, monkeypatch: pytest.MonkeyPatch, quiet_machine: None):
    """Runs a command in this process, and checks how it ends."""
    monkeypatch.chdir(bench.folder)
    monkeypatch.setenv("OCTAVO_HOME", str(bench.folder / "home"))
    monkeypatch.setenv("HOME", str(bench.folder))
    typed = io.TextIOWrapper(io.BytesIO(b"Hello!\n/quit\n"), "utf-8")
    monkeypatch.setattr("sys.stdin", typed)

    def run(command: Command) -> None:
        out, err = io.StringIO(), io.StringIO()
        argv = smaller(with_stand_ins(command, bench.model, bench.server))
        if (parsed := str(cli.build_parser(argv).parse_args(argv))) in bench.seen:
            return  # with stand-ins and small loads, it is the same as another one
        bench.seen.add(parsed)
        if command[0] in ("build", "quantize", "train-draft"):
            remove(Path(command[2]))  # what another one has made
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(argv)
        said = f"octavo {shlex.join(argv)}\n{err.getvalue()[-3000:]}"
        assert status in UNHAPPY.get(command[0], {0}), said
        assert "Traceback" not in err.getvalue(), said
        if "--json" in command:
            json.loads(out.getvalue())

    return run


@pytest.mark.parametrize("command", commands(is_long=False), ids=shlex.join)
def test_a_documented_command_works(run, command):
    run(command)


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [c for c in commands(is_long=True) if c[0] != "serve"], ids=shlex.join
)
def test_a_documented_command_that_takes_long_works(run, command):
    run(command)


SERVERS = [command for command in commands(is_long=True) if command[0] == "serve"]


@pytest.mark.parametrize("command", SERVERS, ids=shlex.join)
def test_a_documented_server_has_all_that_it_starts_with(run, command, monkeypatch):
    import octavo.server.run

    monkeypatch.setattr(octavo.server.run, "serve", lambda *args: 0)
    monkeypatch.setattr(octavo.server.run, "serve_several", lambda *args: 0)
    run(command)


@pytest.mark.long
@pytest.mark.parametrize("command", SERVERS, ids=shlex.join)
def test_a_documented_server_starts_answers_and_ends(bench, monkeypatch, command):
    monkeypatch.chdir(bench.folder)
    _, *flags = with_stand_ins(command, bench.model, bench.server)
    if "--config" in flags:  # it names the model
        flags = [str(bench.model), *flags]
    if "recurrent" in flags:
        pytest.skip("its heads are made by `train-draft`, in half an hour")
    with LiveServer(*flags, "--port", "0", "--num-blocks", "256", "--threads", "1") as server:
        key = {"Authorization": "Bearer a-key-of-ann"}
        body = {"prompt": "a", "max_tokens": 2}
        assert server.fetch("/v1/completions", body, headers=key).status == 200
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_what_is_not_run_is_still_documented():
    known = documented_commands()
    for part in NOT_RUN:
        assert any(part in command or part in shlex.join(command) for command in known), part
    for pattern in LONG:
        assert any(matches(command, pattern) for command in known), pattern
