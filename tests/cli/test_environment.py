"""Variables of the environment in place of flags."""

from __future__ import annotations

import argparse

import pytest

from octavo import cli
from octavo.cli.config_file import with_config
from octavo.cli.environment import variable_of, with_variables
from octavo.cli.serve import _add_flags


def parsed(*argv: str, **variables: str) -> argparse.Namespace:
    parser = cli.build_parser(argv)
    return parser.parse_args(with_variables(parser, argv, variables))


def test_a_variable_is_a_flag_and_a_flag_counts_more():
    args = parsed("serve", "a", OCTAVO_MAX_NUM_SEQS="3", OCTAVO_PORT="81", PORT="82")
    assert (args.EngineArgs_max_num_seqs, args.ServerSettings_port) == (3, 81)
    assert args.model == ["a"]
    assert parsed("serve", "--port", "9", OCTAVO_PORT="81").ServerSettings_port == 9
    assert parsed("bench", "latency", OCTAVO_INPUT_LEN="7").input_len == 7


def test_a_variable_counts_more_than_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("port: 1\nmax-num-seqs: 2\ndtype: float32")
    variables = {"OCTAVO_CONFIG": str(tmp_path / "a.yaml"), "OCTAVO_PORT": "3"}
    args = with_config(parsed("serve", "--max-num-seqs", "4", **variables), _add_flags)
    assert (args.ServerSettings_port, args.EngineArgs_max_num_seqs) == (3, 4)
    assert args.EngineArgs_dtype == "float32"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("False", False)])
def test_switches_are_on_or_off(text, value):
    args = parsed("serve", OCTAVO_ENABLE_PREFIX_CACHING=text)
    assert args.EngineArgs_enable_prefix_caching is value
    assert parsed("models", OCTAVO_JSON=text).json is value
    shown = parsed("serve", "--no-enable-prefix-caching", OCTAVO_ENABLE_PREFIX_CACHING=text)
    assert shown.EngineArgs_enable_prefix_caching is False


def test_several_values_are_a_list_and_flags_take_their_place():
    variables = {"OCTAVO_PIN": '["a", "b, c"]', "OCTAVO_ALLOWED_HOST": "x"}
    args = parsed("serve", "--allowed-host", "y", **variables)
    assert (args.ServerSettings_pin, args.ServerSettings_allowed_host) == (["a", "b, c"], ["y"])


def test_a_variable_gives_way_to_a_flag_that_excludes_it():
    args = parsed("generate", "--regex", "a+", OCTAVO_JSON_SCHEMA="{}")
    assert args.constraint_regex == "a+"
    assert not hasattr(args, "constraint_json")


def test_keys_are_never_put_among_the_arguments():
    variables = {"OCTAVO_API_KEY": "secret", "OCTAVO_ADMIN_KEY": "secret", "OCTAVO_HOME": "/x"}
    parser = cli.build_parser(["serve"])
    assert with_variables(parser, ["serve"], variables) == ["serve"]


def test_what_means_nothing_is_said_with_what_was_meant(monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("OCTAVO_INPUT_LEN", "3")  # of another command
    assert cli.main(["models", "--json"]) == 0
    said = capsys.readouterr().err
    assert "OCTAVO_MAX_NUM_SEQ in the environment means nothing" in said
    assert "did you mean OCTAVO_MAX_NUM_SEQS" in said
    assert "OCTAVO_INPUT_LEN in" not in said


def test_a_wrong_value_is_said_with_its_variable(monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_PORT", "many")
    assert cli.main(["serve"]) == 2
    said = capsys.readouterr().err
    assert "--port" in said and "(from the variable OCTAVO_PORT)" in said


def test_the_name_of_a_variable_is_that_of_its_flag():
    assert variable_of("--max-num-seqs") == "OCTAVO_MAX_NUM_SEQS"
