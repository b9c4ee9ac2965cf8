"""Packages that bring in what they need when it is asked for."""

from __future__ import annotations

import json
import json.decoder

import pytest

import octavo
from octavo import planner, quantization, quantize
from octavo.base.lazy_exports import homes_of, named

HOMES = {"loads": "json:loads", "Decoder": "json.decoder:JSONDecoder", "gone": "no_such_module:it"}


def test_a_name_is_found_where_it_is_at_home():
    assert named("json", HOMES, "loads") is json.loads
    assert named("json", HOMES, "Decoder") is json.decoder.JSONDecoder


def test_homes_are_those_of_the_stub(tmp_path):
    lines = ("# a comment", "from json import loads as loads", "version: str")
    more = ("from json.decoder import (", "    JSONDecoder as Decoder,", ")")
    (tmp_path / "__init__.pyi").write_text("\n".join((*lines, *more)))
    homes = homes_of(str(tmp_path / "__init__.py"))
    assert homes == {"loads": "json:loads", "Decoder": "json.decoder:JSONDecoder"}


def test_what_is_not_there_is_an_error_of_its_kind():
    with pytest.raises(AttributeError, match="module 'json' has no attribute 'nothing'"):
        named("json", HOMES, "nothing")
    with pytest.raises(ModuleNotFoundError):
        named("json", HOMES, "gone")


@pytest.mark.parametrize("package", [octavo, planner, quantization, quantize])
def test_each_package_lists_its_names(package):
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
        package.nothing_of_the_kind  # noqa: B018
