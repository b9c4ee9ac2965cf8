"""A vocabulary is read with pauses, its trie is made once, and its slices change no mask."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from byte_tokens import EOS, VOCAB, byte_tokenizer
from grammar_walks import allowed

from octavo.core.stats import ConstraintStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars import vocabulary as module
from octavo.grammars.compiler import compile_source
from octavo.grammars.grammar_mask import GrammarMask
from octavo.grammars.sources import source_of
from octavo.grammars.vocabulary import GrammarVocabulary

# Of all lengths around those of slices, some with what ends a string.
WORDS = tuple(
    (letter * length + ending).encode()
    for letter in "aé"
    for length in range(1, 34)
    for ending in ("", '"', "\\n", '",')
    if length + len(ending) > 1
)


def test_others_have_their_turn_while_tokens_are_read(monkeypatch):
    read, read_at_pauses = [], []
    tokenizer = byte_tokenizer(WORDS)
    plainly = type(tokenizer).token_bytes
    monkeypatch.setattr(
        type(tokenizer), "token_bytes", lambda self, i: read.append(i) or plainly(self, i)
    )
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 100)
    monkeypatch.setattr(module.time, "sleep", lambda _: read_at_pauses.append(len(read)))
    size = VOCAB + len(WORDS)
    made = GrammarVocabulary.of(tokenizer, size + 5, [EOS])
    assert read_at_pauses == [*range(100, size, 100), size]
    assert made.texts[258:] == [*WORDS, *[b""] * 5]


def test_the_trie_is_made_once_when_it_is_asked_for(monkeypatch):
    made = []
    plainly = GrammarVocabulary._trie
    monkeypatch.setattr(
        GrammarVocabulary, "_trie", lambda self: made.append(threading.get_ident()) or plainly(self)
    )
    vocabulary = GrammarVocabulary.of(byte_tokenizer(), VOCAB, [EOS])
    assert not made
    with ThreadPoolExecutor(4) as threads:
        tries = list(threads.map(lambda _: vocabulary.tokens, range(8)))
    assert len(made) == 1 and len(set(map(id, tries))) == 1


def test_masks_are_those_of_a_trie_without_slices():
    sliced, whole = (
        GrammarVocabulary.of(byte_tokenizer(WORDS), VOCAB + len(WORDS), [EOS]) for _ in range(2)
    )
    whole._tokens = whole.tokens.with_slices([])
    rng = random.Random(1)
    for bound in ({}, {"maxLength": 7}, {"minLength": 3, "maxLength": 12}, {"maxLength": 40}):
        asked = StructuredOutputs(json={"type": "array", "items": {"type": "string", **bound}})
        masks = []
        for vocabulary in (sliced, whole):
            source = source_of(asked, vocabulary.special_ids, vocabulary.stop_token_ids)
            start = compile_source(source, asked, vocabulary)
            masks.append(GrammarMask(start, vocabulary.vocab_size, ConstraintStats()))
        for _ in range(40):
            assert masks[0].bitmask() == masks[1].bitmask()
            token = rng.choice(sorted(allowed(masks[0])))
            if token == EOS:
                break
            for mask in masks:
                mask.advance([token])
