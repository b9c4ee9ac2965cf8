"""Texts, conversations and tokenizers for the tests of ``octavo.text``."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from octavo.base.errors import DownloadError
from octavo.text.folder_tokenizer import load_folder_tokenizer
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.tokenizer import Tokenizer

# What tokenizers get wrong: scripts, marks, joiners, directions, white space, code, controls.
CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text(encoding="utf-8"))
NASTY = " \n\t\r'aAsStTdD19.,<>|/\u2581\u00e9\u4e2d\U0001f600"
WORDS = [
    "the",
    "of\u00a0and",
    "don't",
    "I'LL",
    "x86",
    "3,000",
    "na\u00efve",
    "caf\u00e9",
    "foo_bar()",
]
WORDS += ["--", "\u4e16\u754c", "\u0928\u092e", "\u0e2a\u0e27"]
PLANES = [(0, 0x7F), (0x80, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]


def random_text(generator: random.Random) -> str:
    """A short text: of anything Unicode has, of a few nasty characters, or of words."""
    kind = generator.random()
    if kind < 0.4:
        codes = (
            generator.randint(*generator.choice(PLANES)) for _ in range(generator.randrange(40))
        )
        return "".join(map(chr, codes))
    if kind < 0.7:
        return "".join(generator.choices(NASTY, k=generator.randrange(60)))
    words = " ".join(generator.choices(WORDS, k=generator.randrange(20)))
    return generator.choice(("", " ")) + words


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


@pytest.fixture(scope="session")
def random_texts():
    """``random_texts(n)``: n random texts, always the same."""

    def make(count: int) -> list[str]:
        generator = random.Random(20240229)
        return [random_text(generator) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def chat_templates() -> dict[str, str]:
    """Chat templates in the style of well-known models, by name."""
    folder = Path(__file__).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a city, in \u00b0C & "quotes" <b>',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Time", "parameters": {}}},
]
TOOL_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "K\u00f6ln", "days": 2}},
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS = [
    [user("Hi!")],
    [user("  padded \n"), assistant(" sure \n"), user("\u4f60\u597d \U0001f600")],
    [{"role": "system", "content": "Be brief."}, user("2+2?"), assistant("4"), user("3+3?")],
    [user("{{ 7 * 7 }} {% raw %} {# no #}"), assistant("plain")],
    [user("think"), assistant("<think>\nhm\n</think>\n\nYes."), user("more")],
    [user("q"), assistant("a", reasoning_content="because"), user("q2")],
    [
        user("Weather?"),
        assistant("", tool_calls=[TOOL_CALL]),
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abcdefghi"},
        assistant("21 degrees"),
        user("Thanks"),
    ],
    [
        {"role": "system", "content": "Use tools."},
        user("Weather?"),
        assistant("", tool_calls=[TOOL_CALL, {**TOOL_CALL, "id": "123456789"}]),
        {"role": "tool", "content": "one", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "two", "tool_call_id": "123456789"},
    ],
    [user([{"type": "text", "text": "part one"}, {"type": "text", "text": " part two "}])],
]


@pytest.fixture(scope="session")
def conversations():
    return CONVERSATIONS


@pytest.fixture(scope="session")
def tools():
    return TOOLS


@pytest.fixture(scope="session")
def chatml_library():
    """``chatml_library()``: a byte-level BPE of the ``tokenizers`` library with ChatML specials."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    def make() -> Tokenizer:
        library = Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(CORPUS * 2, trainer)
        specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"]
        library.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
        library.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("[X]")])
        return library

    return make


@pytest.fixture(scope="session")
def chatml_folder(chatml_library, chat_templates, tmp_path_factory) -> Path:
    """A Hugging Face folder with a small tokenizer and the ChatML template."""
    folder = tmp_path_factory.mktemp("chatml")
    chatml_library().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
        "unk_token": None,
        "chat_template": chat_templates["chatml"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def chatml(chatml_folder) -> Tokenizer:
    return load_folder_tokenizer(chatml_folder)


def _metadata(alias: str, file_name: str):
    """The metadata of a real model's GGUF file; skips where it cannot be fetched."""
    from octavo import hub
    from octavo.models.gguf import GGUFFile

    given = os.environ.get("OCTAVO_TEST_MODELS")
    if given and (Path(given) / file_name).exists():
        path = Path(given) / file_name
    else:
        try:
            path = hub.pull(alias, accept_terms=True)
        except DownloadError as error:
            pytest.skip(f"cannot fetch {alias}: {error}")
    with GGUFFile(path) as file:
        return dict(file.metadata), path


@pytest.fixture(scope="session")
def smollm2_gguf():
    """(metadata, path) of SmolLM2 135M."""
    return _metadata("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3_gguf():
    """(metadata, path) of Gemma 3 270M."""
    return _metadata("gemma3-270m", "gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf) -> Tokenizer:
    return load_gguf_tokenizer(*smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3(gemma3_gguf) -> Tokenizer:
    return load_gguf_tokenizer(*gemma3_gguf)
