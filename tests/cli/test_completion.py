from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli import completion
from octavo.cli.completion import FILES, candidates


def texts(*words: str) -> list[str]:
    return [candidate.text for candidate in candidates(words)]


def test_commands_and_their_subcommands() -> None:
    assert texts("") == list(cli.COMMANDS)
    assert texts("s") == ["serve", "simulate", "spec", "show"]
    assert texts("bench", "s") == ["serve", "startup", "sweep", "spec", "structured"]
    assert texts("no-such-command", "") == []
    assert candidates([""])[0].help == "answer one or more prompts"


def test_flags_of_the_command_that_was_typed() -> None:
    assert texts("serve", "--por") == ["--port"]
    assert texts("bench", "latency", "--por") == []
    assert "--no-enable-prefix-caching" in texts("serve", "--no-")
    assert texts("serve", "--port", "8000", "--log-l") == ["--log-level"]
    assert "--version" in texts("-")


@pytest.mark.parametrize(
    "words", [("--log-level", "w"), ("--log-level", "=", "w")], ids=["space", "bash's ="]
)
def test_choices_of_a_flag(words: tuple[str, ...]) -> None:
    assert texts("serve", *words) == ["warning"]


def test_choices_behind_an_equals_sign() -> None:
    assert texts("serve", "--log-level=w") == ["--log-level=warning"]
    assert texts("serve", "--nope=w") == []
    assert texts("serve", "--log-level", "=") == ["debug", "info", "warning", "error"]


def test_models_files_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    assert texts("generate", "smo") == ["smollm2-135m", FILES]
    assert texts("pull", "smo") == ["smollm2-135m"]
    assert texts("rm", "") == []
    assert texts("serve", "--config", "") == [FILES]
    assert texts("chat", "smollm2-135m", "") == []  # there is no second one
    assert texts("serve", "smollm2-135m", "qwen2.5-coder-0") == ["qwen2.5-coder-0.5b", FILES]
    assert texts("plan", "--hardware", "h100-s") == ["h100-sxm"]
    assert "llama-3.1-8b" in texts("plan", "llama-3.1-8")
    assert texts("serve", "--port", "") == []
    assert texts("trace", "convert", "a.jsonl", "") == [FILES]


def test_a_flag_of_several_values_goes_on() -> None:
    assert texts("bench", "serve", "--goodput", "ttft:500", "") == []
    assert texts("bench", "serve", "--goodput", "ttft:500", "--save-r") == ["--save-result"]


def test_the_scripts_and_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in completion.SCRIPTS.items():
        assert cli.main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
    assert cli.main(["completion"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
    assert cli.main(["completion", "tcsh"]) == 2


def test_no_command_imports_what_is_heavy() -> None:
    program = (
        "import sys; from octavo import cli; from octavo.cli.completion import candidates\n"
        "from octavo.cli import bench\n"
        "for name in cli.COMMANDS: candidates([name, '--'])\n"
        "for name in bench.COMMANDS: candidates(['bench', name, '--'])\n"
        "candidates(['plan', '--hardware', '']); candidates(['plan', ''])\n"
        "heavy = {'torch', 'numpy', 'rich', 'huggingface_hub', 'tokenizers', 'jinja2', 'fastapi',"
        " 'prompt_toolkit', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """``octavo`` as a shell finds it."""
    path = tmp_path / "bin" / "octavo"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m octavo "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def ask(shell: str, program: str, command: Path) -> list[str]:
    folder = command.parent.parent
    (folder / "model.gguf").touch()
    done = subprocess.run(
        [shutil.which(shell) or shell, *(["-f"] if shell == "zsh" else []), "-c", program],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
            "OCTAVO_HOME": str(folder / "home"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("octavo", "ben"), ["bench"]),
        (("octavo", "bench", "lat"), ["latency"]),
        (("octavo", "serve", "--log-le"), ["--log-level"]),
        (("octavo", "serve", "--log-level", "=", "w"), ["warning"]),
        (("octavo", "generate", "mo"), ["model.gguf"]),
        (("octavo", "generate", "smo"), ["smollm2-135m"]),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash(words: tuple[str, ...], expected: list[str], command: Path) -> None:
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f'eval "$(octavo completion bash)"; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1};'
        'complete -p octavo >/dev/null; _octavo 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert ask("bash", program, command) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish(command: Path) -> None:
    program = "octavo completion fish | source; complete -C'octavo generate mo'"
    assert "model.gguf" in ask("fish", program, command)
    program = "octavo completion fish | source; complete -C'octavo serve --log-level w'"
    assert ask("fish", program, command)[:1] == ["warning"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_the_script_and_offers_what_it_is_told(command: Path) -> None:
    program = (
        "_describe() { print -l -- ${described} }; _files() { print files }; compdef() { };"
        "source <(octavo completion zsh); words=(octavo generate smo); CURRENT=3; PREFIX=smo;"
        "_octavo"
    )
    assert ask("zsh", program, command) == ["smollm2-135m:smollm2-135m", "files"]
