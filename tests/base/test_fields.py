"""Values from files, of which nothing is known beforehand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
READERS = {
    "integer": (Fields.integer, int),
    "number": (Fields.number, float),
    "boolean": (Fields.boolean, bool),
    "text": (Fields.text, str),
    "table": (Fields.table, dict),
    "section": (Fields.section, Fields),
    "entries": (Fields.entries, list),
    "texts": (Fields.texts, list),
    "each": (lambda fields, name: fields.each(name, Fields.number), list),
}


def fields(**values) -> Fields:
    return Fields(Path("config.json"), values)


@pytest.mark.parametrize("reader", READERS)
@given(value=JUNK)
def test_a_value_is_of_its_kind_or_refused(reader, value):
    read, kind = READERS[reader]
    try:
        found = read(fields(x=value), "x")
    except ModelFileError as error:
        assert error.path == Path("config.json") and error.field.startswith("x")
        assert len(error.reason) < 300
    else:
        assert isinstance(found, kind)


def test_numbers_that_would_overflow():
    for value in (1e308, 10**400, 5e-324, float("inf"), float("nan"), -1.0, 0):
        with pytest.raises(ModelFileError):
            fields(x=value).number("x")


def test_names_of_what_is_inside():
    outer = Fields(Path("f"), {"a.b": {"c": ["x", 1]}}, "a.")
    with pytest.raises(ModelFileError) as caught:
        outer.section("b").each("c", Fields.text)
    assert caught.value.field == "a.b.c[1]"
    assert list(outer.section("b")) == ["c"] and "c" in outer.section("b")


def test_missing_and_null():
    assert fields(x=None).integer("x", 3) == fields().integer("x", 3) == 3
    assert "x" not in fields(x=None)
    with pytest.raises(ModelFileError, match="is missing"):
        fields(x=None).text("x")


def test_arrays_of_numpy_are_lists():
    assert fields(x=np.array([1, 2], np.uint32)).each("x", Fields.integer) == [1, 2]


def test_a_message_is_short_whatever_the_value_is():
    for value in ("x" * 10**6, [1] * 10**6, {"a": "b" * 10**6}):
        with pytest.raises(ModelFileError) as caught:
            fields(x=value).integer("x")
        assert len(str(caught.value)) < 300


def test_names_of_a_file_in_place_of_the_usual_ones():
    names = {"size": "n_size", "count": "n_count"}
    fields = Fields(Path("file"), {"n_size": 3, "count": 4, "size": 9}, names=names)
    assert fields.integer("size") == 3 and "size" in fields
    assert fields.integer("count") == 4  # which may be there under the usual name all the same
    for values in ({}, {"n_size": None}):
        with pytest.raises(ModelFileError) as caught:
            Fields(Path("file"), values, names=names).integer("size")
        assert caught.value.field == "n_size"
