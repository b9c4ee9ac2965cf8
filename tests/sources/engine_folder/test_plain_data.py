"""Dataclasses from JSON by the types of their fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.sources.engine_folder.plain_data import read_dataclass


@dataclass(frozen=True, slots=True)
class Inner:
    count: int
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    share: float
    is_it: bool
    inner: Inner | None
    windows: tuple[int | None, ...] = ()
    by_name: Mapping[str, float] = dataclasses.field(default_factory=dict)


VALUES = [
    Outer("x", -0.5, True, None),
    Outer("y", 3.0, False, Inner(-2, "b"), (None, 4), {"p": 0.25}),
]


def read(values):
    return read_dataclass(Fields(Path("file"), json.loads(json.dumps(values))), Outer)


@pytest.mark.parametrize("value", VALUES)
def test_there_and_back(value):
    assert read(dataclasses.asdict(value)) == value


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": 3}, "name"),
        ({"name": None}, "name"),
        ({"share": "x"}, "share"),
        ({"share": float("inf")}, "share"),
        ({"is_it": 1}, "is_it"),
        ({"inner": {"count": 1.5, "kind": "a"}}, "inner.count"),
        ({"inner": {"count": 1, "kind": "c"}}, "inner.kind"),
        ({"inner": {"count": 1}}, "inner.kind"),
        ({"windows": [1, "x"]}, "windows[1]"),
        ({"by_name": {"p": True}}, "by_name.p"),
        ({"by_name": [1]}, "by_name"),
    ],
)
def test_what_is_wrong_is_named(change, field):
    with pytest.raises(ModelFileError) as caught:
        read({**dataclasses.asdict(VALUES[0]), **change})
    assert caught.value.field == field


def test_what_is_known_is_not_read():
    values = dataclasses.asdict(VALUES[0]) | {"name": 3}
    assert read_dataclass(Fields(Path("f"), values), Outer, name="known").name == "known"
