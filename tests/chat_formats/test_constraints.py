"""Random walks through the grammars of calls: a model that knows nothing else writes these."""

from __future__ import annotations

import json
import random
import re

import pytest
from byte_tokens import EOS, VOCAB, byte_tokenizer
from format_cases import CASES, CLOCK, TOOLS, WEATHER, Case
from jsonschema import Draft202012Validator

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.chat_format import parse
from octavo.chat_formats.tagged_values import in_ascii
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import GrammarCompiler
from octavo.grammars.grammar_mask import GrammarMask
from octavo.text.tokenizer import Tokenizer

HARD = {
    "type": "function",
    "function": {
        "name": "hard",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
                "size": {"type": "string", "minLength": 1, "maxLength": 3},
                "kind": {"enum": ["a", "b\nc", 3, None]},
                "both": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}]},
                "list": {"type": ["array", "string"], "items": {"type": "boolean"}, "maxItems": 2},
                "one": {"allOf": [{"$ref": "#/$defs/Colour"}]},
                "flag": {"type": ["boolean", "null"]},
                "const": {"const": "x<y"},
                "deep": {
                    "type": "object",
                    "properties": {"n": {"type": "number"}, "s": {"type": "string"}},
                    "required": ["n"],
                },
            },
            "required": ["code", "both", "one"],
            "$defs": {"Colour": {"enum": ["red", "green"], "description": "A colour."}},
        },
    },
}
OPTIONAL = {
    "type": "function",
    "function": {
        "name": "clock_all",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": "integer", "maximum": 99, "minimum": 0} for name in "abc"
            },
        },
    },
}
ALL = [*TOOLS, HARD, OPTIONAL]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in ALL}
NAMES = sorted(CASES)
ONE_CALL = ("harmony", "internlm")  # an answer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    parts = tokenizer.specials.split(text)
    return [
        token for part in parts for token in ([part] if isinstance(part, int) else part.encode())
    ]


class Walker:
    """Draws answers of one format, and would like to write its tags where they do not belong."""

    def __init__(self, case: Case):
        self.format = case.format()
        tokenizer = byte_tokenizer(control=case.special_texts)
        self.specials = tokenizer.specials.matcher.ids
        self.tokenizer = tokenizer
        self.compiler = GrammarCompiler(tokenizer, VOCAB + len(case.special_texts), [EOS])
        self.texts = {token: text for text, token in self.specials.items()}
        tags = [*self.format.openers, *self.format.closers, *(self.format.thoughts or ())]
        wanted = [*tags, *case.texts]
        self.wanted = [list(text.encode()) for text in wanted]  # spelled out
        self.wanted += [ids_of(tokenizer, text) for text in wanted]

    def mask(self, **options) -> GrammarMask | None:
        asked = self.format.constraint(ALL, **options)
        assert isinstance(asked, StructuredOutputs)
        return self.compiler.mask(asked)

    def write(self, rng: random.Random, mask: GrammarMask) -> str:
        text = b""
        wanted: list[int] = []
        for step in range(4000):
            bits = mask.bitmask()
            allowed = [i for i in range(32 * len(bits)) if bits[i >> 5] >> (i & 31) & 1]
            if EOS in allowed and (step > 300 or len(allowed) == 1 or rng.random() < 0.02):
                return text.decode()
            allowed = [token for token in allowed if token != EOS]
            if not wanted and rng.random() < 0.1:
                wanted = rng.choice(self.wanted or [[ord("x")]])
            closing = [token for token in allowed if token > 255 or token in b'"]}>)']
            if wanted and wanted[0] in allowed:
                token = wanted[0]
            elif closing and rng.random() < (0.3 if step < 300 else 0.7):
                token = rng.choice(closing)
            else:
                token = rng.choice(allowed)
            wanted = wanted[1:] if wanted[:1] == [token] else []
            mask.advance([token])
            text += self.texts[token].encode() if token in self.texts else bytes([token])
        raise AssertionError(f"it does not end: {text[-200:]!r}")

    def repeat(self, rng: random.Random, mask: GrammarMask) -> str:
        """Return an answer of a model that calls rather than ends; empty if it thinks instead."""
        text = b""
        for _ in range(400):
            bits = mask.bitmask()
            allowed = [i for i in range(32 * len(bits)) if bits[i >> 5] >> (i & 31) & 1]
            going_on = [i for i in allowed if i != EOS and i != ord("]")]
            token = rng.choice(going_on or allowed)
            if token == EOS:
                return text.decode()
            mask.advance([token])
            text += self.texts[token].encode() if token in self.texts else bytes([token])
        return ""


WALKERS = {name: Walker(CASES[name]) for name in NAMES}


def check(calls) -> None:
    for call in calls:
        Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", NAMES)
def test_with_a_required_call_whatever_is_drawn_is_valid_calls(name, seed):
    walker, rng = WALKERS[name], random.Random(seed)
    options = {"begins_in_thought": walker.format.thoughts is not None and seed % 2 == 1}
    only = rng.choice([None, HARD, WEATHER, OPTIONAL])
    choice = "required" if only is None else only
    parallel = rng.random() < 0.5
    text = walker.write(rng, walker.mask(choice=choice, parallel=parallel, **options))
    for is_constrained in (False, True):
        message = parse(walker.format, text, ALL, is_constrained=is_constrained, **options)
        assert message.warnings == [] and message.content is None, text
        assert message.tool_calls and (parallel or len(message.tool_calls) == 1), text
        check(message.tool_calls)
        if only is not None:
            assert {call.name for call in message.tool_calls} == {only["function"]["name"]}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_the_model_chooses_to_make_is_valid(name, seed):
    walker, rng = WALKERS[name], random.Random(seed)
    options = {"begins_in_thought": walker.format.thoughts is not None and seed % 2 == 1}
    mask = walker.mask(choice="auto", **options)
    begin = ""
    if seed % 3 == 0:  # it begins as a call does
        begin = next(text for text in CASES[name].texts if CASES[name].texts[text][2])[:1]
        if begin.encode()[0] > 127:
            begin = ""
    text = walker.write(rng, mask)
    message = parse(walker.format, text, ALL, is_constrained=True, **options)
    assert message.warnings == [], text
    check(message.tool_calls)


SIMPLE = (
    {"type": "string"},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "string", "pattern": "^[a-z]+$"},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "number"},
    {"type": ["boolean", "null"]},
    {"type": ["string", "integer"]},
    {"enum": ["a", "</parameter", "x\ny", 1, 2.5, True, None]},
    {"const": "null"},
    {"minLength": 2, "minimum": 5},
    {"anyOf": [{}, {"type": "string"}]},
    {"$ref": "#/$defs/either"},
)


def some_object(rng: random.Random, depth: int = 0) -> dict:
    properties = {name: some_schema(rng, depth + 1) for name in rng.sample("abcdef", 3)}
    required = [name for name in properties if rng.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required}


def some_schema(rng: random.Random, depth: int) -> dict:
    kind = rng.random() if depth < 3 else 0
    if kind < 0.6:
        return rng.choice(SIMPLE)
    if kind < 0.75:
        return {"type": "array", "items": some_schema(rng, depth + 1), "maxItems": 2}
    if kind < 0.9:
        return some_object(rng, depth)
    return {"anyOf": [some_schema(rng, 3), some_schema(rng, depth + 1)]}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_any_schema_are_valid(name, seed):
    walker, rng = WALKERS[name], random.Random(seed)
    parameters = some_object(rng)
    parameters["$defs"] = {"either": {"enum": ["one", "two"]}}
    tool = {"name": "any", "parameters": parameters}
    asked = walker.format.constraint([tool], "required")
    text = walker.write(rng, walker.compiler.mask(asked))
    message = parse(walker.format, text, [tool], is_constrained=seed % 2 == 1)
    assert message.tool_calls and message.warnings == [] and message.content is None, text
    for call in message.tool_calls:
        Draft202012Validator(parameters).validate(json.loads(call.arguments))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_choice_of_calls_there_is_none(name):
    walker = WALKERS[name]
    for seed in range(4):
        text = walker.write(random.Random(seed), walker.mask(choice="none"))
        message = parse(walker.format, text, ALL)
        assert message.tool_calls == [] and message.warnings == []


@pytest.mark.parametrize("name", NAMES)
def test_a_usual_answer_is_possible(name):
    """Calls as templates write them, and text, are allowed."""
    walker = WALKERS[name]
    usual = {
        "qwen3-coder": "<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nParis\n</parameter>\n<parameter=wind>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "mistral-args": '[THINK]Hm.[/THINK]Fine.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        "tool-calls-list": '<tool_calls>[{"name": "clock", "arguments": {}}]</tool_calls>',
        "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    }
    text = usual.get(name) or next(iter(CASES[name].texts))
    before = CASES[name].before_content
    plain = (before + "Plain text: {1} < 2 [3]\n", before + 'No {"name"} here.')
    text = re.sub(r"(<eos>|<\|end\|>|<\|call\|>|<\|end_of_msg\|>)$", "", text)
    for answer in (text, *plain):
        mask = walker.mask(choice="auto")
        mask.advance(ids_of(walker.tokenizer, answer.replace("'", '"')))
        assert mask.bitmask() is not None and mask.is_accepting, answer


def constraint(name: str, parameters: dict, **options) -> StructuredOutputs:
    tool = {"name": "clock", "parameters": parameters}
    asked = CASES[name].format().constraint([tool], "required", **options)
    assert asked is not None
    return asked


@pytest.mark.parametrize("name", ["qwen3-coder", "pythonic"])
@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"anyOf": [{"required": ["a"]}, {}], "properties": {"a": {}}}, "'anyOf' on all arguments"),
        ({"minProperties": 1, "properties": {"a": {}}}, "'minProperties'"),
    ],
)
def test_keywords_on_several_arguments_are_refused_where_these_are_apart(name, parameters, part):
    with pytest.raises(InvalidRequestError, match=part) as error:
        constraint(name, {"type": "object", **parameters})
    assert error.value.field == "tools"


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "string", "not": {"const": "x"}}, "'not'"),
        ({"type": "string", "pattern": "a$|^b"}, "anchors inside"),
        ({"type": "string", "pattern": "(^a)b"}, "anchors inside"),
    ],
)
def test_what_cannot_be_said_of_plain_text_is_refused(schema, part):
    with pytest.raises(InvalidRequestError, match=re.escape(part)):
        constraint("qwen3-coder", {"type": "object", "properties": {"a": schema}})


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a/b$", "a/b", "xa/b"),
        ("b", "abc", "ac"),
        ("^a", "ab", "ba"),
        (r"^[$^|]\|x$", "$|x", "^x"),
        ("^(a|b)$", "b", "c"),
        ("a$", "ba", "ab"),
    ],
)
def test_patterns_hold_of_text_as_they_do_in_schemas(pattern, good, bad):
    schema = {"type": "string", "pattern": pattern}
    walker = WALKERS["qwen3-coder"]
    asked = constraint("qwen3-coder", {"properties": {"a": schema}, "required": ["a"]})
    for text, is_valid in ((good, True), (bad, False)):
        assert Draft202012Validator(schema).is_valid(text) == is_valid
        mask = walker.compiler.mask(asked)
        mask.advance(
            f"<tool_call>\n<function=clock>\n<parameter=a>\n{text}\n</parameter>\n</function>\n"
            "</tool_call>".encode()
        )
        assert mask.is_accepting == is_valid


ODD = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "not": {"const": "x"}},
        "b": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
        "c": {"oneOf": [{"type": "string", "pattern": "(?!x)."}, {"type": "string"}]},
        "d": {"anyOf": [{"not": {}}, {"type": "string"}]},
    },
    "dependentRequired": {"a": ["b"]},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_that_no_grammar_can_follow_is_refused_only_where_it_must_hold(name):
    walker = WALKERS[name]
    tool = {"name": "odd", "parameters": ODD}
    asked = walker.format.constraint([tool], "auto")
    parse(walker.format, walker.write(random.Random(0), walker.compiler.mask(asked)), [tool])
    for strict, choice in ((True, "auto"), (False, "required")):
        with pytest.raises(InvalidRequestError):
            asked = walker.format.constraint([{**tool, "strict": strict}], choice)
            walker.compiler.mask(asked)


def test_a_schema_of_a_tool_is_refused_with_its_place_and_the_name_of_the_tool():
    walker = WALKERS["hermes"]
    parameters = {"type": "object", "properties": {"a": {"not": {"pattern": "x"}}}}
    asked = walker.format.constraint([{"name": "odd", "parameters": parameters}], "required")
    with pytest.raises(InvalidRequestError) as error:
        walker.compiler.mask(asked)
    assert "the parameters of 'odd': 'not' at #/properties/a is not supported" in str(error.value)


def test_conditions_of_a_tool_hold():
    walker = WALKERS["hermes"]
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}},
        "required": ["a"],
        "if": {"properties": {"a": {"const": "x"}}},
        "then": {"required": ["b"]},
    }
    tool = {"name": "odd", "parameters": parameters}
    asked = walker.format.constraint([tool], "required")
    for seed in range(20):
        text = walker.write(random.Random(seed), walker.compiler.mask(asked))
        for call in parse(walker.format, text, [tool], is_constrained=True).tool_calls:
            Draft202012Validator(parameters).validate(json.loads(call.arguments))


@pytest.mark.parametrize(("name", "argument"), [("qwen3-coder", "a>b"), ("pythonic", "a b")])
def test_names_of_arguments_that_cannot_be_written_are_refused(name, argument):
    with pytest.raises(InvalidRequestError, match="the name of the argument"):
        constraint(name, {"properties": {argument: {}}})


def test_digits_and_letters_of_patterns_are_those_of_ascii():
    assert in_ascii(r"\d[\w-]\\d\s") == r"[0-9][[0-9A-Za-z_]-]\\d\s"


CONTENT = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["answer"],
}


@pytest.mark.parametrize("name", NAMES)
def test_content_of_a_schema_and_calls_can_be_asked_for_together(name):
    walker = WALKERS[name]
    for seed in range(12):
        text = walker.write(random.Random(seed), walker.mask(choice="auto", content=CONTENT))
        message = parse(walker.format, text, ALL, content_is_json=True)
        assert message.warnings == [], text
        check(message.tool_calls)
        assert (message.content is None) == bool(message.tool_calls)
        if message.content is not None:
            Draft202012Validator(CONTENT).validate(json.loads(message.content))
    for text in ('{"answer": 4}', '{\n  "answer": 4,\n  "name": "<think>"\n}'):
        before = CASES[name].before_content
        mask = walker.mask(choice="auto", content=CONTENT)
        mask.advance([*ids_of(walker.tokenizer, before), *text.encode()])
        assert mask.is_accepting
        assert parse(walker.format, before + text, ALL, content_is_json=True).content == text


def test_there_is_no_constraint_without_tools():
    for case in CASES.values():
        assert case.format().constraint(None) is None
        assert case.format().constraint([], "none") is None


def test_one_call_is_one_call_where_no_more_are_wanted():
    for name in NAMES:
        for seed in range(3):
            walker = WALKERS[name]
            mask = walker.mask(choice="auto", parallel=False)
            message = parse(walker.format, walker.write(random.Random(seed), mask), ALL)
            assert len(message.tool_calls) <= 1


def accepts(walker: Walker, choice: str, text: str) -> bool:
    mask = walker.compiler.mask(walker.format.constraint([CLOCK], choice))
    tokens = ids_of(walker.tokenizer, text)
    mask.advance(tokens)
    return mask.is_accepting


@pytest.mark.parametrize("name", NAMES)
def test_calls_come_to_an_end(name, monkeypatch):
    """A model that would write one call after the other has so many and no more."""

    def allow(number: int) -> None:
        for module in ("grammar", "generic_json", "xlam"):
            monkeypatch.setattr(f"octavo.chat_formats.{module}.MAX_CALLS", number)

    allow(3)
    walker = WALKERS[name]
    compiled = walker.compiler.mask(walker.format.constraint([CLOCK], "required"))
    most = 1 if name in ONE_CALL else 3
    texts: dict[int, str] = {}
    for seed in range(200):
        text = walker.repeat(random.Random(seed), compiled.fork())
        texts[len(parse(walker.format, text, [CLOCK], is_constrained=True).tool_calls)] = text
        if most in texts:
            break
    assert max(texts) == most, texts
    assert accepts(walker, "auto", texts[most])
    allow(2)
    for choice in ("required", "auto") if most > 1 else ():
        assert not accepts(walker, choice, texts[most])
