"""Answers that follow grammars are the same to the last bit, however their masks and drafts come.

Masks are made before a step or while it runs; drafts come from what a grammar forces, or from a
drafter; requests are alone or in company, preempted, or hit cached prefixes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache

import pytest
from faults import FaultyScheduler, every
from hash_model import FunctionProposer

from octavo.core.batch import Draft
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import ConstraintStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.core.token_mask import create_mask
from octavo.grammars.compiler import compile_source
from octavo.grammars.grammar_mask import GrammarMask
from octavo.grammars.sources import source_of
from octavo.grammars.vocabulary import GrammarVocabulary
from octavo.speculation.masked_drafts import MaskedDrafts
from octavo.speculation.step_times import StepTimeEstimator

EOS = 1
WORDS = (b'{"', b'":"', b'","', b"name", b"na", b"me", b'"}', b"ab", b"12", b"true")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-f]*$"},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_remarkable": {"type": "boolean"},
    },
    "required": ["name", "number", "is_remarkable"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": "(na|name){2,4} and so (on|forth)"},
    {"choice": ["true story", "true", "ab12 and so on"]},
)
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 1.2, "top_k": 20, "logit_bias": {5: 2.0}},
)


@pytest.fixture(scope="module")
def vocabulary(bench) -> GrammarVocabulary:
    size = bench.config.vocab_size
    texts = [b""] * size
    for token_id, text in enumerate([*WORDS, *(bytes([i]) for i in range(32, 127))], 2):
        texts[token_id] = text
    texts[EOS] = b"<eos>"
    return GrammarVocabulary(texts, {"<eos>": EOS}, [EOS])


class Slow(GrammarMask):
    """Always made in another thread, if there is a core. Those of the class itself may be."""

    seconds = 1.0


class Quick(GrammarMask):
    """Always made where a row is written, alone."""

    seconds = 0.0


def make_requests(
    vocabulary: GrammarVocabulary,
    count: int = 12,
    kinds: Sequence[type[GrammarMask]] = (Slow, GrammarMask),
) -> list[Request]:
    rng = random.Random(3)
    vocab_size = vocabulary.vocab_size
    shared = [rng.randrange(2, vocab_size) for _ in range(33)]
    requests = []
    for index in range(count):
        asked = CONSTRAINTS[index % len(CONSTRAINTS)] if index % 6 != 5 else None
        params = SamplingParams(
            max_tokens=60, structured_outputs=asked, **SETTINGS[index % len(SETTINGS)]
        )
        grammar = None
        if asked is not None:
            constraint = StructuredOutputs(**asked)
            source = source_of(constraint, vocabulary.special_ids, vocabulary.stop_token_ids)
            start = compile_source(source, constraint, vocabulary)
            grammar = kinds[index // 2 % len(kinds)](
                start,
                vocab_size,
                ConstraintStats(),
                encode=vocabulary.tokens.tokenize_bytes,
                executor=vocabulary.executor,
            )
        bad_words = [[30]] if index % 4 == 1 else []
        prompt = shared[: rng.choice([0, 17, 33])] + [2 + index]
        requests.append(
            Request(
                f"r{index}",
                prompt,
                params,
                0.0,
                seed=index,
                eos_token_ids=(EOS,),
                mask=create_mask(params, vocab_size, (EOS,), bad_words, grammar),
            )
        )
    return requests


def drafter(answers, requests, vocab_size: int, right: float = 0.9) -> FunctionProposer:
    """Drafts from known answers, of which some are wrong, and some a grammar forbids."""
    texts = {
        tuple(each.prompt_token_ids): [*each.prompt_token_ids, *answers[each.request_id][0]]
        for each in requests
    }
    rng = random.Random(7)

    def propose(prompt_token_ids, position):
        tokens = texts[tuple(prompt_token_ids)][position:][: rng.randint(0, 5)]
        drafted = [t if rng.random() < right else rng.randrange(vocab_size) for t in tokens]
        return Draft.chain(drafted) if drafted else None

    return FunctionProposer(propose)


@pytest.fixture(autouse=True)
def steps_of_known_times(monkeypatch):
    """How much is drafted does not depend on the machine."""
    monkeypatch.setattr(StepTimeEstimator, "observe", lambda *step: None)


@pytest.fixture(scope="module", params=["reference", "native", "fused"])
def kernels(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone_with(bench, run_all, vocabulary):
    """Answers with some kernels, by plain decoding, with masks that are made before each step."""

    @cache
    def answers(kernels):
        engine = bench.engine(prefix_caching=False, kernels=kernels)
        requests = make_requests(vocabulary, kinds=[Quick])
        return run_all(engine, requests, together=False)[0]

    return answers


VARIANTS = {
    "plain": {},
    "one at a time": {"max_num_seqs": 1},
    "tiny pool": {"num_blocks": 14},
    "small budget": {"max_num_batched_tokens": 9},
}


def text_of(vocabulary: GrammarVocabulary, token_ids) -> str:
    return b"".join(vocabulary.texts[i] for i in token_ids if i != EOS).decode()


def test_what_the_other_tests_compare_with_is_valid(alone_with, vocabulary):
    alone = alone_with("reference")
    objects = [json.loads(text_of(vocabulary, alone[f"r{i}"][0])) for i in (0, 1, 4, 8, 9)]
    assert all(list(each) == ["name", "number", "is_remarkable"] for each in objects)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("drafts", ["none", "forced", "drafter", "drafter and forced"])
def test_answers_are_the_same(bench, run_all, alone_with, vocabulary, kernels, name, drafts):
    alone = alone_with(kernels)
    if kernels == "reference" and name != "plain":
        pytest.skip("one of each is enough")
    requests = make_requests(vocabulary)
    proposer = drafter(alone, requests, vocabulary.vocab_size) if "drafter" in drafts else None
    if drafts != "drafter" and drafts != "none":
        proposer = MaskedDrafts(proposer)
    engine = bench.engine(kernels=kernels, proposer=proposer, **VARIANTS[name])
    answers, _ = run_all(engine, requests)
    assert answers == alone
    if drafts == "forced":
        assert engine.scheduler.drafts.num_accepted > 20


def test_preemptions_change_nothing(bench, run_all, alone_with, vocabulary):
    engine = bench.engine(kernels="native", proposer=MaskedDrafts())
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers, _ = run_all(engine, make_requests(vocabulary))
    assert answers == alone_with("native")
    assert engine.scheduler.num_preemptions > 5


def test_pipelines_and_several_ranks_change_nothing(bench, run_all, alone_with, vocabulary):
    for sizes in ({"tp": 2}, {"pp": 2}):
        engine = bench.engine(kernels="native", proposer=MaskedDrafts(), **sizes)
        answers, _ = run_all(engine, make_requests(vocabulary))
        assert answers == alone_with("native")
        engine.close()


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_mask_that_fails_while_a_step_runs_ends_its_own_request(
    bench, run_all, alone_with, vocabulary, has_drafts
):
    alone = alone_with("native")
    requests = make_requests(vocabulary)
    broken = requests[0]

    class Broken:
        """A mask with a fault after some tokens."""

        def __init__(self, mask):
            self._mask = mask

        def __getattr__(self, name):
            return getattr(self._mask, name)

        def bitmask(self):
            if self._mask.num_tokens >= 4:
                raise RuntimeError("a fault")
            return self._mask.bitmask()

    broken.mask = Broken(broken.mask)
    engine = bench.engine(kernels="native", proposer=MaskedDrafts() if has_drafts else None)
    answers, _ = run_all(engine, requests)
    assert broken.finish_reason is FinishReason.ERROR and "a fault" in broken.error
    assert answers.pop("r0")[0] == alone["r0"][0][:4]
    assert answers == {name: answer for name, answer in alone.items() if name != "r0"}
