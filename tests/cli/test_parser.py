from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli import bench, hardware, parser, trace
from octavo.cli.parser import CommandParser, rarely

ALL = [
    *(name for name in cli.COMMANDS if name not in ("bench", "hardware", "trace")),
    *(f"bench {name}" for name in ("", *bench.COMMANDS)),
    *(f"hardware {name}" for name in ("", *hardware.COMMANDS)),
    *(f"trace {name}" for name in ("", *trace.COMMANDS)),
]


def complaint(argv: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("argv", "usage", "words"),
    [
        ("genrate", "octavo [", "did you mean `octavo generate`?"),
        ("Serve", "octavo [", "did you mean `octavo serve`?"),
        ("latency", "octavo [", "did you mean `octavo bench latency`?"),
        ("latancy", "octavo [", "did you mean `octavo bench latency`?"),
        ("train_draft", "octavo [", "did you mean `octavo train-draft`?"),
        ("download", "octavo [", "did you mean `octavo pull`?"),
        ("help", "octavo [", "did you mean `octavo --help`?"),
        ("xyzzy", "octavo [", "`octavo --help` lists them"),
        ("bench latancy", "octavo bench [", "did you mean `octavo bench latency`?"),
        ("bench xyzzy", "octavo bench [", "`octavo bench --help` lists them"),
        ("--vresion", "octavo [", "did you mean --version?"),
        ("--prot 80 serve", "octavo [", "unrecognized arguments: --prot"),
        ("serve --prot 80", "octavo serve [", "did you mean --port"),
        ("serve --max_num_seqs=3", "octavo serve [", "did you mean --max-num-seqs?"),
        ("serve --ctx-size 4096", "octavo serve [", "did you mean --max-model-len?"),
        ("serve -port 80", "octavo serve [", "did you mean --port"),
        ("chat a b", "octavo chat [", "unrecognized arguments: b"),
        ("serve --dtype bf16", "octavo serve [", "did you mean bfloat16?"),
        ("bench latency --inputlen 3", "octavo bench latency [", "did you mean --input-len"),
        ("bench --jsn latency", "octavo bench [", "unrecognized arguments: --jsn"),
        # What is mistyped is said before what is missing for that reason.
        ("quantize --methd gptq", "octavo quantize [", "did you mean --method?"),
        ("tune --slp ttft=1", "octavo tune [", "did you mean --slo"),
        ("chat --qqq --systme x", "octavo chat [", "--qqq --systme; did you mean --system or"),
    ],
)
def test_what_is_mistyped_is_said_by_the_command_with_what_was_meant(
    argv: str, usage: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *first, last = complaint(argv, capsys)
    assert first[0].startswith(f"usage: {usage}") and words in last


def test_beginnings_of_flags_and_values_that_look_like_flags_are_taken() -> None:
    argv = ["generate", "--temp", "0", "--prompt=--nope", "--", "-"]
    args = cli.build_parser(argv).parse_args(argv)
    assert args.sampling_temperature == 0 and args.prompt == ["--nope"]
    argv = ["completion", "--words", "serve", "--nope", ""]
    assert cli.build_parser(argv).parse_args(argv).words == ["serve", "--nope", ""]


@pytest.mark.parametrize("command", ALL)
def test_help_is_of_one_screen_and_help_all_has_every_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*command.split(), "--help"]) == 0
    short = capsys.readouterr().out
    assert short.count("\n") <= 48
    assert cli.main([*command.split(), "--help-all"]) == 0
    whole = capsys.readouterr().out
    found = cli.build_parser(command.split())
    for name in command.split():
        (commands,) = (a for a in found._actions if isinstance(a.choices, dict))
        assert isinstance(commands.choices, dict)
        found = commands.choices[name]
    flags = {flag for action in found._actions for flag in action.option_strings}
    assert all(f"  {flag}" in whole or f", {flag}" in whole for flag in flags)
    assert short == whole or f"octavo {command} --help-all" in short


def test_a_short_help_has_first_clauses_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(parser, "SCREEN", 5)
    examples = "examples:\n  x 1\n  x 2 \\\n    3\n  x 4\n  x 5"
    made = CommandParser(prog="x", epilog=f"More.\n\n{examples}")
    made.add_argument("--often", default=3, help="what; and more of it (default: %(default)s)")
    made.add_argument("--rare", help="seldom")
    rarely(made, "--rare")
    short, whole = made.format_help(), made.format_whole_help()
    assert "what (default: 3)" in short and "and more of it" not in short and "--rare" not in short
    assert "1 more flags, and more on these: x --help-all" in short
    assert "x 1" in short and "x 5" not in short and "\nMore." not in short
    assert "and more of it" in whole and "--rare" in whole and "\nMore." in whole
    assert made.format_whole_help() == whole  # a short one in between has changed nothing


# -- terminals and pipes --------------------------------------------------------------------------


def octavo(*argv: str, **settings: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "octavo", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **settings},
    )


@pytest.mark.parametrize(
    "argv",
    [
        "plan llama-3.1-8b --hardware l40s",
        "hardware list",
        "spec --alpha 0.8",
        "doctor --help-all",
        "--version",
    ],
)
def test_a_reader_that_went_away_is_no_failure(argv: str, tmp_path: Path) -> None:
    with octavo(*argv.split(), OCTAVO_HOME=str(tmp_path)) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() in (0, 141)


def on_a_terminal(*argv: str, **settings: str) -> bytes:
    """What a command writes to a terminal, stdout and stderr alike."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "octavo", *argv],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **settings},
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 1 << 16):
                written += piece
        except OSError:  # the last who wrote has closed it
            pass
        os.close(ours)
        assert process.wait() == 0, written
    return written


@pytest.mark.parametrize("how", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "yes"}])
def test_no_escape_sequence_where_colours_are_not_wanted(how: dict[str, str]) -> None:
    argv = ("plan", "llama-3.1-8b", "--hardware", "l40s", "--memory")
    settings = {"NO_COLOR": "", **how}
    assert b"\x1b" not in on_a_terminal(*argv, **settings)
    assert b"\x1b" not in on_a_terminal(*argv, **settings, FORCE_COLOR="1")


def test_an_empty_no_color_is_none() -> None:
    written = on_a_terminal("plan", "llama-3.1-8b", "--hardware", "l40s", NO_COLOR="")
    assert b"\x1b[" in written
