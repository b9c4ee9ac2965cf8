"""Whatever a model writes under a schema is valid, by another implementation of JSON Schema."""

from __future__ import annotations

import json
import random

import pytest
from byte_tokens import EOS
from grammar_walks import COMPILER
from schema_maker import SchemaMaker

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import StructuredOutputs

jsonschema = pytest.importorskip("jsonschema")

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
# After so many tokens an answer takes the shortest way to its end.
PATIENCE, LIMIT = 60, 1500


def answer(followed, texts, stop, rng):
    """A random answer, or None if it is too long."""
    text = b""
    for count in range(LIMIT):
        bits = followed.bitmask()
        word = int.from_bytes(bits, "little")
        assert word, f"no token may follow {text!r}: {followed.problem}"
        if word >> stop & 1 and (count > PATIENCE or rng.random() < 0.3):
            return text
        allowed = (
            [i for i in range(len(texts)) if word >> i & 1]
            if word.bit_length() < 2000
            else _few(word, len(texts), rng)
        )
        if count > PATIENCE:
            ends = [i for i in allowed if texts[i][:1] in (b'"', b"}", b"]", b"0", b"n")]
            allowed = ends or allowed
        token = rng.choice([i for i in allowed if i != stop] or [stop])
        if token == stop:
            return text
        followed.advance([token])
        text += texts[token]
    return None


def _few(word, vocab_size, rng):
    """Some of the allowed tokens of a large vocabulary: where many are, any will do."""
    found = [i for i in (rng.randrange(vocab_size) for _ in range(200)) if word >> i & 1]
    return found or [i for i in range(vocab_size) if word >> i & 1]


def check(compiler, seeds, texts, stop):
    """Check the answers to many schemas; returns how many were valid, refused, and too long."""
    counts = {"valid": 0, "refused": 0, "long": 0}
    for seed in seeds:
        schema = SchemaMaker(seed).schema()
        validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
        try:
            followed = compiler.mask(StructuredOutputs(json=schema))
        except ConstraintError as error:
            assert error.reason in ("unsupported", "unsatisfiable"), (seed, str(error), schema)
            counts["refused"] += 1
            continue
        text = answer(followed, texts, stop, random.Random(seed))
        if text is None:
            counts["long"] += 1
            continue
        value = json.loads(text)
        errors = [error.message for error in validator.iter_errors(value)]
        assert not errors, (seed, schema, text, errors)
        counts["valid"] += 1
    return counts


def test_answers_of_a_random_model_are_valid():
    counts = check(COMPILER, range(150), COMPILER.vocabulary().texts, EOS)
    assert counts["valid"] > 120, counts


@pytest.mark.long
def test_answers_of_a_random_model_are_valid_to_two_thousand_schemas():
    counts = check(COMPILER, range(2000), COMPILER.vocabulary().texts, EOS)
    assert counts["valid"] > 1700, counts
    assert counts["long"] < 40, counts
