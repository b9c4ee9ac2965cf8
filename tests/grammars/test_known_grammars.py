"""What is known of constraints takes no more memory than it may."""

from __future__ import annotations

from types import SimpleNamespace

from byte_tokens import EOS, VOCAB, byte_tokenizer

from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import GrammarCompiler
from octavo.grammars.known_grammars import KnownGrammars
from octavo.grammars.sources import GrammarSource
from octavo.grammars.tried_grammar import TriedGrammar


def asked(number):
    return StructuredOutputs(regex=f"a{{{number}}}")


def sized(num_bytes):
    return SimpleNamespace(num_bytes=num_bytes)


def kept(known, count):
    return [number for number in range(count) if known.get(asked(number)) is not None]


def test_the_least_recently_used_goes_first():
    known = KnownGrammars(max_bytes=10_000)
    for number in range(3):
        known.put(asked(number), sized(3000))
    known.get(asked(0))
    known.put(asked(3), sized(3000))
    assert kept(known, 4) == [0, 2, 3]
    assert known.num_bytes < 10_000


def test_what_has_grown_counts_as_it_is():
    known = KnownGrammars(max_bytes=10_000)
    growing = sized(100)
    known.put(asked(0), sized(3000))
    known.put(asked(1), growing)
    growing.num_bytes = 8000
    known.put(asked(2), sized(100))
    assert kept(known, 3) == [1, 2]


def test_one_that_is_too_large_is_kept_alone():
    known = KnownGrammars(max_bytes=10_000)
    known.put(asked(0), sized(100))
    known.put(asked(1), sized(20_000))
    assert kept(known, 2) == [1]
    known.put(asked(2), sized(100))
    assert kept(known, 3) == [2]


def test_long_constraints_count_beside_what_they_become():
    known = KnownGrammars(max_bytes=10_000)
    known.put(StructuredOutputs(regex="a" * 4000), sized(10))
    known.put(StructuredOutputs(regex="b" * 4000), sized(10))
    assert len(known) == 1


def test_compiled_grammars_are_forgotten_within_the_bound():
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS])
    compiler._known = KnownGrammars(max_bytes=2 << 20)
    for number in range(1, 40):
        compiler.mask(asked(number)).bitmask()
    assert compiler._known.num_bytes <= 2 << 20
    assert 0 < len(compiler._known) < 39
    assert compiler.is_compiled(asked(39)) and not compiler.is_compiled(asked(1))


def test_masks_make_a_grammar_larger_up_to_the_states_that_its_lexer_may_have():
    grammar = TriedGrammar(GrammarSource("x"), 0.0, 1000, 10.0)
    assert grammar.bytes_after(100) == 2000
    assert grammar.bytes_after(10**9) == 1000 + (40 << 20)
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB, [EOS])
    mask = compiler.mask(asked(5))
    before = compiler._known.num_bytes
    for _ in range(5):
        mask.bitmask()
        mask.advance([ord("a")])
    assert compiler._known.num_bytes > before


def test_what_was_tried_goes_through_json():
    tried = TriedGrammar(GrammarSource("x", ("a",), has_rules=True), 0.5, 10, 1.5)
    assert TriedGrammar.of(tried.to_dict()) == tried
