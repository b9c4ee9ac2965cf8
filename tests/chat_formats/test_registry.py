from __future__ import annotations

from pathlib import Path

import pytest
from format_cases import CASES

from octavo.chat_formats.registry import FORMATS, format_of

TEMPLATES = Path(__file__).parent.parent / "text" / "chat_templates"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("qwen3", "hermes"),
        ("llama3", "llama-json"),
        ("mistral", "mistral"),
        ("chatml", "generic-json"),
        ("gemma3", "generic-json"),
        ("phi", "phi-4-mini"),
    ],
)
def test_the_template_tells_the_format(file, name):
    source = (TEMPLATES / f"{file}.jinja").read_text()
    assert format_of(source, {}).name == name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if tools %}<tool_call>\n{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>\n<parameter=p>{% endif %}", "qwen3-coder"),
        ("{% if tools %}[TOOL_CALLS] [{% endif %}", "mistral"),
        ("{% if tools %}[TOOL_CALLS]f[ARGS]{% endif %}", "mistral-args"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic"),
        ("{% if tools %}<|tool_list_start|>{% endif %}", "tagged-pythonic"),
        (
            '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary '
            "of argument name and its value}.{% endif %}",
            "llama-json",
        ),
        (
            "{% if tools %}<tool_call>{n}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>",
            "glm-4.5",
        ),
        ("<tool_call>{n}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call>", "glm-4.7"),
        ("{{ '<start_function_call>call:' + name }}", "functiongemma"),
        ("{{ '<|tool_call>call:' + name }}", "gemma-4"),
        ("{{ '<minimax:tool_call>' }}<invoke name=\"tool-name-1\">", "minimax-m2"),
        ("{% set dsml = '｜DSML｜' %}<{{ dsml }}function_calls>", "deepseek-v3.2"),
        ("{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}", "deepseek-v4"),
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + n + '<｜tool▁sep｜>' + a",
            "deepseek-v3.1",
        ),
        ("<｜tool▁calls▁begin｜>{{ tool['type'] + '<｜tool▁sep｜>' }}```json", "deepseek-v3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}", "kimi-k2"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("respond only with <|tool_call|> followed by a JSON list of tools used", "granite-3"),
        ("return a json object within <tool_call></tool_call> XML tags", "hermes"),  # Granite 4
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi-4-mini"),
        ("'<function_calls>' + message['function_calls'] + '</function_calls>'", "olmo-3"),
        ('<TOOLCALL>[{"name": "tool_name1"', "nemotron"),
        ("as a list of JSON objects within <tool_calls></tool_calls> XML tags", "tool-calls-list"),
        ("<|START_THINKING|>{{ x }}<|END_THINKING|><|START_ACTION|>[", "command"),
        ("{{ '<|action_start|><|plugin|>\\n' }}", "internlm"),
        ("When using tools, make calls in a single JSON array: \n\n[", "xlam"),
        ("{% set ns = ']<]minimax[>[' %}{{ ns ~ '<tool_call>' }}", "generic-json"),
        ("{{ '<|open|>' + tag + '<|sep|>' }}{{ '<|close|>' + tag }}", "kimi-k3"),
        ("", "generic-json"),
        ("{{ messages[0].content }}", "generic-json"),
    ],
)
def test_signs_in_sources_tell_the_format(source, name):
    assert format_of(source, {}).name == name


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_of_the_format_that_its_source_tells(name):
    case = CASES[name]
    assert type(format_of(case.source, case.format().template.special_tokens)) is case.kind


def test_every_format_has_a_case():
    assert {case.kind for case in CASES.values()} == set(FORMATS)


def test_names_are_unlike_and_the_last_fits_all():
    assert len({known.name for known in FORMATS}) == len(FORMATS)
    assert [known.name for known in FORMATS if known.fits(format_of("", {}).template)] == [
        "generic-json"
    ]
