"""Constraints of answers at every door: what reaches the engine, and whose field is to blame."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.server.api.llama_server.routes import create_router as llama_server
from octavo.server.api.octavo.generate import create_router as generate
from octavo.server.api.openai.chat_completions import create_router as chat
from octavo.server.api.openai.completions import create_router as completions
from octavo.server.api.tgi.routes import create_router as tgi

SCHEMA = {"type": "object", "properties": {"b": {"const": None}, "a": {"type": "string"}}}
SCHEMA_TEXT = json.dumps(SCHEMA)
TAGS = {
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a>"],
}
GBNF = 'root ::= "a"'


@dataclass(frozen=True)
class Door:
    create_router: Callable[..., Any]
    path: str
    body: dict[str, Any]


DOORS = {
    "chat": Door(chat, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": Door(completions, "/v1/completions", {"prompt": "hi"}),
    "generate": Door(generate, "/generate", {"prompt": "hi"}),
    "llama-server": Door(llama_server, "/completion", {"prompt": "hi"}),
}


@pytest.fixture
def post(fake_engine, create_service, send):
    service = create_service(fake_engine)

    def post(door: Door, **fields: Any) -> Any:
        return send(door.create_router(service), "POST", door.path, json={**door.body, **fields})

    return post


@pytest.fixture(params=DOORS)
def ask(request, post):
    return lambda **fields: post(DOORS[request.param], **fields)


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


# The fields of a request, and what they ask the engine for.
ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": {}}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": named(SCHEMA)}, {"json": SCHEMA}),
    ({"response_format": named(SCHEMA, strict=False)}, {"json": SCHEMA}),
    (
        {"response_format": named(SCHEMA, strict=True, description="d")},
        {"json": SCHEMA, "disable_additional_properties": True},
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json", "value": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
    (
        {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}},
        {"json": SCHEMA},
    ),
    (
        {"response_format": {"type": "structural_tag", **TAGS}},
        {"structural_tag": {"type": "structural_tag", **TAGS}},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA_TEXT, "regex": None}}, {"json": SCHEMA_TEXT}),
    (
        {"structured_outputs": {"choice": ["a", "b"], "is_bounded": False}},
        {"choice": ["a", "b"], "is_bounded": False},
    ),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        {"json": SCHEMA, "whitespace_pattern": " ?"},
    ),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, {"json": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": GBNF}, {"grammar": GBNF}),
    ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ({"json_schema": SCHEMA_TEXT}, {"json": SCHEMA_TEXT}),
    ({"json_schema": {}}, {"json": {}}),
    ({"grammar": GBNF}, {"grammar": GBNF}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": GBNF}, {"grammar": GBNF}),
    ({"structural_tag": TAGS}, {"structural_tag": TAGS}),
    ({"response_format": {"type": "text"}, "regex": "a+"}, {"regex": "a+"}),
]


@pytest.mark.parametrize(("fields", "asked"), ASKED, ids=lambda each: next(iter(each)))
def test_what_is_asked_for_reaches_the_engine(ask, fake_engine, fields, asked):
    response = ask(**fields)
    assert response.status_code == 200, response.text
    assert fake_engine.requests[0].params.structured_outputs == StructuredOutputs(**asked)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"structured_outputs": {}, "guided_choice": [], "json_schema": False},
        {"grammar": "", "regex": "", "ebnf": "", "guided_json": None},
    ],
)
def test_what_asks_for_nothing_constrains_nothing(ask, fake_engine, fields):
    assert ask(**fields).status_code == 200
    assert fake_engine.requests[0].params.structured_outputs is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
        "schema is required",
    ),
    ({"response_format": named(4)}, "response_format.json_schema.schema", "an object or a text"),
    ({"response_format": named("")}, "response_format.json_schema.schema", "not empty"),
    ({"response_format": named(SCHEMA, strict=1)}, "response_format.json_schema.strict", "boolean"),
    ({"response_format": {"type": "regex"}}, "response_format", "value is required"),
    ({"response_format": {"type": "regex", "value": {}}}, "response_format.value", "text"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "format is required"),
    (
        {"response_format": {"type": "text", "schema": SCHEMA}},
        "response_format.schema",
        "no part of type 'text'",
    ),
    (
        {"response_format": {**named(SCHEMA), "schema": SCHEMA}},
        "response_format",
        "json_schema or schema, not both",
    ),
    ({"structured_outputs": {"jason": SCHEMA}}, "structured_outputs", "no field 'jason'"),
    (
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        "structured_outputs",
        "json and regex",
    ),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "not empty"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", "string"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
    ({"guided_choice": ["a"] * 5000}, "guided_choice", "4096"),
    ({"regex": "x" * (1 << 19)}, "regex", "at most"),
    ({"grammar": GBNF, "json_schema": SCHEMA}, "grammar", "give json_schema or grammar, not both"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "give response_format or structured_outputs, not both",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_is_wrong_is_refused_by_its_place(ask, fake_engine, fields, param, words):
    response = ask(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"] and error["message"].startswith(f"{param}: ")
    assert fake_engine.requests == []


# What the engine says of its own field, the client is told of the client's.
FIELDS: dict[str, dict[str, Any]] = {
    "response_format.json_schema.schema": {"response_format": named(SCHEMA)},
    "response_format": {"response_format": {"type": "structural_tag", **TAGS}},
    "structured_outputs.json": {"structured_outputs": {"json": SCHEMA}},
    "guided_json": {"guided_json": SCHEMA},
    "grammar": {"grammar": GBNF},
}


def refuse_in_the_engine(fake_engine) -> None:
    message = "'not' at #/properties/a is not supported"
    fake_engine.error = ConstraintError(message, "structured_outputs.json", "unsupported")
    fake_engine.error_after = 0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("field", FIELDS)
def test_the_engines_refusal_names_the_clients_field(ask, fake_engine, field, streams):
    refuse_in_the_engine(fake_engine)
    response = ask(**FIELDS[field], stream=streams)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": f"{field}: 'not' at #/properties/a is not supported",
        "type": "invalid_request_error",
        "param": field,
        "code": None,
    }


# -- TGI -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "asked"),
    [
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json", "value": SCHEMA_TEXT}, {"json": SCHEMA_TEXT}),
        ({"type": "regex", "value": "a+"}, {"regex": "a+"}),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, {"json": SCHEMA}),
    ],
)
@pytest.mark.parametrize("path", ["/", "/generate_stream", "/generate"])
def test_tgis_grammar(post, fake_engine, path, grammar, asked):
    door = Door(generate if path == "/generate" else tgi, path, {"inputs": "hi"})
    response = post(door, parameters={"grammar": grammar})
    assert response.status_code == 200, response.text
    assert fake_engine.requests[0].params.structured_outputs == StructuredOutputs(**asked)
    refuse_in_the_engine(fake_engine)
    response = post(door, parameters={"grammar": grammar})
    place = "schema" if grammar["type"] == "json_schema" else ""
    param = ".".join(filter(None, ("parameters.grammar.value", place)))
    error = response.json()
    assert (response.status_code, error["param"]) == (400, param)
    assert error["error"].startswith(f"{param}: 'not' at")
