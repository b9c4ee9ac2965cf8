"""Schemas to measure with are schemas, and always the same."""

from __future__ import annotations

import json

import jsonschema
import pytest

from octavo.bench.structured.schemas import random_schema, record_schema


@pytest.mark.parametrize("make", [random_schema, record_schema])
def test_they_are_schemas_of_objects(make):
    for number in range(200):
        schema = make(number)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object" and schema == make(number)


def test_they_differ():
    assert len({json.dumps(random_schema(number)) for number in range(200)}) > 150
    assert len({json.dumps(record_schema(number)) for number in range(32)}) == 32


def test_more_than_a_third_of_a_record_is_fixed():
    schema = record_schema(3)
    values = dict.fromkeys(schema["properties"], "x" * 12)
    fixed = sum(len(name) + 4 for name in values)
    assert fixed > len(json.dumps(values, separators=(",", ":"))) / 3
