"""Constraints that would end the engine, or hold it up, end a child of another process."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest
from byte_tokens import EOS, VOCAB, byte_tokenizer

from octavo.base.errors import ConstraintError, EngineError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import GrammarCompiler
from octavo.grammars.trial import TrialProcess
from octavo.grammars.vocabulary import GrammarVocabulary

VOCABULARY = GrammarVocabulary.of(byte_tokenizer(), VOCAB, [EOS])


@pytest.fixture(scope="module")
def trial():
    process = TrialProcess()
    yield process
    process.close()


def chain(length):
    """A grammar that overflows llguidance's stack."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "x"'


def doubled(length):
    """A schema whose text is as long as two to the power of ``length``."""
    definitions = {
        f"a{i}": {
            "type": "array",
            "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 2,
            "minItems": 2,
        }
        for i in range(length)
    }
    return {"$defs": definitions | {f"a{length}": {"type": "null"}}, "$ref": "#/$defs/a0"}


HOSTILE = {
    "deep schema": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "deep list": {"json": "[" * 100_000},
    "overflow": {"grammar": chain(9000)},
    "deep groups": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "deep groups of GBNF": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "multiples": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "intersections": {
        "json": {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, 15)]}
    },
    "terminals": {
        "grammar": "start: R0\n"
        + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40))
        + '\nR40: "x"'
    },
    "circular": {"json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}},
                          "$ref": "#/$defs/a"}},
    "groups of a regex": {"regex": "(" * 5000 + "a" + ")" * 5000},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused_and_nothing_else_happens(trial, name):
    with pytest.raises(ConstraintError) as error:
        trial.try_out(StructuredOutputs(**HOSTILE[name]), VOCABULARY)
    assert error.value.field.startswith("structured_outputs.")
    assert error.value.reason in ("too_complex", "unsupported", "unsatisfiable", "invalid")
    assert trial.try_out(StructuredOutputs(choice=["a"]), VOCABULARY).text


@pytest.mark.parametrize(
    "asked",
    [
        {"json": doubled(30)},
        {"json": {"type": "string", "maxLength": 1_000_000}},
        {"json": {"type": "array", "maxItems": 1_000_000, "items": {"type": "integer"}}},
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(a|aa|aaa|.)*(b|bb|.)*c"},
        {"grammar": 'start: a\na: a a | "x"'},
        {"grammar": 'start: s\ns: s s s | s s | "x" | ""'},
        {"choice": [f"choice {i * 7919 % 4096}" for i in range(4096)]},
    ],
)
def test_what_looks_hostile_and_is_not_is_compiled(trial, asked):
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS])
    compiler.trial = trial
    followed = compiler.mask(StructuredOutputs(**asked))
    assert any(followed.bitmask())


def test_what_is_tried_is_what_would_be_compiled_without(trial):
    """The same grammar, and the same errors."""
    tried = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS])
    tried.trial = trial
    untried = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS])
    for asked in (
        {"json": {"type": "object"}, "begins_after": "#"},
        {"json": {"not": {"type": "null"}}},
        {"regex": "(a"},
        {"structural_tag": {}},
    ):
        results = []
        for compiler in (tried, untried):
            try:
                results.append(list(compiler.mask(StructuredOutputs(**asked)).bitmask()))
            except ConstraintError as error:
                results.append((str(error), error.field, error.reason))
        assert results[0] == results[1]


def test_results_and_refusals_are_kept(trial):
    class Counted:
        count = 0

        def try_out(self, asked, vocabulary):
            self.count += 1
            return trial.try_out(asked, vocabulary)

    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS])
    compiler.trial = Counted()
    for _ in range(3):
        compiler.mask(StructuredOutputs(regex="a"))
        with pytest.raises(ConstraintError, match="unclosed group"):
            compiler.mask(StructuredOutputs(regex="(a"))
    assert compiler.trial.count == 2


def test_questions_are_answered_side_by_side(trial):
    slow = StructuredOutputs(json={"type": "integer", "multipleOf": 1_000_003})
    ended = []

    def ask(asked, name):
        with contextlib.suppress(ConstraintError):
            trial.try_out(asked, VOCABULARY)
        ended.append(name)

    first = threading.Thread(target=ask, args=(slow, "slow"))
    first.start()
    ask(StructuredOutputs(regex="ab"), "quick")
    first.join()
    assert ended == ["quick", "slow"]


def test_a_process_that_ends_is_replaced():
    process = TrialProcess()
    try:
        assert process.try_out(StructuredOutputs(regex="a"), VOCABULARY).text
        process._process.kill()
        process._process.wait()
        assert process.try_out(StructuredOutputs(regex="a"), VOCABULARY).text
    finally:
        process.close()
    assert process._process is None


def test_a_process_that_ends_at_work_fails_who_waits():
    process = TrialProcess()
    errors = []

    def ask():
        try:
            process.try_out(
                StructuredOutputs(json={"type": "integer", "multipleOf": 1_000_003}), VOCABULARY
            )
        except EngineError as error:
            errors.append(str(error))

    process.try_out(StructuredOutputs(regex="a"), VOCABULARY)
    thread = threading.Thread(target=ask)
    thread.start()
    while not process._asked:
        pass
    process._process.kill()
    thread.join()
    assert errors == ["the process that tries constraints has ended"]
    process.close()


def test_special_tokens_and_ends_are_those_of_the_vocabulary(trial):
    asked = StructuredOutputs(regex="a", begins_after="<stop>")
    assert "257" in json.dumps(trial.try_out(asked, VOCABULARY).text)
