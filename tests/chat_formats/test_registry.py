from __future__ import annotations

from pathlib import Path

import pytest

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
        ("phi", "generic-json"),
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
        ("", "generic-json"),
        ("{{ messages[0].content }}", "generic-json"),
    ],
)
def test_signs_in_sources_tell_the_format(source, name):
    assert format_of(source, {}).name == name


def test_names_are_unlike_and_the_last_fits_all():
    assert len({known.name for known in FORMATS}) == len(FORMATS)
    assert [known.name for known in FORMATS if known.fits(format_of("", {}).template)] == [
        "generic-json"
    ]
