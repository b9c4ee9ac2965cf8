"""Bodies: strict JSON, strict types, and errors that name the field."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pace import python_seconds
from pydantic import BaseModel, ConfigDict, Field

from octavo.server.http import json_text
from octavo.server.http.body import MAX_PROBLEMS, JsonRoute
from octavo.server.http.context import RequestContext
from octavo.server.http.errors import HttpError, error_response
from octavo.server.http.tenants import Tenant


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: int = 0


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    count: int | None = Field(None, ge=1, le=10)
    ratio: float | None = None
    stop: str | list[str] | None = None
    inner: list[Inner] = []


async def echo(body: Outer) -> dict:
    return body.model_dump()


SIMPLE_TYPES = ["application/x-www-form-urlencoded", "text/plain", "text/plain;charset=UTF-8"]


@pytest.fixture
def post():
    app = FastAPI()
    app.add_exception_handler(HttpError, _answer_error)
    router = APIRouter(route_class=JsonRoute)
    router.post("/echo")(echo)
    app.include_router(router)

    async def with_context(scope, receive, send):
        scope["octavo"] = RequestContext("req-1", Tenant("test"), time.monotonic())
        await app(scope, receive, send)

    def post(body, content_type="application/json", **more) -> httpx.Response:
        async def send():
            transport = httpx.ASGITransport(with_context)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {} if content_type is None else {"content-type": content_type}
                headers |= {name.replace("_", "-"): value for name, value in more.items()}
                return await client.post("/echo", content=content, headers=headers)

        return asyncio.run(send())

    return post


async def _answer_error(request, error):
    return error_response(error)


def problem(response: httpx.Response) -> tuple[str, str | None]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"], error["param"]


def test_a_valid_body_reaches_the_endpoint(post):
    body = {"name": "a", "count": 10, "ratio": 1, "stop": ["x"], "inner": [{"size": 3}]}
    assert post(body).json() == body
    assert post({"name": "a", "count": None}).status_code == 200


@pytest.mark.parametrize("content_type", [None, "application/json; charset=utf-8", *SIMPLE_TYPES])
def test_content_types_that_are_read(post, content_type):
    assert post({"name": "a"}, content_type).json()["name"] == "a"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://test"},
        {"origin": "null"},
        {"referer": "http://elsewhere/"},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_mode": "no-cors"},
        {"user_agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    ],
)
@pytest.mark.parametrize("content_type", SIMPLE_TYPES)
def test_a_browser_must_say_json(post, content_type, headers):
    """It may send these types to anybody, with whatever a foreign page has written."""
    assert "Content-Type" in problem(post({"name": "a"}, content_type, **headers))[0]
    assert post({"name": "a"}, **headers).status_code == 200


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-16", "multipart/form-data", "text/html", ""]
)
def test_other_content_types_are_refused(post, content_type):
    assert "Content-Type" in problem(post({"name": "a"}, content_type))[0]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "name", "name: is required"),
        ({"name": "a", "coumt": 1}, "coumt", "coumt: is not a known field"),
        ({"name": "a", "count": True}, "count", "count: should be a valid integer"),
        ({"name": "a", "count": "1"}, "count", "count: should be a valid integer"),
        ({"name": "a", "count": 1.5}, "count", "count: should be a valid integer"),
        ({"name": "a", "count": 1.0}, "count", "count: should be a valid integer"),
        ({"name": "a", "count": 0}, "count", "count: should be greater than or equal to 1"),
        ({"name": "a", "count": 2**63}, "count", "count: should be less than or equal to 10"),
        ({"name": "a", "ratio": True}, "ratio", "ratio: should be a valid number"),
        ({"name": "a", "inner": [{}, {"size": "3"}]}, "inner.1.size", "inner.1.size: should be"),
        ({"name": "a", "stop": 3}, "stop", "stop: should be a valid string, or should be"),
        ({"name": "a", "stop": ["x", 3]}, "stop", "stop: should be a valid string"),
    ],
)
def test_a_wrong_field_is_named(post, body, param, message):
    text, named = problem(post(body))
    assert text.startswith(message)
    assert named == param
    assert "pydantic" not in text and "list[str]" not in text


def test_at_most_ten_problems_are_told(post):
    text, param = problem(post({f"x{i}": 1 for i in range(500)}))
    assert len(text.split("; ")) == MAX_PROBLEMS + 1
    assert text.endswith(f"and {501 - MAX_PROBLEMS} more")
    assert param == "name"


NOT_JSON = [
    b"",
    b"{",
    b"nul",
    b"{'name': 1}",
    b'{"name": NaN}',
    b'{"name": Infinity}',
    b'{"name": -Infinity}',
    b'{"name": 1e400}',
    b'{"name": -1e400}',
    b'{"name": 01}',
    b'{"name": .5}',
    b'{"name": "a",}',
    b'{"name": "a"} x',
    b'{"name": "\x00"}',
    b'{"name": "\xff"}',
    b'{"name": "a", "name": "b"}',
    b'{"name": "a", "inner": [{"size": 1, "size": 1}]}',
    b'\xef\xbb\xbf{"name": "a"}',
    '{"name": "a"}'.encode("utf-16"),
    b'{"name": ' + b"9" * 10_000 + b"}",
    b'{"name": ' + b"[" * 100 + b"]" * 100 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" + b"1," * (json_text.MAX_VALUES) + b"1]",
]


@pytest.mark.parametrize("body", NOT_JSON, ids=range(len(NOT_JSON)))
def test_what_is_not_json_is_refused(post, body):
    text, _ = problem(post(body))
    assert "JSON" in text
    assert len(text) < 200


@pytest.mark.parametrize("body", [b"[]", b'"a"', b"1", b"null", b"true"])
def test_a_body_is_an_object(post, body):
    assert problem(post(body))[0] == "The body must be a JSON object."


def test_depth_counts_levels_not_brackets():
    flat = {"name": [[] for _ in range(1000)]}
    assert json_text.parse(json.dumps(flat).encode()) == flat
    deepest = "[" * json_text.MAX_DEPTH + "]" * json_text.MAX_DEPTH
    assert json_text.parse(deepest.encode()) is not None
    with pytest.raises(HttpError, match="levels"):
        json_text.parse(f"[{deepest}]".encode())


def test_sizes_are_bounded_outside_of_text():
    keys = {str(i): 0 for i in range(json_text.MAX_KEYS)}
    lists = [[]] * (json_text.MAX_CONTAINERS - 1)
    for value in (keys, lists, [0] * json_text.MAX_VALUES):
        assert len(json_text.parse(json.dumps(value).encode())) == len(value)
    for value in ({**keys, "x": 0}, [*lists, []], [0] * (json_text.MAX_VALUES + 1)):
        with pytest.raises(HttpError, match="more than"):
            json_text.parse(json.dumps(value).encode())
    objects = [keys] * (json_text.MAX_ALL_KEYS // json_text.MAX_KEYS)
    assert json_text.parse(json.dumps(objects).encode()) == objects
    with pytest.raises(HttpError, match="keys"):
        json_text.parse(json.dumps([*objects, {"x": 0}]).encode())
    text = '[{"a\\": [1, 2]}], \\' * 150_000  # with quotes and backslashes of its own
    assert json_text.parse(json.dumps([text, text]).encode()) == [text, text]
    with pytest.raises(HttpError, match="lists"):
        json_text.parse(json.dumps([text, [*lists]]).encode())
    strings = [r"\""] * json_text.MAX_STRINGS
    assert json_text.parse(json.dumps(strings).encode()) == strings
    with pytest.raises(HttpError, match="strings"):
        json_text.parse(json.dumps([*strings, *strings, ""]).encode())


def test_a_key_that_is_there_twice_is_found_in_one_pass():
    keys = ",".join(f'"{"x" * 200}{i}": 0' for i in range(json_text.MAX_KEYS - 1))
    body = f'{{{keys}, "{"x" * 200}{json_text.MAX_KEYS - 2}": 0}}'.encode()
    started = time.process_time()
    with pytest.raises(HttpError, match="occurs twice"):
        json_text.parse(body)
    # Each key with each other was a second; this is some milliseconds.
    assert time.process_time() - started < python_seconds(2e6)


def test_lone_surrogates_become_replacement_characters(post):
    assert post(rb'{"name": "a\ud800b"}').json()["name"] == "a\ufffdb"
    assert post(rb'{"name": "\ud83d\ude00"}').json()["name"] == "😀"
    assert problem(post(rb'{"name": "a", "\udc00": 1}')) == (
        "\ufffd: is not a known field",
        "\ufffd",
    )
    assert post({"name": "NUL \x00 stays"}).json()["name"] == "NUL \x00 stays"


def test_pieces_are_the_same_json():
    values = [
        {"a": [{"b": [1, None, True, "é\n"], "c": {"d": {"e": {"f": [1.5, {"g": []}]}}}}]},
        [[[[[[[1, [2]]]]]]]],
        {},
        [],
        "x",
    ]
    for value in values:
        assert json_text.encode_in_pieces(value) == json_text.encode(value)
    with pytest.raises(ValueError):
        json_text.encode_in_pieces({"a": float("nan")})


@pytest.mark.timing
def test_reading_a_large_body_does_not_hold_up_the_loop():
    model_body = json.dumps({"name": "a" * 2_000_000, "stop": ["word"] * 100_000}).encode()

    async def longest_stall() -> float:
        from octavo.server.http.background import in_background
        from octavo.server.http.body import read_model

        reading = asyncio.ensure_future(in_background(read_model, Outer, model_body))
        longest, last = 0.0, time.process_time()
        while not reading.done():
            await asyncio.sleep(0.001)
            now = time.process_time()
            longest, last = max(longest, now - last), now
        assert len((await reading).stop) == 100_000
        return longest

    # In CPU time: another process may have the machine meanwhile.
    assert any(asyncio.run(longest_stall()) < python_seconds(1e6) for _ in range(5))


def test_the_schema_describes_the_body():
    app = FastAPI()
    router = APIRouter(route_class=JsonRoute)
    router.post("/echo")(echo)
    app.include_router(router)
    schema = app.openapi()
    content = schema["paths"]["/echo"]["post"]["requestBody"]["content"]["application/json"]
    assert content["schema"] == {"$ref": "#/components/schemas/Outer"}
    assert schema["components"]["schemas"]["Outer"]["additionalProperties"] is False
