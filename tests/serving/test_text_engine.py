from __future__ import annotations

import pytest
from hash_model import FunctionProposer

from octavo.base.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from octavo.core.batch import Draft, StepOutput, TokenLogprobs
from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.executor import FinishedStep
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.serving.output_builder import OutputBuilder
from octavo.serving.text_engine import TextEngine
from octavo.text.decoders import ByteDecoder
from octavo.text.special_tokens import SpecialTokens
from octavo.text.tokenizer import Tokenizer

EOS = 256
STOP = 257


class ByteEncoder:
    def encode(self, pieces):
        ids = []
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else piece.encode()
        return ids


def byte_tokenizer() -> Tokenizer:
    """A token is a byte; 256 ends the text."""
    specials = {"<eos>": EOS, "<stop>": STOP}
    return Tokenizer(
        encoder=ByteEncoder(),
        decoder=ByteDecoder(
            lambda i: chr(i) if i < 256 else "<eos>", lambda t: t.encode("latin-1")
        ),
        specials=SpecialTokens(specials),
        vocab_size=258,
        bos_token_id=None,
        eos_token_id=EOS,
        stop_token_ids=frozenset({EOS}),
    )


class Panic(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


class Parrot:
    """Answers every prompt with a fixed text, a later sample of a prompt more surely."""

    depth = 1
    feeds_tokens = False

    def __init__(self, answer: bytes):
        self.answer = [*answer, EOS]

    def kv_capacity(self) -> int:
        return 64

    def submit(self, batch):
        tokens, logprobs, prompt_logprobs = {}, {}, {}
        for item in batch.items:
            request = item.request
            if request.params.prompt_logprobs is not None:
                first = max(item.start, request.num_prompt_logprobs)
                end = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
                prompt_logprobs[request.request_id] = [
                    TokenLogprobs(request.prompt_token_ids[p + 1], -p, 1, ((65, -0.5),))
                    for p in range(first, end)
                ]
            if item.samples:
                begin = request.num_output_tokens
                said = [
                    self.answer[min(position, len(self.answer) - 1)]
                    for position in range(begin, begin + item.num_sampled)
                ]
                if item.draft is not None:
                    said = said[: len(item.draft.path(said)) + 1]
                tokens[request.request_id] = said
                sure = -1.0 / (1 + request.sample_index)
                logprobs[request.request_id] = [
                    TokenLogprobs(token_id, sure, 2, ((66, -0.1),)) for token_id in said
                ]
        return FinishedStep(StepOutput(tokens, logprobs, prompt_logprobs))

    def close(self) -> None:
        pass


def make_engine(
    answer: str | bytes = "hello world", *, num_drafted: int = 0, **config
) -> TextEngine:
    """``num_drafted`` tokens are drafted, all of them right."""
    answer = answer.encode() if isinstance(answer, str) else answer
    config = {"max_model_len": 64, **config}

    def propose(prompt_token_ids, position):
        begin = position - len(prompt_token_ids)
        drafted = [*answer, EOS, EOS, EOS, EOS, EOS][begin : begin + num_drafted]
        return Draft.chain(drafted) if drafted else None

    scheduler = Scheduler(
        SchedulerConfig(**config),
        BlockManager(64, 4, RadixPrefixCache(4)),
        proposer=FunctionProposer(propose) if num_drafted else None,
    )
    return TextEngine(Engine(scheduler, Parrot(answer)), byte_tokenizer(), 258, [EOS])


def answer_to(engine: TextEngine, prompt="say", params=None, **fields):
    """The output, and the pieces of text as they came."""
    params = params or SamplingParams(**{"max_tokens": 32, **fields})
    group = engine.add("r", *engine.tokenize(prompt), params)
    builder = OutputBuilder(group, engine.tokenizer)
    pieces = []
    while engine.has_unfinished_requests:
        deltas, _ = engine.step()
        for delta in deltas:
            builder.take(delta)
        pieces += [delta.text for delta in deltas if delta.index == 0]
    assert not engine.groups and not engine._samples
    return builder.output(), pieces


def test_an_answer_ends_at_the_end_of_text():
    output, pieces = answer_to(make_engine())
    (completion,) = output.outputs
    assert completion.text == "hello world" == "".join(pieces)
    assert completion.token_ids == [*b"hello world", EOS]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert output.prompt == "say" and output.prompt_token_ids == [*b"say"]
    assert output.finished and output.error is None
    assert output.metrics.ttft <= output.metrics.e2e


def test_length_and_detokenize_off():
    output, _ = answer_to(make_engine(), max_tokens=4)
    assert output.outputs[0].text == "hell" and output.outputs[0].finish_reason == "length"
    output, _ = answer_to(make_engine(), max_tokens=4, detokenize=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_request(include):
    engine = make_engine()
    output, pieces = answer_to(engine, stop=["o w", "zzz"], include_stop_str_in_output=include)
    (completion,) = output.outputs
    assert completion.text == "".join(pieces) == ("hello w" if include else "hell")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "o w")
    assert bytes(completion.token_ids) == b"hello w"
    assert engine.engine.scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("num_drafted", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["o w"]},
        {"stop": ["o w"], "include_stop_str_in_output": True},
        {"stop": ["ld"], "max_tokens": 11},
        {"stop": ["l"], "min_tokens": 6, "logprobs": 1},
        {"stop_token_ids": [ord("w")]},
        {"stop_token_ids": [ord("w")], "stop": ["lo"]},
        {"stop_token_ids": [ord("w")], "include_stop_str_in_output": True},
        {"max_tokens": 4, "logprobs": 0},
        {"max_tokens": 1},
        {"min_tokens": 14, "max_tokens": 20},
        {"ignore_eos": True, "max_tokens": 14},
        {"n": 2, "best_of": 3, "stop": [" "]},
        {"detokenize": False, "max_tokens": 9},
    ],
    ids=str,
)
def test_several_tokens_of_a_step_are_one_after_the_other(fields, num_drafted):
    """Whatever ends a request ends it at the same token, with the same text and figures."""
    expected, _ = answer_to(make_engine(), **fields)
    engine = make_engine(num_drafted=num_drafted)
    output, pieces = answer_to(engine, **fields)
    assert output.outputs == expected.outputs
    assert len(pieces) < 3 + sum(map(len, (each.token_ids for each in expected.outputs)))
    assert engine.engine.scheduler.block_manager.num_used_blocks == 0
    drafts = output.metrics.drafts
    num_generated = max(len(each.token_ids) for each in output.outputs)
    assert drafts.num_drafts > 0 or num_generated <= 3
    assert expected.metrics.drafts.num_drafts == 0


def test_usage_counts_no_token_after_a_stop_string():
    engine = make_engine(num_drafted=16)
    group = engine.add("r", *engine.tokenize("say"), SamplingParams(max_tokens=32, stop=["o w"]))
    while engine.has_unfinished_requests:
        engine.step()
    (sample,) = group.samples
    assert sample.request.num_output_tokens == sample.request.stats.num_output_tokens == 7
    assert bytes(sample.request.output_token_ids) == b"hello w"


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop():
    output, _ = answer_to(make_engine(), stop=["lo"], max_tokens=5)
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].text == "hel"


def test_a_stop_token_is_not_shown_unless_asked():
    output, _ = answer_to(make_engine(), stop_token_ids=[ord("o")])
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("hell", ord("o"))
    output, _ = answer_to(make_engine(), stop_token_ids=[ord("o")], include_stop_str_in_output=True)
    assert output.outputs[0].text == "hello"


def test_half_a_character_is_never_shown():
    output, pieces = answer_to(make_engine("naïve 🙂!"))
    assert output.outputs[0].text == "naïve 🙂!" == "".join(pieces)
    assert all("\ufffd" not in piece for piece in pieces)
    output, pieces = answer_to(make_engine("ab🙂"), max_tokens=4)
    assert output.outputs[0].text == "ab" == "".join(pieces)
    assert output.outputs[0].finish_reason == "length"


def test_samples_of_a_prompt():
    output, _ = answer_to(make_engine(), n=3)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(completion.text == "hello world" for completion in output.outputs)
    assert output.outputs[0].cumulative_logprob is None


def test_best_of_returns_the_likeliest_and_hides_how_it_chose():
    engine = make_engine()
    params = SamplingParams(n=2, best_of=4, max_tokens=32)
    group = engine.add("r", *engine.tokenize("say"), params)
    builder = OutputBuilder(group, engine.tokenizer)
    while engine.has_unfinished_requests:
        for delta in engine.step()[0]:
            builder.take(delta)
    output = builder.output()
    assert len(output.outputs) == 2 and output.outputs[0].logprobs is None
    best = sorted(group.samples, key=lambda sample: sample.cumulative_logprob)[-1]
    assert best.index == 3 and output.outputs[0].token_ids == best.request.output_token_ids


def test_logprobs_have_vllms_shape():
    output, _ = answer_to(make_engine("hi"), logprobs=1, prompt_logprobs=1)
    first = output.outputs[0].logprobs[0]
    assert list(first) == [ord("h"), 66]
    assert (first[ord("h")].logprob, first[ord("h")].rank) == (-1.0, 2)
    assert (first[66].decoded_token, first[66].rank) == ("B", 1)
    assert output.outputs[0].cumulative_logprob == -3.0
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 3
    assert output.prompt_logprobs[2][ord("y")].logprob == -1


def test_prompts_in_every_form():
    engine = make_engine()
    assert engine.tokenize("ab") == ("ab", [97, 98])
    assert engine.tokenize([97, 98]) == (None, [97, 98])
    assert engine.tokenize({"prompt": "ab"}) == ("ab", [97, 98])
    assert engine.tokenize({"prompt_token_ids": [97]}) == (None, [97])
    assert engine.tokenize("<eos>")[1] == [*b"<eos>"]
    assert engine.tokenize("<eos>", parse_special=True)[1] == [EOS]


@pytest.mark.parametrize("ids", [[1, 258], [-1], ["a"], [True], [1.5], [2**40]])
def test_ids_outside_of_the_vocabulary_are_refused(ids):
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        make_engine().tokenize(ids)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {258: 1.0}},
        {"allowed_token_ids": [0, 999]},
        {"stop_token_ids": [258]},
    ],
)
def test_so_are_ids_in_parameters(params):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=next(iter(params))):
        engine.add("r", "a", [97], SamplingParams(**params))
    assert not engine.has_unfinished_requests and not engine.groups


@pytest.mark.parametrize(
    ("prompt", "error"), [([], InvalidRequestError), ([1] * 64, PromptTooLongError)]
)
def test_a_refused_prompt_leaves_nothing_behind(prompt, error):
    engine = make_engine()
    with pytest.raises(error):
        engine.add("r", None, prompt, SamplingParams(n=3, max_tokens=None))
    assert not engine.groups and not engine._samples and not engine.has_unfinished_requests


def test_log_probabilities_of_a_prompt_are_bounded_before_anything_is_computed():
    engine = make_engine()
    with pytest.raises(
        InvalidRequestError, match=r"prompt_logprobs: 20 at each of 12484 pos.*262,1"
    ):
        engine.add("r", None, [1] * 12_484, SamplingParams(prompt_logprobs=20))
    assert not engine.groups and not engine.has_unfinished_requests
    with pytest.raises(PromptTooLongError):  # as far as log-probabilities go, it might
        engine.add("r", None, [1] * 12_483, SamplingParams(prompt_logprobs=20))
    with pytest.raises(PromptTooLongError):
        engine.add("r", None, [1] * 131_072, SamplingParams(prompt_logprobs=0))


def test_a_queue_that_fills_up_between_samples_takes_none_of_them():
    engine = make_engine(max_queued_requests=2)
    with pytest.raises(QueueFullError):
        engine.add("r", None, [1, 2], SamplingParams(n=3))
    assert not engine._samples and not engine.has_unfinished_requests


def test_bad_words_are_banned_with_and_without_a_space():
    engine = make_engine()
    group = engine.add("r", None, [1], SamplingParams(bad_words=["no"]))
    for begun, banned in ((b"a n", True), (b"n", True), (b"no n", True), (b"na", False)):
        mask = group.samples[0].request.mask.fork()
        mask.advance(begun)
        bits = mask.bitmask()
        assert (bits is not None and not bits[ord("o") >> 5] >> (ord("o") & 31) & 1) == banned


def test_bad_words_that_come_as_tokens_are_not_tokenized(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine.tokenizer, "encode_words", lambda words: 1 / 0)
    params = SamplingParams(bad_words=["no"])
    mask = engine.prepare_mask(params, [[ord("h")]])
    group = engine.add("r", None, [1], params, prepared_mask=mask)
    assert group.samples[0].request.is_masked


def test_an_id_in_use_is_refused_however_many_samples_there_are():
    engine = make_engine()
    engine.add("r", None, [1], SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add("r", None, [1], SamplingParams())
    engine.abort("r")
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_sample_that_cannot_be_made_leaves_nothing_behind(monkeypatch, error):
    engine = make_engine()
    made = []

    def fail_at_second(params, prompt_token_ids):
        made.append(params)
        if len(made) == 2:
            raise error

    monkeypatch.setattr(engine, "_detokenizer", fail_at_second)
    with pytest.raises(error):
        engine.add("r", None, [1], SamplingParams(n=3))
    assert not engine.groups and not engine._samples and not engine.has_unfinished_requests


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_text_that_cannot_be_made_ends_its_request(error):
    engine = make_engine()
    group = engine.add("bad", None, [1], SamplingParams(max_tokens=9))
    engine.add("good", None, [2], SamplingParams(max_tokens=9))

    def fail(token_ids):
        raise error("as asked")

    group.samples[0].detokenizer.push = fail
    last = {}
    while engine.has_unfinished_requests:
        for delta in engine.step()[0]:
            last[delta.request_id] = delta
    assert last["bad"].finish_reason == "error"
    assert "as asked" in group.samples[0].request.error
    assert last["good"].finish_reason == "length"


def test_what_ends_the_program_gets_through():
    engine = make_engine()
    group = engine.add("r", None, [1], SamplingParams(max_tokens=9))

    def interrupt(token_ids):
        raise KeyboardInterrupt

    group.samples[0].detokenizer.push = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_seeds_are_drawn_from_the_engines_own():
    def seeds(engine_seed: int, params: SamplingParams) -> list[int]:
        engine = make_engine()
        engine = TextEngine(engine.engine, engine.tokenizer, 258, [EOS], engine_seed)
        return [engine.add(str(i), None, [1], params).samples[0].request.seed for i in range(3)]

    drawn = seeds(5, SamplingParams())
    assert len(set(drawn)) == 3
    assert drawn == seeds(5, SamplingParams()) != seeds(6, SamplingParams())
    assert seeds(5, SamplingParams(seed=9)) == [9, 9, 9]


def test_abort_ends_all_samples():
    engine = make_engine()
    engine.add("r", None, [1], SamplingParams(n=2))
    engine.step()
    last = engine.abort("r")
    assert [delta.index for delta in last] == [0, 1]
    assert {delta.finish_reason for delta in last} == {"abort"}
    assert engine.abort("r") == []
    assert not engine.has_unfinished_requests
