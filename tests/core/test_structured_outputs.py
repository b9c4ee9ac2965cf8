from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from octavo.base.errors import ConstraintError, InvalidRequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import MAX_CHARS, MAX_DEPTH, StructuredOutputs


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_is_kept_as_text_with_its_properties_in_order():
    schema = {"properties": {"z": {}, "a": {}}, "type": "object"}
    asked = StructuredOutputs(json=schema)
    assert asked.constraint == ("json", json.dumps(schema))
    assert asked == StructuredOutputs(json=json.dumps(schema))


def test_a_class_of_pydantic_is_its_schema():
    kind, text = StructuredOutputs(json=Person).constraint
    assert kind == "json" and json.loads(text) == Person.model_json_schema()


def test_any_object_is_a_schema():
    assert StructuredOutputs(json_object=True).constraint == ("json", '{"type": "object"}')


@pytest.mark.parametrize(
    "values",
    [
        {"json": {"type": "object"}, "disable_any_whitespace": True},
        {"regex": "a+", "is_bounded": False},
        {"choice": ["a", "b"], "begins_after": "</think>"},
        {"grammar": 'root ::= "a"'},
        {"json_object": True},
    ],
)
def test_it_is_equal_after_a_journey_as_a_mapping(values):
    asked = StructuredOutputs.of(values)
    assert StructuredOutputs.of(json.loads(json.dumps(asked.to_dict()))).constraint
    assert StructuredOutputs.of(asked.to_dict()) == asked
    assert StructuredOutputs.of(asked) is asked
    assert hash(asked) == hash(StructuredOutputs.of(values))


def nested(depth: int):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, ""),
        ({"regex": "a", "choice": ["b"]}, ""),
        ({"json_object": False}, ""),
        ({"regex": ""}, ".regex"),
        ({"regex": 3}, ".regex"),
        ({"grammar": "x" * (MAX_CHARS + 1)}, ".grammar"),
        ({"choice": "yes"}, ".choice"),
        ({"choice": []}, ".choice"),
        ({"choice": ["a", ""]}, ".choice"),
        ({"choice": [1]}, ".choice"),
        ({"json": 3}, ".json"),
        ({"json": {"a": float("nan")}}, ".json"),
        ({"json": {"a": {1, 2}}}, ".json"),
        ({"json": nested(MAX_DEPTH)}, ".json"),
        ({"json": nested(100_000)}, ".json"),
        ({"json": {"a": "x" * MAX_CHARS}}, ".json"),
        ({"regex": "a", "is_bounded": 1}, ".is_bounded"),
        ({"regex": "a", "schema": {}}, ""),
        (7, ""),
    ],
)
def test_what_is_wrong_is_refused_and_named(values, field):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(structured_outputs=values)
    assert error.value.field == f"structured_outputs{field}"
    assert len(str(error.value)) < 400


def test_objects_of_vllm_are_read_by_their_fields():
    class StructuredOutputsParams:
        json = None
        regex = "a|b"
        disable_any_whitespace = False

    assert StructuredOutputs.of(StructuredOutputsParams()) == StructuredOutputs(regex="a|b")


def test_vllms_name_of_it_works():
    from octavo import StructuredOutputsParams

    assert StructuredOutputsParams(regex="a") == StructuredOutputs(regex="a")


def test_only_what_is_given_is_shown():
    asked = StructuredOutputs(choice=["a", "b"], is_bounded=False)
    assert repr(asked) == "StructuredOutputs(choice=('a', 'b'), is_bounded=False)"


def test_an_error_names_another_field_and_is_else_the_same():
    error = ConstraintError("is none", "structured_outputs.json", "unsatisfiable")
    renamed = error.with_field("json_schema")
    assert (str(renamed), renamed.field) == ("json_schema: is none", "json_schema")
    assert (renamed.message, renamed.reason) == ("is none", "unsatisfiable")
    assert str(error) == "structured_outputs.json: is none"


def test_parameters_keep_it():
    params = SamplingParams(structured_outputs={"regex": "a"})
    assert params.clone().structured_outputs == StructuredOutputs(regex="a")
    with pytest.raises(InvalidRequestError):
        params.structured_outputs = {"regex": ""}
    assert params.structured_outputs == StructuredOutputs(regex="a")
