"""Every field of a request does what it promises, as the ``openai`` package sends it.

What a field does is said by the function of its name, which asks a live server for an answer with
the field and for one without. Each is called for whole answers and for streams, and where it is a
field of both, for chat and for completions. The last test finds fields that no test has looked at.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.server.api.openai.chat_body import ChatCompletionRequest
from octavo.server.api.openai.completion_body import CompletionRequest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is the capital of Japan?"}]
MAX_TOKENS = 9
EOS = 2  # <|im_end|>
PAIR = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "name": {"type": "string", "maxLength": 12}},
    "required": ["yes", "name"],
    "additionalProperties": False,
}
GBNF = 'root ::= "Rome" | "Oslo"'
HOT = {"temperature": 2.0, "seed": 1}

_numbers = itertools.count()


@dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # (token, logprob, top tokens with theirs) of each token
    logprobs: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Answer:
    """A whole answer, or what a stream has added up to."""

    id: str = ""
    choices: list[Choice] = field(default_factory=list)
    usage: Any = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Any = None
    num_chunks: int = 0
    num_usages: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def end(self) -> tuple[str | None, int | str | None]:
        return self.choices[0].finish_reason, self.choices[0].stop_reason


class Api:
    """One of the two routes, with whole answers or with streams.

    Without other fields, it asks for the most likely tokens after a fixed prompt.
    """

    def __init__(self, openai, client, tokenizer, *, is_chat: bool, streams: bool):
        self.openai, self.tokenizer = openai, tokenizer
        self.is_chat, self.streams = is_chat, streams
        self._create = (client.chat.completions if is_chat else client.completions).create
        # What the package has no parameter for goes into its extra_body, as its users do it.
        self._known = set(inspect.signature(self._create).parameters) - {"timeout"}
        self._answers: dict[str, Answer] = {}

    def send(self, **fields: Any) -> Answer:
        defaults: dict[str, Any] = {"model": "smollm2-135m", "max_tokens": MAX_TOKENS}
        defaults |= {"messages": MESSAGES} if self.is_chat else {"prompt": PROMPT}
        defaults |= {"temperature": 0.0, "return_token_ids": True}
        if self.streams:
            defaults |= {"stream": True, "stream_options": {"include_usage": True}}
        fields = defaults | fields
        known = {name: value for name, value in fields.items() if name in self._known}
        extra = {name: value for name, value in fields.items() if name not in self._known}
        answer = self._create(**known, extra_body=extra)
        return collect([answer] if not self.streams else answer, self.streams)

    def ask(self, **fields: Any) -> Answer:
        """The same, of which the answer is remembered."""
        key = repr(sorted(fields.items()))
        if key not in self._answers:
            self._answers[key] = self.send(**fields)
        return self._answers[key]

    @property
    def plain(self) -> Answer:
        return self.ask()

    def new_prompt(self, length: int = 40) -> dict[str, Any]:
        """Fields with a prompt that no request had before."""
        text = f"{next(_numbers)} bottles. " + "word " * length
        if self.is_chat:
            return {"messages": [{"role": "system", "content": text}, *MESSAGES]}
        return {"prompt": text}

    def prompt_text(self, **fields: Any) -> str:
        token_ids = self.ask(**fields).prompt_token_ids
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def refuses(self, name: str, **fields: Any) -> None:
        """Fails unless the answer is a 400 that names the field."""
        with pytest.raises(self.openai.BadRequestError) as caught:
            self.send(**fields)
        assert name in caught.value.message
        assert caught.value.param.split(".")[0] == name


def collect(chunks: Iterable[Any], streams: bool) -> Answer:
    """Also sees to it that a stream has the form that it must have."""
    answer = Answer()
    choices: dict[int, Choice] = {}
    is_over = False
    for chunk in chunks:
        assert not is_over, "a chunk after that of the usage"
        assert answer.id in ("", chunk.id)
        answer.id = chunk.id
        answer.num_chunks += 1
        answer.num_usages += chunk.usage is not None
        answer.usage = chunk.usage or answer.usage
        is_over = not chunk.choices
        for item in (chunk, *chunk.choices):
            for name in ("prompt_token_ids", "prompt_logprobs"):
                setattr(answer, name, getattr(item, name, None) or getattr(answer, name))
        for item in chunk.choices:
            is_first = item.index not in choices
            choice = choices.setdefault(item.index, Choice())
            assert choice.finish_reason is None, "a chunk after that of the finish_reason"
            extend(choice, item)
            if hasattr(item, "delta"):
                assert (item.delta.role == "assistant") == is_first
    assert sorted(choices) == list(range(len(choices)))
    answer.choices = [choices[index] for index in sorted(choices)]
    assert all(choice.finish_reason for choice in answer.choices)
    return answer


def extend(choice: Choice, item: Any) -> None:
    message = getattr(item, "delta", None) or getattr(item, "message", None)
    choice.text += (message.content or "") if message else item.text
    choice.token_ids += getattr(item, "token_ids", None) or []
    choice.finish_reason = item.finish_reason
    choice.stop_reason = getattr(item, "stop_reason", None)
    if item.logprobs is None:
        return
    if message:
        for entry in item.logprobs.content:
            top = {each.token: each.logprob for each in entry.top_logprobs}
            choice.logprobs.append((entry.token, entry.logprob, top))
    else:
        one = item.logprobs
        choice.logprobs += zip(one.tokens, one.token_logprobs, one.top_logprobs, strict=True)
        choice.text_offsets += one.text_offset


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai")


@pytest.fixture(scope="module", params=["whole", "stream"])
def apis(request, openai, server, tokenizer):
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield {
            is_chat: Api(
                openai, client, tokenizer, is_chat=is_chat, streams=request.param == "stream"
            )
            for is_chat in (True, False)
        }


@pytest.fixture
def completions(apis) -> Api:
    return apis[False]


@pytest.fixture
def chat(apis) -> Api:
    return apis[True]


@pytest.fixture(params=["chat", "completions"])
def either(request, apis) -> Api:
    return apis[request.param == "chat"]


Effect = Callable[[Api], None]
EITHER: dict[str, Effect] = {}  # by the name of the field
COMPLETIONS: dict[str, Effect] = {}
CHAT: dict[str, Effect] = {}


def into(table: dict[str, Effect]) -> Callable[[Effect], Effect]:
    def add(effect: Effect) -> Effect:
        table[effect.__name__] = effect
        return effect

    return add


# -- fields of both -----------------------------------------------------------------------------


@into(EITHER)
def model(api: Api) -> None:
    with pytest.raises(api.openai.NotFoundError) as caught:
        api.send(model="gpt-5")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


@into(EITHER)
def stream(api: Api) -> None:
    assert (api.plain.num_chunks > 2) == api.streams  # tokens that came together are one chunk


@into(EITHER)
def stream_options(api: Api) -> None:
    if not api.streams:
        api.refuses("stream_options", stream_options={"include_usage": True})
        return
    assert api.plain.num_usages == 1
    answer = api.ask(stream_options={"include_usage": False, "include_obfuscation": False})
    assert answer.num_usages == 0 and answer.token_ids == api.plain.token_ids
    answer = api.ask(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert answer.num_usages == answer.num_chunks
    assert answer.usage.total_tokens == api.plain.usage.total_tokens


@into(EITHER)
def n(api: Api) -> None:
    answer = api.ask(n=3, temperature=1.0, seed=1)
    assert len({choice.text for choice in answer.choices}) == 3
    num_tokens = sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.prompt_tokens == api.plain.usage.prompt_tokens


@into(EITHER)
def max_tokens(api: Api) -> None:
    answer = api.ask(max_tokens=5)
    assert answer.token_ids == api.plain.token_ids[:5] and answer.end == ("length", None)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == 5 + answer.usage.prompt_tokens


@into(EITHER)
def min_tokens(api: Api) -> None:
    stop = {"stop_token_ids": [api.plain.token_ids[2]]}
    assert len(api.ask(**stop).token_ids) <= 3
    assert len(api.ask(**stop, min_tokens=6).token_ids) >= 6


@into(EITHER)
def speculative(api: Api) -> None:
    for asked in ({"enabled": False}, {"enabled": True, "num_speculative_tokens": 2}):
        assert api.ask(speculative=asked).token_ids == api.plain.token_ids
    api.refuses("speculative", speculative={"num_speculative_tokens": 65})


@into(EITHER)
def window(api: Api) -> None:
    assert api.ask(window=512).token_ids == api.plain.token_ids
    assert api.ask(window=2, attention_sinks=0).token_ids != api.plain.token_ids
    api.refuses("window", window=10**6)


@into(EITHER)
def attention_sinks(api: Api) -> None:
    few = api.ask(window=2, attention_sinks=0).token_ids
    assert api.ask(window=2, attention_sinks=5).token_ids != few
    api.refuses("attention_sinks", attention_sinks=4)  # of no window


@into(EITHER)
def n_keep(api: Api) -> None:
    api.refuses("n_keep", n_keep=4)  # the server shifts no contexts


@into(EITHER)
def temperature(api: Api) -> None:
    assert api.ask(**HOT).token_ids != api.plain.token_ids


@into(EITHER)
def top_p(api: Api) -> None:
    assert api.ask(**HOT, top_p=1e-6).token_ids == api.plain.token_ids


@into(EITHER)
def top_k(api: Api) -> None:
    assert api.ask(**HOT, top_k=1).token_ids == api.plain.token_ids
    assert api.ask(**HOT, top_k=0).token_ids == api.ask(**HOT, top_k=-1).token_ids
    assert api.ask(**HOT, top_k=0).token_ids == api.ask(**HOT).token_ids


@into(EITHER)
def min_p(api: Api) -> None:
    assert api.ask(**HOT, min_p=1.0).token_ids == api.plain.token_ids


@into(EITHER)
def typical_p(api: Api) -> None:
    hot = {"temperature": 2.0, "typical_p": 1e-6}  # one token is left, whichever it is
    assert api.ask(**hot, seed=1).token_ids == api.ask(**hot, seed=2).token_ids


@into(EITHER)
def top_n_sigma(api: Api) -> None:
    assert api.ask(**HOT, top_n_sigma=0.001).token_ids == api.plain.token_ids
    assert api.ask(**HOT, top_n_sigma=-1).token_ids == api.ask(**HOT).token_ids


@into(EITHER)
def xtc_probability(api: Api) -> None:
    cut = {"xtc_probability": 1.0, "xtc_threshold": 0.01, "top_k": 2}
    assert api.ask(**HOT, **cut).token_ids != api.ask(**HOT, top_k=2).token_ids


@into(EITHER)
def xtc_threshold(api: Api) -> None:
    never = {"xtc_probability": 1.0, "xtc_threshold": 0.6}
    assert api.ask(**HOT, **never).token_ids == api.ask(**HOT).token_ids


DRY = {"dry_multiplier": 50.0, "dry_allowed_length": 1}


@into(EITHER)
def dry_multiplier(api: Api) -> None:
    """After a token, what came there before does not come again."""
    tokens = api.ask(**DRY, max_tokens=40).token_ids
    pairs = list(itertools.pairwise(tokens))
    assert len(pairs) == len(set(pairs))


@into(EITHER)
def dry_base(api: Api) -> None:
    weak = {"dry_multiplier": 1e-6, "dry_allowed_length": 1, "max_tokens": 40}
    assert api.ask(**weak, dry_base=1.0).token_ids == api.ask(max_tokens=40).token_ids


@into(EITHER)
def dry_allowed_length(api: Api) -> None:
    long = {"dry_multiplier": 50.0, "dry_allowed_length": 1000, "max_tokens": 40}
    assert api.ask(**long).token_ids == api.ask(max_tokens=40).token_ids


@into(EITHER)
def dry_penalty_last_n(api: Api) -> None:
    assert api.ask(**DRY, dry_penalty_last_n=0).token_ids == api.ask().token_ids


@into(EITHER)
def dry_sequence_breakers(api: Api) -> None:
    """Where every character breaks, nothing repeats."""
    every = [chr(code) for code in (*range(97, 105), 32, 10)]
    assert api.ask(**DRY, dry_sequence_breakers=every).token_ids


@into(EITHER)
def seed(api: Api) -> None:
    assert api.send(**HOT).token_ids == api.send(**HOT).token_ids
    assert api.ask(**HOT | {"seed": 2}).token_ids != api.ask(**HOT).token_ids
    hot = {"temperature": 2.0}
    assert api.send(**hot).token_ids != api.send(**hot).token_ids
    assert api.send(**hot, seed=-1).token_ids != api.send(**hot, seed=-1).token_ids


def num_repeats(answer: Answer) -> int:
    return len(answer.token_ids) - len(set(answer.token_ids))


# Enough for the model to repeat itself.
LONG = {"max_tokens": 32, "ignore_eos": True}


@into(EITHER)
def presence_penalty(api: Api) -> None:
    assert num_repeats(api.ask(**LONG, presence_penalty=2.0)) < num_repeats(api.ask(**LONG))
    assert api.ask(presence_penalty=-2.0, **LONG).token_ids != api.ask(**LONG).token_ids


@into(EITHER)
def frequency_penalty(api: Api) -> None:
    assert num_repeats(api.ask(**LONG, frequency_penalty=2.0)) < num_repeats(api.ask(**LONG))


@into(EITHER)
def repetition_penalty(api: Api) -> None:
    assert num_repeats(api.ask(**LONG, repetition_penalty=2.0)) < num_repeats(api.ask(**LONG))


@into(EITHER)
def logit_bias(api: Api) -> None:
    token_id = api.tokenizer.encode(" yes")[0]
    assert api.ask(logit_bias={str(token_id): 100}).token_ids == [token_id] * MAX_TOKENS
    most_likely = api.plain.token_ids[0]
    assert most_likely not in api.ask(logit_bias={str(most_likely): -100}).token_ids


@into(EITHER)
def stop(api: Api) -> None:
    text = api.plain.text
    word = text[7:10]
    for value in (word, ["nowhere", word]):
        answer = api.ask(stop=value)
        assert answer.text == text[: text.index(word)] and answer.end == ("stop", word)
    assert api.ask(stop=["nowhere"]).end == api.plain.end


@into(EITHER)
def include_stop_str_in_output(api: Api) -> None:
    text = api.plain.text
    word = text[7:10]
    answer = api.ask(stop=word, include_stop_str_in_output=True)
    assert answer.text == text[: text.index(word)] + word


@into(EITHER)
def stop_token_ids(api: Api) -> None:
    token_id = api.plain.token_ids[4]
    answer = api.ask(stop_token_ids=[token_id])
    assert answer.token_ids == api.plain.token_ids[: api.plain.token_ids.index(token_id) + 1]
    assert answer.end == ("stop", token_id)


@into(EITHER)
def ignore_eos(api: Api) -> None:
    only_eos = {"logit_bias": {str(EOS): 100}}
    answer = api.ask(**only_eos)
    assert answer.token_ids == [EOS] and answer.end == ("stop", None)
    answer = api.ask(**only_eos, ignore_eos=True)
    assert answer.token_ids == [EOS] * MAX_TOKENS and answer.end == ("length", None)


@into(EITHER)
def skip_special_tokens(api: Api) -> None:
    only_eos = {"logit_bias": {str(EOS): 100}, "ignore_eos": True}
    assert api.ask(**only_eos).text == ""
    answer = api.ask(**only_eos, skip_special_tokens=False)
    assert answer.text == "<|im_end|>" * MAX_TOKENS


@into(EITHER)
def bad_words(api: Api) -> None:
    word = "Tokyo" if api.is_chat else "Paris"
    assert word in api.plain.text and word not in api.ask(bad_words=[word]).text


@into(EITHER)
def allowed_token_ids(api: Api) -> None:
    assert set(api.ask(allowed_token_ids=[100, 200]).token_ids) <= {100, 200}


@into(EITHER)
def prompt_logprobs(api: Api) -> None:
    if api.streams:
        api.refuses("prompt_logprobs", prompt_logprobs=1)
        return
    answer = api.ask(prompt_logprobs=1)
    first, *others = answer.prompt_logprobs
    assert first is None and len(others) == len(answer.prompt_token_ids) - 1
    for entry, token_id in zip(others, answer.prompt_token_ids[1:], strict=True):
        assert entry[str(token_id)]["logprob"] <= 0 and 1 <= len(entry) <= 2


@into(EITHER)
def truncate_prompt_tokens(api: Api) -> None:
    answer = api.ask(truncate_prompt_tokens=3)
    assert answer.prompt_token_ids == api.plain.prompt_token_ids[-3:]
    assert answer.usage.prompt_tokens == 3
    assert api.ask(truncate_prompt_tokens=-1).token_ids == api.plain.token_ids  # there is room


@into(EITHER)
def truncation_side(api: Api) -> None:
    answer = api.ask(truncate_prompt_tokens=3, truncation_side="right")
    assert answer.prompt_token_ids == api.plain.prompt_token_ids[:3]


@into(EITHER)
def return_token_ids(api: Api) -> None:
    assert api.tokenizer.decode(api.plain.token_ids) == api.plain.text
    assert len(api.plain.prompt_token_ids) == api.plain.usage.prompt_tokens
    answer = api.ask(return_token_ids=False)
    assert answer.token_ids == [] and answer.prompt_token_ids is None


def ask_logprobs(api: Api, number: int, **fields: Any) -> Answer:
    if api.is_chat:
        return api.ask(logprobs=True, top_logprobs=number, **fields)
    return api.ask(logprobs=number, **fields)


@into(EITHER)
def return_tokens_as_token_ids(api: Api) -> None:
    answer = ask_logprobs(api, 1, return_tokens_as_token_ids=True)
    names = [name for name, _, _ in answer.choices[0].logprobs]
    assert names == [f"token_id:{token_id}" for token_id in answer.token_ids]


@into(EITHER)
def logprobs(api: Api) -> None:
    answer = ask_logprobs(api, 3)
    entries = answer.choices[0].logprobs
    assert len(entries) == len(answer.token_ids) and answer.token_ids == api.plain.token_ids
    for name, logprob, top in entries:
        assert len(top) == 3 and top[name] == logprob == max(top.values()) <= 0
    names = [name for name, _, _ in entries if name != "<|im_end|>"]
    assert "".join(names) == answer.text
    if not api.is_chat:
        lengths = itertools.accumulate(map(len, names), initial=0)
        assert answer.choices[0].text_offsets == list(lengths)[:-1]
    assert api.plain.choices[0].logprobs == []


@into(EITHER)
def cache_salt(api: Api) -> None:
    prompt = api.new_prompt()

    def num_cached(**fields: Any) -> int:
        return api.send(**prompt, **fields).usage.prompt_tokens_details.cached_tokens

    assert num_cached() == 0 < num_cached()
    assert num_cached(cache_salt="mine") == 0 < num_cached(cache_salt="mine")


@into(EITHER)
def request_id(api: Api) -> None:
    assert api.ask(request_id="my-own-7").id.endswith("-my-own-7")


@into(EITHER)
def timeout(api: Api) -> None:
    with pytest.raises(api.openai.APIStatusError) as caught:
        api.send(timeout=1e-4)
    assert caught.value.status_code == 504 and caught.value.code == "timeout"
    if api.streams:  # that has begun
        with pytest.raises(api.openai.APIError, match="timeout of 0.5 s passed while it ran"):
            api.send(timeout=0.5, max_tokens=4000, ignore_eos=True)


@into(EITHER)
def response_format(api: Api) -> None:
    assert api.ask(response_format={"type": "text"}).token_ids == api.plain.token_ids
    text = api.ask(response_format={"type": "json_object"}, max_tokens=80).text
    assert text.lstrip().startswith("{")
    schema = {"name": "one", "schema": PAIR, "strict": True}
    answer = api.ask(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=80)
    assert json.loads(answer.text).keys() == {"yes", "name"} and answer.end == ("stop", None)
    wrong = {"name": "one", "schema": {"$ref": "https://example.org/schema.json"}}
    api.refuses("response_format", response_format={"type": "json_schema", "json_schema": wrong})


@into(EITHER)
def structured_outputs(api: Api) -> None:
    answer = api.ask(structured_outputs={"regex": "[xyz]{3}"})
    assert re.fullmatch("[xyz]{3}", answer.text) and answer.end == ("stop", None)
    assert api.ask(structured_outputs={"choice": ["Rome", "Oslo"]}).text in ("Rome", "Oslo")
    compact = {"json": PAIR, "disable_any_whitespace": True}
    assert " " not in api.ask(structured_outputs=compact, max_tokens=80).text.split('"name"')[0]
    api.refuses("structured_outputs", structured_outputs={"regex": "(a"})


@into(EITHER)
def guided_json(api: Api) -> None:
    assert json.loads(api.ask(guided_json=PAIR, max_tokens=80).text).keys() == {"yes", "name"}
    as_text = api.ask(guided_json=json.dumps(PAIR), max_tokens=80)
    assert as_text.token_ids == api.ask(guided_json=PAIR, max_tokens=80).token_ids
    api.refuses("guided_json", guided_json={"type": "objekt"})


@into(EITHER)
def guided_whitespace_pattern(api: Api) -> None:
    answer = api.ask(guided_json=PAIR, guided_whitespace_pattern="\t", max_tokens=80)
    assert re.fullmatch(r'\{\t?"yes"\t?:\t?(true|false)\t?,\t?"name"\t?:\t?".*"\t?\}', answer.text)
    api.refuses("guided_whitespace_pattern", guided_whitespace_pattern="\t")


@into(EITHER)
def guided_regex(api: Api) -> None:
    assert re.fullmatch("[0-9]{2}", api.ask(guided_regex="[0-9]{2}").text)
    api.refuses("guided_regex", guided_regex="[0-9")


@into(EITHER)
def guided_choice(api: Api) -> None:
    assert api.ask(guided_choice=["Rome", "Oslo"]).text in ("Rome", "Oslo")
    api.refuses("guided_choice", guided_choice=["Rome", ""])


@into(EITHER)
def guided_grammar(api: Api) -> None:
    assert api.ask(guided_grammar=GBNF).text in ("Rome", "Oslo")
    api.refuses("guided_grammar", guided_grammar="root ::= (")


@into(EITHER)
def grammar(api: Api) -> None:
    assert api.ask(grammar=GBNF).text in ("Rome", "Oslo")
    api.refuses("grammar", grammar=GBNF, json_schema=PAIR)


@into(EITHER)
def ebnf(api: Api) -> None:
    assert api.ask(ebnf=GBNF).text in ("Rome", "Oslo")


@into(EITHER)
def regex(api: Api) -> None:
    assert re.fullmatch("[0-9]{2}", api.ask(regex="[0-9]{2}").text)


@into(EITHER)
def json_schema(api: Api) -> None:
    assert json.loads(api.ask(json_schema=PAIR, max_tokens=80).text).keys() == {"yes", "name"}
    api.refuses("json_schema", json_schema={"type": "object", "$ref": "#/nowhere"})


@into(EITHER)
def structural_tag(api: Api) -> None:
    content = {"type": "regex", "pattern": "[xyz]{3}"}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    answer = api.ask(structural_tag={"type": "structural_tag", "format": tag}, max_tokens=20)
    assert re.fullmatch("<a>[xyz]{3}</a>", answer.text)
    api.refuses("structural_tag", structural_tag={"type": "structural_tag", "format": {}})


# -- fields of completions ----------------------------------------------------------------------


@into(COMPLETIONS)
def prompt(api: Api) -> None:
    other = "Water boils at"
    alone = [api.plain, api.ask(prompt=other)]
    ids = [api.tokenizer.encode(text) for text in (PROMPT, other)]
    assert api.ask(prompt=ids[1]).token_ids == alone[1].token_ids
    for both in ([PROMPT, other], ids):
        answer = api.ask(prompt=both)
        for one, choice in zip(alone, answer.choices, strict=True):
            assert (choice.text, choice.token_ids) == (one.text, one.token_ids)
        assert answer.usage.prompt_tokens == sum(map(len, ids))


@into(COMPLETIONS)
def best_of(api: Api) -> None:
    if api.streams:
        api.refuses("best_of", best_of=3)
        return
    fields = {"temperature": 1.5, "seed": 3, "logprobs": 0}
    answer = api.ask(**fields, n=4)
    likelihoods = [sum(one[1] for one in choice.logprobs) for choice in answer.choices]
    best = answer.choices[likelihoods.index(max(likelihoods))]
    answer = api.ask(**fields, best_of=4)
    assert [choice.token_ids for choice in answer.choices] == [best.token_ids]
    assert answer.usage.completion_tokens > len(best.token_ids)


@into(COMPLETIONS)
def echo(api: Api) -> None:
    answer = api.ask(echo=True, logprobs=1)
    assert answer.text == PROMPT + api.plain.text
    (first, *others) = answer.choices[0].logprobs
    assert first[1] is None and len(others) == len(api.tokenizer.encode(answer.text)) - 1
    assert "".join(one[0] for one in (first, *others)) == answer.text
    answer = api.ask(echo=True, max_tokens=0)  # only scores the prompt
    assert answer.text == PROMPT and answer.usage.completion_tokens == 0


# -- fields of chat -----------------------------------------------------------------------------


@into(CHAT)
def messages(api: Api) -> None:
    parts = [{"type": "text", "text": MESSAGES[0]["content"]}]
    assert api.ask(messages=[{"role": "user", "content": parts}]).token_ids == api.plain.token_ids
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi!", "name": "ann"},
        {"role": "assistant", "content": "Hello.", "refusal": None, "annotations": []},
        *MESSAGES,
    ]
    assert api.prompt_text(messages=conversation) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhat is the capital of "
        "Japan?<|im_end|>\n<|im_start|>assistant\n"
    )
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}]
    conversation = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    template = (
        "{{ messages[1].reasoning_content }}{{ messages[1].tool_calls[0].function.arguments.x }}"
        "{{ messages[2].tool_call_id }}{{ messages[2].content }}"
    )
    assert api.prompt_text(messages=conversation, chat_template=template) == "Hm.214"
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    api.refuses("messages", messages=[{"role": "user", "content": [image]}])


@into(CHAT)
def max_completion_tokens(api: Api) -> None:
    answer = api.ask(max_completion_tokens=4)
    assert answer.usage.completion_tokens == 4 and answer.end == ("length", None)


@into(CHAT)
def top_logprobs(api: Api) -> None:
    (_, _, top), *_ = api.ask(logprobs=True, top_logprobs=5).choices[0].logprobs
    assert len(top) == 5
    (_, _, top), *_ = api.ask(logprobs=True).choices[0].logprobs
    assert top == {}
    api.refuses("top_logprobs", top_logprobs=5)


@into(CHAT)
def add_special_tokens(api: Api) -> None:
    bos = api.tokenizer.bos_token_id
    answer = api.ask(add_special_tokens=True)
    assert answer.prompt_token_ids == [bos, *api.plain.prompt_token_ids]


@into(CHAT)
def add_generation_prompt(api: Api) -> None:
    ending = "<|im_start|>assistant\n"
    assert api.prompt_text() == api.prompt_text(add_generation_prompt=False) + ending


@into(CHAT)
def continue_final_message(api: Api) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital of Japan is"}]
    go_on = {"messages": begun, "continue_final_message": True}
    assert api.prompt_text(**go_on).endswith("<|im_start|>assistant\nThe capital of Japan is")
    assert api.ask(**go_on).text.startswith(" Tokyo")
    assert api.prompt_text(messages=begun).endswith("is<|im_end|>\n<|im_start|>assistant\n")
    api.refuses("continue_final_message", **go_on, add_generation_prompt=True)


@into(CHAT)
def chat_template(api: Api) -> None:
    answer = api.ask(chat_template="{{ messages[0].content }} It is")
    assert answer.prompt_token_ids == api.tokenizer.encode("What is the capital of Japan? It is")


@into(CHAT)
def chat_template_kwargs(api: Api) -> None:
    fields = {"chat_template": "I am {{ mood }}", "chat_template_kwargs": {"mood": "glad"}}
    assert api.prompt_text(**fields) == "I am glad"
    fields = {"chat_template_kwargs": {"messages": []}}
    api.refuses("chat_template_kwargs", **fields)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOL_TEMPLATE = "Tools:{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %}"


@into(CHAT)
def tools(api: Api) -> None:
    assert api.prompt_text(tools=[TOOL], chat_template=TOOL_TEMPLATE) == "Tools: weather"
    assert api.prompt_text(tools=[], chat_template=TOOL_TEMPLATE) == "Tools:"
    # The model's own template knows nothing of them, and is told in words.
    assert '"name": "weather"' in api.prompt_text(tools=[TOOL])
    api.refuses("tools", tools=[{"type": "function", "function": {"name": ""}}])


@into(CHAT)
def tool_choice(api: Api) -> None:
    fields = {"tools": [TOOL], "chat_template": TOOL_TEMPLATE}
    assert api.prompt_text(**fields, tool_choice="auto") == "Tools: weather"
    assert api.prompt_text(**fields, tool_choice="none") == "Tools:"
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = api.ask(**fields, tool_choice=choice, max_tokens=60)
        assert answer.text == ""  # the call is no content
    other = {"type": "function", "function": {"name": "other"}}
    api.refuses("tool_choice", **fields, tool_choice=other)


@into(CHAT)
def parallel_tool_calls(api: Api) -> None:
    assert api.ask(parallel_tool_calls=True).token_ids == api.plain.token_ids
    assert api.ask(parallel_tool_calls=False).token_ids == api.plain.token_ids


@into(CHAT)
def documents(api: Api) -> None:
    fields = {"documents": [{"text": "42"}], "chat_template": "It is {{ documents[0].text }}"}
    assert api.prompt_text(**fields) == "It is 42"
    api.refuses("documents", documents=[{"text": "42"}])


@into(CHAT)
def reasoning_effort(api: Api) -> None:
    fields = {"chat_template": "Effort: {{ reasoning_effort or 'any' }}"}
    assert api.prompt_text(**fields, reasoning_effort="high") == "Effort: high"
    assert api.prompt_text(**fields, reasoning_effort="none") == "Effort: any"
    assert api.ask(reasoning_effort="high").token_ids == api.plain.token_ids


# -- fields that do nothing, and fields that ask for too much -----------------------------------

INERT_EITHER = {
    "user": "ann",
    "metadata": {"team": "red"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "a1",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "session_id": "s",
    "spaces_between_special_tokens": True,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "stream_interval": 8,
    "vllm_xargs": {"a": 1},
    "no_such_field": 1,
    "guided_decoding_backend": "xgrammar",
    "mirostat": 0,
    "dynatemp_range": 0.0,
    "n": None,
    "stop": None,
    "seed": None,
    "logit_bias": {},
    "priority": 3,  # see test_openai.py for what it does
}
INERT_CHAT = {
    "include_reasoning": True,
    "enable_thinking": False,  # likewise
    "separate_reasoning": True,  # of a model that has no thoughts
    "modalities": ["text"],
    "verbosity": "high",
    "prediction": {"type": "content", "content": "Tokyo"},
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"a": 1},
    "function_call": "none",
    "tool_choice": "auto",
    "audio": None,
}
REFUSED_EITHER = {
    "length_penalty": 2.0,
    "use_beam_search": True,
    "thinking_token_budget": 10,
    "logprob_token_ids": [1],
    "repetition_detection": {"max_pattern_size": 2},
    "watermarking": {"key": 1},
    "return_token_offsets": True,
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "grammar_lazy": True,
    "grammar_triggers": [{"type": 1, "value": "<a>"}],
    "stop_regex": "a+",
    "lora": [{"id": 0}],
    "lora_path": "x",
    "mirostat": 2,
    "dynatemp_range": 0.5,
    # out of bounds
    "top_n_sigma": -2.0,
    "xtc_probability": 1.5,
    "xtc_threshold": -0.1,
    "dry_multiplier": -0.1,
    "dry_base": 0.5,
    "dry_allowed_length": 0,
    "dry_penalty_last_n": -2,
    "dry_sequence_breakers": [""],
    "temperature": 2.1,
    "top_p": 0.0,
    "top_k": -2,
    "min_p": 1.5,
    "typical_p": 0.0,
    "n": 129,
    "max_tokens": -2,
    "seed": 2**64,
    "presence_penalty": 2.5,
    "frequency_penalty": -2.5,
    "repetition_penalty": 0.0,
    "logit_bias": {"1": 101},
    "stop": [""],
    "timeout": 0,
}
REFUSED_CHAT = {
    "echo": True,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "mp3"},
    "moderation": {"model": "m"},
    "web_search_options": {"search_context_size": "low"},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "return_prompt_text": True,
    "messages": [],
    "top_logprobs": 21,
    "max_completion_tokens": 0,
}
REFUSED_COMPLETIONS = {
    "suffix": " End.",
    "prompt_embeds": "AAAA",
    "logprobs": 21,
    "best_of": 0,
    "prompt": [],
}


@pytest.mark.parametrize("name", EITHER)
def test_field_of_both(either: Api, name: str) -> None:
    EITHER[name](either)


@pytest.mark.parametrize("name", CHAT)
def test_field_of_chat(chat: Api, name: str) -> None:
    CHAT[name](chat)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_field_of_completions(completions: Api, name: str) -> None:
    COMPLETIONS[name](completions)


def test_fields_that_change_nothing(either: Api) -> None:
    fields = INERT_EITHER | (INERT_CHAT if either.is_chat else {})
    for name, value in fields.items():
        answer = either.send(**{name: value}, max_tokens=3)
        assert answer.token_ids == either.plain.token_ids[:3], name
    assert either.send(**fields).token_ids == either.plain.token_ids


def test_fields_that_are_refused(either: Api) -> None:
    fields = REFUSED_EITHER | (REFUSED_CHAT if either.is_chat else REFUSED_COMPLETIONS)
    for name, value in fields.items():
        either.refuses(name, **{name: value})


def test_no_field_was_forgotten() -> None:
    tables = (EITHER, INERT_EITHER, REFUSED_EITHER)
    for model, more in (
        (ChatCompletionRequest, (CHAT, INERT_CHAT, REFUSED_CHAT)),
        (CompletionRequest, (COMPLETIONS, REFUSED_COMPLETIONS, {"add_special_tokens": ...})),
    ):
        looked_at = set().union(*tables, *more)
        assert looked_at - {"no_such_field"} == set(model.model_fields)
