"""Formats of tool calls with answers that models of each family would write."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.generic_json import GenericJSON
from octavo.chat_formats.hermes import Hermes
from octavo.chat_formats.llama_json import LlamaJSON
from octavo.chat_formats.messages import ParsedMessage
from octavo.chat_formats.mistral import Mistral, MistralArgs
from octavo.chat_formats.output_parser import OutputParser
from octavo.chat_formats.pythonic import Pythonic, TaggedPythonic
from octavo.chat_formats.qwen3_coder import Qwen3Coder

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "wind": {"type": "boolean"},
            },
            "required": ["city"],
        },
    },
}
EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "options": {"$ref": "#/$defs/Options"},
            },
            "required": ["path", "text"],
            "$defs": {"Options": {"type": "object", "properties": {"force": {"type": "boolean"}}}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
REMOTE = {"type": "function", "function": {"name": "mcp-1/disk.free:gb"}}
TOOLS = [WEATHER, EDIT, CLOCK, REMOTE]


@dataclass
class Case:
    """A format, its template's sign, and texts with what they say.

    Args:
        special_texts: control tokens of the vocabulary.
        texts: of each answer its reasoning, its content, and its calls.
    """

    kind: type[ChatFormat]
    source: str
    special_texts: tuple[str, ...] = ()
    texts: dict[str, tuple[str | None, str | None, list[tuple[str, str]]]] = field(
        default_factory=dict
    )

    def format(self) -> ChatFormat:
        specials = {text: 258 + i for i, text in enumerate(self.special_texts)}
        return self.kind(Template(self.source, {"<eos>": 256, "<stop>": 257, **specials}))


PARIS = '{"city": "Paris"}'
CASES = {
    "hermes": Case(
        Hermes,
        "tools <tool_call> <think> </think>",
        texts={
            'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
            "</tool_call>": (None, "Let me look.", [("get_weather", PARIS)]),
            "<think>\nThe user wants two.\n</think>\n\n<tool_call>\n"
            '{"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}\n</tool_call>'
            '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><stop>': (
                "The user wants two.",
                None,
                [("get_weather", '{"city": "São Paulo", "days": 3}'), ("clock", "{}")],
            ),
            '<tool_call>{"arguments": {"path": "</tool_call>", "text": "{[\\"\\u00e9\\n"}, '
            '"name": "edit"}</tool_call> done': (
                None,
                "done",
                [("edit", '{"path": "</tool_call>", "text": "{[\\"\\u00e9\\n"}')],
            ),
            '```json\n{\n  "name": "get_weather",\n  "arguments": {"city": "Paris"}\n}\n```': (
                None,
                None,
                [("get_weather", PARIS)],
            ),
            '{"name": "clock", "arguments": {}}\n{"name": "clock", "arguments": {}}': (
                None,
                None,
                [("clock", "{}"), ("clock", "{}")],
            ),
            "```python\nprint({})\n```": (None, "```python\nprint({})\n```", []),
        },
    ),
    "qwen3-coder": Case(
        Qwen3Coder,
        "tools <tool_call> <function= <parameter=",
        texts={
            "I will edit it.\n<tool_call>\n<function=edit>\n<parameter=path>\na.py\n</parameter>\n"
            '<parameter=text>\nif a < b:\n    print("é")\n\n</parameter>\n<parameter=lines>\n'
            "[1, 2]\n</parameter>\n</function>\n</tool_call>": (
                None,
                "I will edit it.",
                [
                    (
                        "edit",
                        '{"path": "a.py", "text": "if a < b:\\n    print(\\"é\\")\\n", '
                        '"lines": [1, 2]}',
                    )
                ],
            ),
            "<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=wind>True"
            "</parameter>\n</function>\n</tool_call>": (
                None,
                None,
                [("get_weather", '{"city": "Paris", "wind": true}')],
            ),
            "<function=edit><parameter=options>\n"
            '{"</parameter>": "</function>"}\n</parameter></function>': (
                None,
                None,
                [("edit", '{"options": {"</parameter>": "</function>"}}')],
            ),
            "<tool_call>\n<function=edit>\n<parameter=path>\n3\n</parameter>\n<parameter=text>\n"
            "null\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n"
            "</function>\n</tool_call>": (
                None,
                None,
                [("edit", '{"path": "3", "text": null}'), ("clock", "{}")],
            ),
        },
    ),
    "llama-json": Case(
        LlamaJSON,
        'tools "parameters": dictionary of argument name <|python_tag|>',
        ("<|python_tag|>", "<|eom_id|>"),
        {
            '{"name": "get_weather", "parameters": {"city": "Paris"}}': (
                None,
                None,
                [("get_weather", PARIS)],
            ),
            '<|python_tag|>{"name": "clock", "parameters": {}}; {"type": "function", '
            '"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>': (
                None,
                None,
                [("clock", "{}"), ("get_weather", PARIS)],
            ),
            '{"name": "Ada", "age": 36}': (None, '{"name": "Ada", "age": 36}', []),
        },
    ),
    "pythonic": Case(
        Pythonic,
        "tools [func_name1(",
        ("<|python_start|>", "<|python_end|>"),
        {
            "[get_weather(city='Paris', days=2, wind=True), clock()]": (
                None,
                None,
                [("get_weather", '{"city": "Paris", "days": 2, "wind": true}'), ("clock", "{}")],
            ),
            '<|python_start|>[edit(path="it\'s \\"a\\".py", text=None, lines=[1, 2,], '
            'options={"force": False})]<|python_end|>': (
                None,
                None,
                [
                    (
                        "edit",
                        '{"path": "it\'s \\"a\\".py", "text": null, "lines": [1, 2], '
                        '"options": {"force": false}}',
                    )
                ],
            ),
            "[1] is a footnote": (None, "[1] is a footnote", []),
        },
    ),
    "tagged-pythonic": Case(
        TaggedPythonic,
        "tools <|tool_list_start|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        {
            '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Looking it up.': (
                None,
                "Looking it up.",
                [("get_weather", PARIS)],
            ),
        },
    ),
    "mistral": Case(
        Mistral,
        "tools [TOOL_CALLS]",
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        {
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
            '{"name": "clock", "arguments": {}, "id": "VvvODy9mT"}]<eos>': (
                None,
                None,
                [("get_weather", PARIS), ("clock", "{}")],
            ),
        },
    ),
    "mistral-args": Case(
        MistralArgs,
        "tools [TOOL_CALLS] [ARGS] [THINK]",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        {
            '[THINK]Two things.[/THINK]Fine.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
            "[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{}": (
                "Two things.",
                "Fine.",
                [("get_weather", PARIS), ("clock", "{}")],
            ),
        },
    ),
    "generic-json": Case(
        GenericJSON,
        "no word of them",
        texts={
            '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
            '{"name": "clock", "arguments": {}}]}': (
                None,
                None,
                [("get_weather", PARIS), ("clock", "{}")],
            ),
            '{"answer": 42}': (None, '{"answer": 42}', []),
        },
    ),
}


def parsed(parser: OutputParser, pieces: list[str]) -> ParsedMessage:
    """The message of a text that comes in pieces, without the ids of its calls."""
    message = ParsedMessage(warnings=parser.warnings)
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    for call in message.tool_calls:
        call.id = ""
    return message
