from __future__ import annotations

import pytest

from octavo import cli
from octavo.cli import serve


@pytest.fixture
def served(monkeypatch):
    """What ``octavo serve`` would have run with."""
    calls = []
    import octavo.server.run

    monkeypatch.setattr(octavo.server.run, "serve", lambda *args: calls.append(args) or 0)
    return calls


def test_flags_become_settings(served):
    flags = "serve m --port 0 --api-key a --api-key b --served-model-name x --max-num-seqs 7"
    assert cli.main([*flags.split(), "--response-cache", "64MiB", "--log-prompts"]) == 0
    ((engine_args, settings, _),) = served
    assert (engine_args.model, engine_args.max_num_seqs) == ("m", 7)
    assert settings.port == 0 and settings.api_key == ("a", "b")
    assert settings.served_model_name == ("x",) and settings.log_prompts
    assert settings.response_cache == 64 << 20
    assert settings.host == "127.0.0.1" and settings.drain_timeout == 30.0


def test_the_server_may_ask_for_a_calibration_of_its_model(served, monkeypatch):
    from octavo.calibration import known_profiles

    monkeypatch.setattr(
        known_profiles, "profile_here", lambda model: f"what was measured of {model}"
    )
    assert cli.main(["serve", "m", "--max-predicted-ttft", "0.5s"]) == 0
    ((_, settings, find_calibration),) = served
    assert settings.max_predicted_ttft_seconds == 0.5
    assert find_calibration() == "what was measured of m"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 70000", "port"),
        ("--api-key=", "api_key is empty"),
        ("--rate-limit-requests 0", "rate_limit_requests"),
        ("--drain-timeout -1", "drain_timeout"),
        ("--max-predicted-ttft soon", "write 500, 500ms or 0.5s"),
        ("--max-num-seqs 0", "max_num_seqs"),
        ("--log-format xml", "invalid choice"),
        ("--no-such-flag", "unrecognized"),
    ],
)
def test_wrong_usage_is_said(served, capsys, flags, message):
    assert cli.main(["serve", *flags.split()]) == 2
    assert message in capsys.readouterr().err and not served


def test_help_shows_both_kinds_of_settings(capsys):
    assert cli.main(["serve", "--help-all"]) == 0
    text = capsys.readouterr().out
    for flag in ("--api-key KEY", "--drain-timeout X", "--max-num-seqs N", "--api-key-file FILE"):
        assert flag in text
    assert serve.EXAMPLES.splitlines()[1] in text


def test_a_model_that_is_not_there_is_one_line(capsys):
    assert cli.main(["serve", "no-such-model", "--port", "0"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
