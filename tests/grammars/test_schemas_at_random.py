"""Whatever a model writes under a schema is valid, by another implementation of JSON Schema."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from byte_tokens import EOS
from grammar_walks import COMPILER

from octavo.base.errors import ConstraintError
from octavo.bench.structured.varied_schemas import varied_schema
from octavo.core.structured_outputs import StructuredOutputs

jsonschema = pytest.importorskip("jsonschema")

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
# After so many tokens an answer takes the shortest way to its end.
PATIENCE, LIMIT = 60, 1500
ENDS = (b'"', b"}", b"]", b"0", b"n")


def answer(followed, texts, stop, rng):
    """A random answer, or None if it is too long."""
    text = b""
    for count in range(LIMIT):
        bits = np.frombuffer(followed.bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert len(allowed), f"no token may follow {text!r}: {followed.problem}"
        if bits[stop >> 3] >> (stop & 7) & 1 and (count > PATIENCE or rng.random() < 0.3):
            return text
        allowed = allowed[allowed != stop]
        if count > PATIENCE:
            heads = [texts[i][:1] for i in allowed[:100]]
            ends = [i for i, head in zip(allowed, heads, strict=False) if head in ENDS]
            allowed = ends or allowed
        token = int(rng.choice(allowed)) if len(allowed) else stop
        if token == stop:
            return text
        followed.advance([token])
        text += texts[token]
    return None


def check(compiler, seeds, texts, stop):
    """Check the answers to many schemas; returns how many were valid, refused, and too long."""
    counts = {"valid": 0, "refused": 0, "long": 0}
    for seed in seeds:
        schema = varied_schema(seed)
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
