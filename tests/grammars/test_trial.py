"""Constraints that would end the engine, or hold it up, end a child of another process."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from byte_tokens import EOS, VOCAB, byte_tokenizer

from octavo.base.errors import ConstraintError, QueueFullError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars import sampled_masks
from octavo.grammars.compiler import GrammarCompiler
from octavo.grammars.small import is_small
from octavo.grammars.trial import TrialProcess
from octavo.grammars.trial_child import answer
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


def source(trial, **asked) -> str:
    return trial.ask(StructuredOutputs(**asked), VOCABULARY).result().source.text


def compiler_with(trial) -> GrammarCompiler:
    """A compiler that tries all."""
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS], trial=trial)
    compiler.tries_small = True
    return compiler


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
    error = trial.ask(StructuredOutputs(**HOSTILE[name]), VOCABULARY).exception()
    if not isinstance(error, QueueFullError):  # the machine is so busy that there is no telling
        assert isinstance(error, ConstraintError)
        assert error.field.startswith("structured_outputs.")
        assert error.reason in ("too_complex", "unsupported", "unsatisfiable", "invalid")
    assert source(trial, choice=["a"])


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
    followed = compiler_with(trial).mask(StructuredOutputs(**asked))
    assert any(followed.bitmask())


def test_what_is_tried_is_what_would_be_compiled_without(trial):
    """The same grammar, and the same errors."""
    tried = compiler_with(trial)
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


class Counted:
    """Another trial, whose questions are counted."""

    def __init__(self, trial):
        self.count, self._trial = 0, trial

    def ask(self, asked, vocabulary, tenant=""):
        self.count += 1
        return self._trial.ask(asked, vocabulary, tenant)


def test_results_and_refusals_are_kept(trial):
    counted = Counted(trial)
    compiler = compiler_with(counted)
    for _ in range(3):
        compiler.mask(StructuredOutputs(regex="a"))
        with pytest.raises(ConstraintError, match="unclosed group"):
            compiler.mask(StructuredOutputs(regex="(a"))
    assert counted.count == 2


class Held:
    """A trial whose answers the test gives."""

    def __init__(self):
        self.answers = []

    def ask(self, asked, vocabulary, tenant=""):
        self.answers.append(Future())
        return self.answers[-1]


def test_equal_constraints_are_tried_together(trial):
    held = Held()
    compiler = compiler_with(held)
    asked = StructuredOutputs(regex="a")
    first, second = compiler.try_out(asked), compiler.try_out(asked)
    assert first is second and len(held.answers) == 1
    assert not compiler.is_compiled(asked)
    held.answers[0].set_result(trial.ask(asked, VOCABULARY).result())
    assert compiler.try_out(asked) is None  # it is known, and not compiled
    assert not compiler.is_compiled(asked)
    compiler.mask(asked)
    assert compiler.is_compiled(asked)


def test_what_was_not_tried_in_time_is_no_refusal():
    held = Held()
    compiler = compiler_with(held)
    asked = StructuredOutputs(regex="a")
    for _ in range(2):
        compiler.try_out(asked)
        held.answers[-1].set_exception(QueueFullError("busy", 1.0))
        assert not compiler.is_compiled(asked)
    assert len(held.answers) == 2


def test_who_waits_for_a_mask_tries_again(trial):
    class Busy(Counted):
        def ask(self, asked, vocabulary, tenant=""):
            answer = super().ask(asked, vocabulary, tenant)
            if self.count < 3:
                answer.exception()
                answer = Future()
                answer.set_exception(QueueFullError("busy"))
            return answer

    busy = Busy(trial)
    assert any(compiler_with(busy).mask(StructuredOutputs(regex="a")).bitmask())
    assert busy.count >= 3


def test_small_constraints_are_tried_only_where_that_is_asked_for(trial):
    counted = Counted(trial)
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS], trial=counted)
    compiler.mask(StructuredOutputs(json={"type": "object"}))
    assert counted.count == 0
    with pytest.raises(ConstraintError, match="too complex"):
        compiler.mask(StructuredOutputs(**HOSTILE["overflow"]))
    assert counted.count  # once, unless the machine is busy


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_not_small(name):
    """Or it is refused where it is read."""
    asked = StructuredOutputs(**HOSTILE[name])
    if not is_small(asked):
        return
    with pytest.raises(ConstraintError):
        GrammarCompiler(byte_tokenizer(), VOCAB, [EOS]).mask(asked)


def test_grammars_whose_masks_take_too_long_are_refused(monkeypatch):
    asked = {"json": {"type": "object"}}
    assert "grammar" in answer(asked, VOCABULARY)
    monkeypatch.setattr(sampled_masks, "MAX_MASK_SECONDS", 0.0)
    found = answer(asked, VOCABULARY)
    assert found["reason"] == "too_complex" and found["field"] == "structured_outputs.json"


def test_what_a_grammar_takes_is_measured(trial):
    small, large = (
        trial.ask(StructuredOutputs(choice=[f"choice {i * 7919}" for i in range(n)]), VOCABULARY)
        for n in (2, 4096)
    )
    assert large.result().num_bytes > small.result().num_bytes + (1 << 20)
    assert large.result().bytes_after(1000) >= large.result().num_bytes
    assert large.result().seconds > 0


SLOW = StructuredOutputs(json={"type": "integer", "multipleOf": 1_000_003})


def test_what_takes_long_does_not_hold_up_others(trial):
    slow = [
        trial.ask(StructuredOutputs(json={"type": "integer", "multipleOf": number}), VOCABULARY)
        for number in range(1_000_003, 1_000_023, 2)
    ]
    quick = trial.ask(StructuredOutputs(regex="ab"), VOCABULARY, "another tenant")
    assert quick.result().source.text
    assert not all(each.done() for each in slow)
    for each in slow:
        assert isinstance(each.exception(), ConstraintError | QueueFullError)


def test_too_many_are_not_taken(trial):
    process = TrialProcess()
    process._running = SimpleNamespace(
        has_ended=False, expect=lambda *_: None, send=lambda _: None, kill=int, join=int
    )
    for _ in range(256):
        process.ask(SLOW, VOCABULARY, "a")
    with pytest.raises(QueueFullError, match="too many constraints") as error:
        process.ask(SLOW, VOCABULARY, "a")
    assert error.value.retry_after == 1.0
    process.ask(SLOW, VOCABULARY, "b")  # which has its share
    process.close()


def test_a_large_constraint_counts_several_times():
    process = TrialProcess()
    process._running = SimpleNamespace(
        has_ended=False, expect=lambda *_: None, send=lambda _: None, kill=int, join=int
    )
    asked = [StructuredOutputs(regex="a" * (1 << 18)) for _ in range(16)]
    answers = []
    with pytest.raises(QueueFullError):
        for each in asked:
            answers.append(process.ask(each, VOCABULARY))
    assert len(answers) == 15
    answers[0].set_exception(QueueFullError("busy"))  # makes room
    process.ask(asked[0], VOCABULARY)
    process.close()


@pytest.mark.parametrize("forks", [True, False])
def test_a_process_that_ends_is_replaced(forks):
    process = TrialProcess(forks=forks)
    try:
        assert source(process, regex="a")
        process._running.kill()
        process._running.join()
        assert source(process, regex="a")
        running = process._running
    finally:
        process.close()
    assert running.has_ended


def test_a_process_that_ends_at_work_fails_who_waits():
    process = TrialProcess()
    source(process, regex="a")
    waiting = process.ask(SLOW, VOCABULARY)
    process._running.kill()
    assert str(waiting.exception()) == "the process that tries constraints has ended"
    process.close()
    assert process._budget.total.samples == 0


def test_without_fork_one_that_is_hostile_ends_the_process_and_no_other_constraint_is_blamed():
    process = TrialProcess(forks=False)
    try:
        overflow = process.ask(StructuredOutputs(**HOSTILE["overflow"]), VOCABULARY)
        behind = process.ask(StructuredOutputs(regex="ab"), VOCABULARY)
        assert isinstance(overflow.exception(), ConstraintError)
        assert behind.exception() is None or isinstance(behind.exception(), QueueFullError)
        assert source(process, regex="ab")
    finally:
        process.close()


def test_it_ends_with_who_has_it():
    process = TrialProcess()
    source(process, regex="a")
    running = process._running
    del process
    gc.collect()
    running.join()
    assert running.has_ended


def test_special_tokens_and_ends_are_those_of_the_vocabulary(trial):
    assert "257" in source(trial, regex="a", begins_after="<stop>")
