"""Settings in a file: what flags say counts more, and mistakes are named."""

from __future__ import annotations

import argparse
import json

import pytest

from octavo.cli import UsageError
from octavo.cli.config_file import with_config
from octavo.cli.serve import _add_flags, configure

SETTINGS = {
    "model": "some-model",
    "max-num-seqs": 7,
    "kv_cache_memory": "2GiB",
    "enable_prefix_caching": False,
    "speculative_config": {"method": "ngram"},
    "api_key": ["a", "b"],
    "port": None,
}
AS_TOML = """
model = "some-model"
max-num-seqs = 7
kv_cache_memory = "2GiB"
enable_prefix_caching = false
api_key = ["a", "b"]
[speculative_config]
method = "ngram"
"""
AS_YAML = """
model: some-model
max-num-seqs: 7
kv_cache_memory: 2GiB
enable_prefix_caching: false
speculative_config: {method: ngram}
api_key: [a, b]
port:
"""


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return with_config(parser.parse_args(argv), _add_flags)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", json.dumps(SETTINGS)), ("a.toml", AS_TOML), ("a.yaml", AS_YAML), ("a", AS_YAML)],
)
def test_a_file_says_what_flags_would(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    args = parsed("--config", str(tmp_path / name))
    assert args.model == "some-model"
    assert args.EngineArgs_max_num_seqs == 7
    assert args.EngineArgs_kv_cache_memory == 2 << 30
    assert args.EngineArgs_enable_prefix_caching is False
    assert json.loads(args.EngineArgs_speculative_config) == {"method": "ngram"}
    assert args.ServerSettings_api_key == ["a", "b"]
    assert not hasattr(args, "ServerSettings_port")


def test_the_command_line_counts_more(tmp_path):
    (tmp_path / "a.yaml").write_text(AS_YAML)
    args = parsed("other", "--config", str(tmp_path / "a.yaml"), "--max-num-seqs", "9")
    assert (args.model, args.EngineArgs_max_num_seqs) == (["other"], 9)


def test_without_a_file_nothing_changes():
    args = parsed("--max-num-seqs", "9")
    assert not hasattr(args, "model") and args.EngineArgs_max_num_seqs == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 3", "--max-num-seq"),
        ("max_num_seqs: many", "--max-num-seqs"),
        ("kv_cache_dtype: int3", "--kv-cache-dtype"),
        ("- 3", "no settings by name"),
        ("3: 4", "no settings by name"),
        ("a: [", "a.yaml"),
        ("config: b.yaml", "--config"),
        ("!!python/object/apply:os.system [ls]", "a.yaml"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        parsed("--config", str(tmp_path / "a.yaml"))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        parsed("--config", str(tmp_path / "nothing.yaml"))
