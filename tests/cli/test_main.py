from __future__ import annotations

import subprocess
import sys

import pytest

from octavo import __version__, cli
from octavo.base.errors import ConfigError
from octavo.cli import bench, trace

ALL_COMMANDS = [
    *cli.COMMANDS,
    *(f"bench {name}" for name in bench.COMMANDS),
    *(f"trace {name}" for name in trace.COMMANDS),
]


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: octavo {command}" in out
    assert "examples:\n" in out and f"octavo {command}" in out.split("examples:")[1]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["models", "--nope"], ["--nope"]])
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "usage: octavo" in captured.err


def test_failure_is_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConfigError("this is wrong:\n  do that")

    monkeypatch.setattr("octavo.cli.models.hub.installed", fail)
    assert cli.main(["models"]) == 1
    assert capsys.readouterr().err == "octavo: error: this is wrong: do that\n"
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(ConfigError):
        cli.main(["models"])


def test_interrupt_is_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.models.hub.installed", interrupt)
    assert cli.main(["models"]) == 130
    assert capsys.readouterr().err == ""


def test_reader_that_went_away_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "octavo", "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from octavo.cli import main; main(['--help']); main(['generate', '--help']);"
        "heavy = {'torch', 'numpy', 'rich', 'huggingface_hub', 'tokenizers', 'jinja2'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
