"""Formats of tool calls with answers that models of each family would write."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.chat_formats.chat_format import ChatFormat, Template
from octavo.chat_formats.command import Command
from octavo.chat_formats.deepseek import DeepSeekV3, DeepSeekV31
from octavo.chat_formats.gemma import FunctionGemma, Gemma4
from octavo.chat_formats.generic_json import GenericJSON
from octavo.chat_formats.glm4 import GLM4, GLM47
from octavo.chat_formats.harmony import Harmony
from octavo.chat_formats.hermes import Hermes
from octavo.chat_formats.internlm import InternLM
from octavo.chat_formats.invoke_calls import DeepSeekV4, DeepSeekV32, MiniMaxM2
from octavo.chat_formats.json_lists import Granite3, Nemotron, Phi4Mini, ToolCallsList
from octavo.chat_formats.kimi_k2 import KimiK2
from octavo.chat_formats.kimi_k3 import KimiK3
from octavo.chat_formats.llama_json import LlamaJSON
from octavo.chat_formats.messages import ParsedMessage
from octavo.chat_formats.mistral import Mistral, MistralArgs
from octavo.chat_formats.output_parser import OutputParser
from octavo.chat_formats.pythonic import Olmo3, Pythonic, TaggedPythonic
from octavo.chat_formats.qwen3_coder import Qwen3Coder, SeedOSS
from octavo.chat_formats.xlam import XLAM

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
        before_content: what is before plain text in an answer.
    """

    kind: type[ChatFormat]
    source: str
    special_texts: tuple[str, ...] = ()
    texts: dict[str, tuple[str | None, str | None, list[tuple[str, str]]]] = field(
        default_factory=dict
    )
    before_content: str = ""

    def format(self) -> ChatFormat:
        specials = {text: 258 + i for i, text in enumerate(self.special_texts)}
        return self.kind(Template(self.source, {"<eos>": 256, "<stop>": 257, **specials}))


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
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
            '```json\n{"name": "clock", "arguments": {}}\n```\n'
            '```\n{"name": "clock", "arguments": {}}\n```\n```python\n1\n```': (
                None,
                "```python\n1\n```",
                [("clock", "{}"), ("clock", "{}")],
            ),
            "```python\nprint({})\n```": (None, "```python\nprint({})\n```", []),
            '{{"name": "get_weather", "arguments": {"city": "Paris"}}}\n': (
                None,
                None,
                [("get_weather", PARIS)],
            ),
            '```json\n{{"name": "clock", "arguments": {}}}\n```': (None, None, [("clock", "{}")]),
            '<tool_call>\n{{"name": "clock", "arguments": {}}}\n</tool_call>': (
                None,
                None,
                [("clock", "{}")],
            ),
            '{{"name": "Ada", "arguments": {}}}': (
                None,
                '{{"name": "Ada", "arguments": {}}}',
                [],
            ),
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
    "seed-oss": Case(
        SeedOSS,
        "tools <seed:tool_call> <function= <parameter= <seed:think>",
        ("<seed:tool_call>", "</seed:tool_call>"),
        {
            "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n"
            "<parameter=city>\nParis\n</parameter>\n</function>\n</seed:tool_call>": (
                "Hm.",
                None,
                [("get_weather", PARIS)],
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
    "deepseek-v3": Case(
        DeepSeekV3,
        "tools <｜tool▁calls▁begin｜> function<｜tool▁sep｜> ```json <think>",
        DEEPSEEK,
        {
            "<think>\nTwo.\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
            '<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜><eos>": (
                "Two.",
                "I look.",
                [("get_weather", PARIS), ("clock", "{}")],
            ),
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n{"path": "```", "text": null}'
            "<｜tool▁call▁end｜>": (None, None, [("edit", '{"path": "```", "text": null}')]),
        },
    ),
    "deepseek-v3.1": Case(
        DeepSeekV31,
        "tools <｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜> <think>",
        DEEPSEEK,
        {
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>": (
                None,
                "I look.",
                [("get_weather", PARIS), ("clock", "{}")],
            ),
        },
    ),
    "kimi-k2": Case(
        KimiK2,
        "tools <|tool_calls_section_begin|> <think>",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        {
            "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>"
            'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}'
            "<|tool_call_end|><|tool_call_begin|>functions.mcp-1/disk.free:gb:1"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>": (
                "Hm.",
                "I look.",
                [("get_weather", PARIS), ("mcp-1/disk.free:gb", "{}")],
            ),
            "<|tool_call_begin|>clock<|tool_call_argument_begin|>{}<|tool_call_end|>": (
                None,
                None,
                [("clock", "{}")],
            ),
        },
    ),
    "harmony": Case(
        Harmony,
        "tools <|start|>assistant<|channel|>analysis<|message|>",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
        + ("<|return|>",),
        {
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>': (
                "One.",
                None,
                [("get_weather", PARIS)],
            ),
            ' to=functions.clock<|channel|>commentary json<|message|>{"a": "<|end|>"}': (
                None,
                None,
                [("clock", '{"a": "<|end|>"}')],
            ),
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>It is 5.<|return|>": (
                "One.\n\nTwo.",
                "I look.\n\nIt is 5.",
                [],
            ),
            "to=be": (None, "to=be", []),
        },
        before_content="<|channel|>final<|message|>",
    ),
    "granite-3": Case(
        Granite3,
        "tools <|tool_call|> <think></think> <response></response>",
        ("<|tool_call|>",),
        {
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
            '{"name": "clock", "arguments": {}}]<eos>': (
                None,
                None,
                [("get_weather", PARIS), ("clock", "{}")],
            ),
            "<think>Hm.</think>\n<response>Yes.</response>": ("Hm.", "Yes.", []),
            "A <response>.": (None, "A <response>.", []),
        },
    ),
    "phi-4-mini": Case(
        Phi4Mini,
        "tools <|tool|> <|/tool|>",
        ("<|tool_call|>", "<|/tool_call|>", "<|end|>"),
        {
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
            "<|/tool_call|><|end|>": (None, None, [("get_weather", PARIS)]),
            'functools[{"name": "clock", "arguments": {}}]<|end|>': (None, None, [("clock", "{}")]),
            "functools has a cache.": (None, "functools has a cache.", []),
        },
    ),
    "nemotron": Case(
        Nemotron,
        "tools <TOOLCALL> <think>",
        texts={
            '<think>\n</think>\n<TOOLCALL>[{"name": "get_weather", "arguments": '
            '{"city": "Paris"}}, {"name": "clock", "arguments": {}}]</TOOLCALL>': (
                None,
                None,
                [("get_weather", PARIS), ("clock", "{}")],
            ),
        },
    ),
    "tool-calls-list": Case(
        ToolCallsList,
        "tools <tool_calls>",
        texts={
            '<tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n]'
            "</tool_calls>": (None, None, [("get_weather", PARIS)]),
            '<tool_calls>\n{"name": "clock", "arguments": {}}\n{"name": "clock", "arguments": {}}'
            "\n</tool_calls>": (None, None, [("clock", "{}"), ("clock", "{}")]),
        },
    ),
    "glm-4.5": Case(
        GLM4,
        "tools <tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value> <think>",
        texts={
            "<think>Hm.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
            "</tool_call>\n<tool_call>clock\n</tool_call>": (
                "Hm.",
                "I look.",
                [("get_weather", '{"city": "Paris", "days": 3}'), ("clock", "{}")],
            ),
        },
    ),
    "glm-4.7": Case(
        GLM47,
        "tools <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value> <think>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        {
            "<tool_call>edit<arg_key>path</arg_key><arg_value>\na\n</arg_value><arg_key>text"
            "</arg_key><arg_value>null</arg_value></tool_call>": (
                None,
                None,
                [("edit", '{"path": "\\na\\n", "text": null}')],
            ),
        },
    ),
    "minimax-m2": Case(
        MiniMaxM2,
        "tools <minimax:tool_call> <think>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        {
            'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
            'Paris</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n'
            "</minimax:tool_call>": (
                None,
                "I look.",
                [("get_weather", PARIS), ("clock", "{}")],
            ),
        },
    ),
    "deepseek-v3.2": Case(
        DeepSeekV32,
        "tools <｜DSML｜function_calls> <think>",
        ("｜DSML｜",),
        {
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n'
            '<｜DSML｜parameter name="path" string="true">3</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="text" string="false">null</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>": (
                None,
                None,
                [("edit", '{"path": "3", "text": null}'), ("clock", "{}")],
            ),
        },
    ),
    "deepseek-v4": Case(
        DeepSeekV4,
        "tools '｜DSML｜' 'tool_calls>' <think>",
        texts={
            '<think>Hm.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="edit">\n'
            '<｜DSML｜parameter name="path" string="true">a<b</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="text" string="true">null</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>": (
                "Hm.",
                None,
                [("edit", '{"path": "a<b", "text": "null"}')],
            ),
        },
    ),
    "functiongemma": Case(
        FunctionGemma,
        "tools <start_function_call>",
        ("<start_function_call>", "<end_function_call>"),
        {
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
            "<start_function_call>call:clock{}<end_function_call>": (
                None,
                None,
                [("get_weather", PARIS), ("clock", "{}")],
            ),
            '<start_function_call>call:edit{lines:[1,2],options:{force:True},path:<escape>a}"'
            "<escape>,text:None}<end_function_call>": (
                None,
                None,
                [
                    (
                        "edit",
                        '{"lines": [1, 2], "options": {"force": true}, "path": "a}\\"", '
                        '"text": null}',
                    )
                ],
            ),
        },
    ),
    "gemma-4": Case(
        Gemma4,
        "tools <|tool_call>call: <|channel>thought <channel|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        {
            "<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:get_weather"
            '{city:<|"|>Paris<|"|>,days:3}<tool_call|>': (
                "Hm.",
                "I look.",
                [("get_weather", '{"city": "Paris", "days": 3}')],
            ),
        },
    ),
    "olmo-3": Case(
        Olmo3,
        "functions <function_calls>",
        texts={
            'I look.\n<function_calls>\nget_weather(city="Paris", wind=True)\nclock()\n'
            "</function_calls>": (
                None,
                "I look.",
                [("get_weather", '{"city": "Paris", "wind": true}'), ("clock", "{}")],
            ),
        },
    ),
    "kimi-k3": Case(
        KimiK3,
        "tools <|open|> <|close|> <|sep|>",
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        {
            "<|open|>think<|sep|>Two.<|close|>think<|sep|><|open|>response<|sep|>I look."
            '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"'
            '<|sep|><|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
            '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call'
            '<|sep|><|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|><|close|>tools'
            "<|sep|><|close|>message<|sep|><|end_of_msg|>": (
                "Two.",
                "I look.",
                [("get_weather", '{"city": "Paris", "days": 3}'), ("clock", "{}")],
            ),
            "<|open|>response<|sep|>It is 5.<|close|>response<|sep|><|close|>message<|sep|>": (
                None,
                "It is 5.",
                [],
            ),
        },
        before_content="<|open|>response<|sep|>",
    ),
    "command": Case(
        Command,
        "tools <|START_ACTION|> <|START_THINKING|> <|START_RESPONSE|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>")
        + ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        {
            '<|START_THINKING|>Two.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
            '"tool_name": "get_weather", "parameters": {"city": "Paris"}},\n    {"tool_call_id": '
            '"1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>': (
                "Two.",
                None,
                [("get_weather", PARIS), ("clock", "{}")],
            ),
            "<|START_RESPONSE|>It is 5.<|END_RESPONSE|>": (None, "It is 5.", []),
        },
        before_content="<|START_RESPONSE|>",
    ),
    "internlm": Case(
        InternLM,
        "tools <|action_start|><|plugin|>",
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        {
            'I look.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": '
            '{"city": "Paris"}}<|action_end|>': (
                None,
                "I look.",
                [("get_weather", PARIS)],
            ),
        },
    ),
    "xlam": Case(
        XLAM,
        "tools: make calls in a single JSON array",
        texts={
            '[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
            '{"name": "clock", "arguments": {}}]': (
                None,
                None,
                [("get_weather", PARIS), ("clock", "{}")],
            ),
            "[1] is a footnote": (None, "[1] is a footnote", []),
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
