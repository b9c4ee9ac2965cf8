"""The models of ``octavo serve``: on the command line, and in a file with settings of their own."""

from __future__ import annotations

import argparse

import pytest

from octavo.cli import UsageError
from octavo.cli.config_file import with_config
from octavo.cli.engine_flags import engine_kwargs
from octavo.cli.serve import _add_flags, configure
from octavo.cli.served_models import ServedModels, served_models
from octavo.hub import DEFAULT_MODEL

FILE = """\
max-num-seqs: 16
dtype: bfloat16
models:
  - plain
  - {model: org/big, name: big, max-num-seqs: 2, pin: true, load: false, chat-template: t.jinja}
"""


def models_of(*argv: str) -> ServedModels:
    parser = argparse.ArgumentParser()
    configure(parser)
    args = parser.parse_args(argv)
    return served_models(with_config(args, _add_flags), engine_kwargs(args))


def test_without_a_name_it_is_the_default_model():
    found = models_of()
    assert (found.is_one, found.are_named) == (True, False)
    assert found.models[0].args.model == DEFAULT_MODEL


def test_several_names_have_the_same_settings():
    found = models_of("a", "b", "--max-num-seqs", "3")
    assert [model.args.model for model in found.models] == ["a", "b"]
    assert {model.args.max_num_seqs for model in found.models} == {3}
    assert found.args_of("c").max_num_seqs == 3
    assert not found.is_one


def test_each_model_of_a_file_may_have_its_own(tmp_path):
    (tmp_path / "a.yaml").write_text(FILE)
    plain, big = models_of("--config", str(tmp_path / "a.yaml"), "--dtype", "float32").models
    assert (plain.args.model, plain.args.max_num_seqs, plain.is_plain) == ("plain", 16, True)
    assert (big.names, big.is_pinned, big.loads_at_start) == (("big",), True, False)
    assert (big.args.max_num_seqs, big.chat_template) == (2, "t.jinja")
    assert plain.args.dtype == big.args.dtype == "float32"  # the command line counts for all


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: a", "models is a list"),
        ("models: [{name: a}]", r"models\[0\] has no model"),
        ("models: [a, {model: b, max-num-seq: 3}]", r"models\[1\].*did you mean --max-num-seqs"),
        ("models: [{model: b, port: 3}]", r"models\[0\].*--port"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, words):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match=words):
        models_of("--config", str(tmp_path / "a.yaml"))
