"""Content that is constrained: it begins behind thoughts and headers, whatever the model wants."""

from __future__ import annotations

import json
import random
import re

import pytest
from byte_tokens import EOS, VOCAB, byte_tokenizer
from format_cases import CASES

from octavo.core.sampling_params import SamplingParams
from octavo.core.thoughts import ThoughtTokens
from octavo.grammars.compiler import GrammarCompiler
from octavo.serving.answer_reader import AnswerReader, AskedTools, read_delta
from octavo.serving.outputs import Delta

NAMES = [name for name, case in CASES.items() if case.format().thoughts is not None]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
WHOLE = re.compile(r"x<t?hink>\d|<tool_call>[a-c]{0,9}")
ASKED = {
    "json": {"json": SCHEMA},
    "regex": {"regex": WHOLE.pattern},
    "choice": {"choice": ["yes", "no<think>", "[TOOL_CALLS]"]},
    "grammar": {"grammar": 'root ::= "(" root ")" | "x"'},
}


def is_valid(kind: str, content: str) -> bool:
    if kind == "json":
        value = json.loads(content)
        return isinstance(value["a"], str) and isinstance(value["b"], bool) and len(value) == 2
    if kind == "grammar":
        depth = content.count("(")
        return content == "(" * depth + "x" + ")" * depth
    return (
        content in ASKED["choice"]["choice"] if kind == "choice" else bool(WHOLE.fullmatch(content))
    )


class Model:
    """Writes answers at random, and would like to write tags where they do not belong."""

    def __init__(self, name: str, kind: str, *, inside: bool, **facts):
        case = CASES[name]
        self.format = case.format()
        self.tokenizer = byte_tokenizer(control=case.special_texts)
        names = self.tokenizer.specials.matcher.ids
        self.texts = {token: text.encode() for text, token in names.items()}
        thoughts = ThoughtTokens.of(
            self.format.thought_texts(begins_inside=inside), lambda token: b""
        )
        reader = AnswerReader(self.format, AskedTools(), inside, thoughts, **facts)
        self.reader, params = reader.prepare(SamplingParams(structured_outputs=ASKED[kind]))
        size = VOCAB + len(case.special_texts)
        compiler = GrammarCompiler(self.tokenizer, size, [EOS])
        self.start = compiler.mask(params.structured_outputs)
        tags = [*self.format.openers, *self.format.closers, *self.format.thoughts]
        self.wanted = [self.ids_of(tag) for tag in (*tags, self.format.before_content) if tag]
        self.wanted += [list(tag.encode()) for tag in tags]

    def ids_of(self, text: str) -> list[int]:
        parts = self.tokenizer.specials.split(text)
        return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]

    def write(self, rng: random.Random, limit: int = 2000) -> tuple[str, bool]:
        """Return an answer, and whether it has ended."""
        mask, text, wanted = self.start.fork(), b"", []
        end = self.ids_of(self.format.thoughts.end)
        for step in range(limit):
            bits = mask.bitmask()
            allowed = [i for i in range(32 * len(bits)) if bits[i >> 5] >> (i & 31) & 1]
            if not wanted and rng.random() < 0.2:
                wanted = rng.choice(self.wanted) if step < 100 else end
            token = wanted[0] if wanted and wanted[0] in allowed else rng.choice(allowed)
            wanted = wanted[1:] if wanted[:1] == [token] else []
            mask.advance([token])
            if token == EOS:
                return (text + b"<eos>").decode(errors="replace"), True
            text += self.texts.get(token) or bytes([token])
        return text.decode(errors="replace"), False

    def content(self, text: str, size: int) -> tuple[str | None, str | None]:
        parser = self.reader.parser()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        deltas = [Delta(0, piece) for piece in pieces] + [Delta(0, finish_reason="stop")]
        parts = [read_delta(parser, delta) for delta in deltas]
        thought = "".join(part.reasoning for part in parts)
        assert not any(part.tool_calls for part in parts)
        return thought or None, "".join(part.content for part in parts) or None


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_drawn_the_content_is_what_was_asked_for(name, kind, inside):
    model = Model(name, kind, inside=inside)
    num_ended = 0
    for seed in range(5):
        text, has_ended = model.write(random.Random(seed))
        thought, content = model.content(text, 1 << 20)
        assert (thought, content) == model.content(text, 3), text
        if has_ended:
            num_ended += 1
            assert content is not None and is_valid(kind, content), text
    assert num_ended


@pytest.mark.parametrize("kind", ASKED)
def test_harmony_has_its_header_before_the_content_and_nothing_else(kind):
    body = {
        "json": '{"a":"<|end|>","b":true}',
        "regex": "x<hink>1",
        "choice": "yes",
        "grammar": "(x)",
    }
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for before in ("", thought, 2 * thought):
        model = Model("harmony", kind, inside=False)
        header = model.ids_of(before + "<|channel|>final<|message|>")
        mask = model.start.fork()
        mask.advance([*header, *body[kind].encode()])
        assert mask.is_accepting
        bare = model.start.fork()
        bare.advance([*model.ids_of(before), *body[kind].encode()])
        assert not bare.is_accepting
        note = "<|channel|>commentary<|message|>"
        bits = model.start.bitmask()
        assert not bits[ord("{") >> 5] >> (ord("{") & 31) & 1
        noted = model.start.fork()
        noted.advance(model.ids_of(before + note))
        assert not noted.is_accepting


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_what_is_continued_has_no_further_header(name):
    model = Model(name, "choice", inside=False, continues_content=True)
    mask = model.start.fork()
    mask.advance(list(b"yes"))
    assert mask.is_accepting and model.content("yes", 1) == (None, "yes")


@pytest.mark.parametrize("name", NAMES)
def test_a_header_that_is_cut_off_is_no_content(name):
    model = Model(name, "regex", inside=True)
    whole = "Hm." + model.format.thoughts.end + model.format.before_content
    for length in range(len(whole)):
        assert model.content(whole[:length], 1)[1] is None
