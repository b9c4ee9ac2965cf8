"""Sampling parameters of a request, validated when they are made or changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, fields, replace
from enum import Enum
from typing import Any

from octavo.base.errors import InvalidRequestError
from octavo.base.plain_numbers import plain, plain_list
from octavo.core.structured_outputs import StructuredOutputs
from octavo.core.thought_texts import ThoughtTexts

# None of these bounds limits quality; each limits the work of one request.
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_CHARS = 4096  # of all together
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**64
MAX_DRAFT_TOKENS = 64  # drafted at once
# Of all positions of a prompt together: each takes kilobytes where it goes, and a hundred bytes an
# entry in an answer.
MAX_PROMPT_LOGPROBS = 2**18


@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """A request's settings of speculative decoding: the object ``speculative`` of the APIs.

    Raises:
        InvalidRequestError: a value is out of its range; names the field.
    """

    enabled: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("enabled", "num_speculative_tokens"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if not isinstance(self.enabled, bool):
            raise InvalidRequestError(
                f"must be true or false, not {self.enabled!r}", "speculative.enabled"
            )
        if self.num_speculative_tokens is not None:
            field = "speculative.num_speculative_tokens"
            _integer(field, self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SpeculativeParams:
        if not isinstance(values, Mapping):
            raise InvalidRequestError(f"must be an object, not {values!r}", "speculative")
        known = {"enabled", "num_speculative_tokens"}
        if unknown := set(values) - known:
            raise InvalidRequestError(
                f"has no field {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}",
                "speculative",
            )
        return cls(**values)

    @property
    def max_tokens(self) -> int | None:
        return self.num_speculative_tokens if self.enabled else 0


class RequestOutputKind(Enum):
    """The content of the outputs that arrive while an answer is made."""

    CUMULATIVE = 0  # all that there is so far
    DELTA = 1  # what is new since the last output: it costs the same, however long the answer is
    FINAL_ONLY = 2  # there is one, at the end


@dataclass(slots=True)
class SamplingParams:
    """Parameters that turn logits into tokens and end a generation. Names and defaults are vLLM's.

    Fields may be assigned, and are validated again; ``clone`` copies an object. A request has a
    copy of its own: later changes do not affect it.

    Args:
        n: completions to return for a prompt; they share the prompt's KV blocks.
        best_of: completions to generate, of which the ``n`` with the highest cumulative
            log-probability are returned. None means ``n``.
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens.
        repetition_penalty: > 0, over prompt and generated tokens; 1 is off.
        temperature: 0 is greedy.
        top_p, min_p, typical_p: 1, 0 and 1 are off. top_k: 0 or -1 is off.
        seed: the same seed gives the same tokens, whatever else runs (on a GPU, to the bit with
            ``batch_invariant`` alone). None draws one.
        stop: strings that end the generation; not part of the text unless
            ``include_stop_str_in_output``. stop_token_ids: the same for tokens.
        ignore_eos: go on after the model's end-of-text tokens.
        max_tokens: tokens to generate at most. None: as many as the context allows.
        min_tokens: no stop before this many tokens.
        logprobs, prompt_logprobs: how many most likely tokens to report for each generated, or
            prompt, position, beside the token itself. None reports nothing.
        logit_bias: added to the logits of the given token ids, each in [-100, 100].
        allowed_token_ids: only these can be generated. bad_words: these can not.
        detokenize: False leaves ``text`` empty.
        skip_special_tokens: special tokens do not become text.
        speculative: whether tokens may be drafted, and how many at once.
        attention_sinks, window: how many of its first and of its last tokens a query attends to;
            the generation may then go on past the context (``core/sink_window.py``). A window of 0
            attends to all; None takes the engine's setting.
        n_keep: the first tokens that a context shift keeps, in an engine that shifts contexts.
        cache_prompt: False neither takes from caches nor leaves anything there: all of the prompt
            is computed, its blocks are free when it ends, and nothing goes to the disk.
        structured_outputs: what the answer must be: JSON of a schema, one of several texts, a match
            of an expression or of a grammar (``StructuredOutputs``, or a mapping with its fields).
        thinking_token_budget: tokens of all thoughts of a model that reasons, after which they are
            closed. None and -1 are no limit.
        thought_texts: the tags of these thoughts, as the template of a chat says; None: as the
            model's own template does.
        output_kind: what the outputs of ``AsyncLLM.generate`` and ``LLM.stream`` hold.

    Fields that vLLM has and octavo lacks (``watermarking`` and so on) may be given with the
    value that asks for nothing.

    Raises:
        InvalidRequestError: a value is out of its range; names the field.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculative: SpeculativeParams | Mapping[str, Any] | None = None
    attention_sinks: int | None = None
    window: int | None = None
    n_keep: int | None = None
    cache_prompt: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None
    thought_texts: ThoughtTexts | Mapping[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # vLLM's fields that octavo lacks, each with the value that asks for nothing: see _UNSUPPORTED.
    watermarking: InitVar[Any] = None
    prompt_logprob_token_ids: InitVar[Any] = None
    prompt_logprob_start: InitVar[Any] = None
    logprob_token_ids: InitVar[Any] = None
    flat_logprobs: InitVar[Any] = False
    spaces_between_special_tokens: InitVar[Any] = True
    stream_interval: InitVar[Any] = None
    skip_clone: InitVar[Any] = False
    extra_args: InitVar[Any] = None
    skip_reading_prefix_cache: InitVar[Any] = None
    repetition_detection: InitVar[Any] = None
    routed_experts_prompt_start: InitVar[Any] = 0
    trace_decode_token_ids: InitVar[Any] = None

    def __post_init__(self, *unsupported: Any) -> None:
        for name, value in zip(_UNSUPPORTED, unsupported, strict=True):
            _refuse_unsupported(name, value)

        # Lists are welcome where the ecosystem passes lists; stored as tuples, so that a params
        # object can be shared between requests.
        def store(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in _SCALARS:
            store(name, plain(getattr(self, name)))
        store("stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        store("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        if sum(map(len, self.bad_words)) > MAX_BAD_WORDS_CHARS:
            raise InvalidRequestError(
                f"at most {MAX_BAD_WORDS_CHARS} characters in all", "bad_words"
            )
        store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            store("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "must name at least one token, or be None", "allowed_token_ids"
                )
        store("logit_bias", _logit_bias(self.logit_bias))
        if self.speculative is not None and not isinstance(self.speculative, SpeculativeParams):
            store("speculative", SpeculativeParams.of(self.speculative))
        if self.structured_outputs is not None:
            store("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.thought_texts is not None:
            store("thought_texts", ThoughtTexts.of(self.thought_texts))
        if self.seed == -1:
            store("seed", None)
        if self.thinking_token_budget == -1:
            store("thinking_token_budget", None)
        if not isinstance(self.output_kind, RequestOutputKind):
            kinds = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise InvalidRequestError(
                f"must be one of {kinds}, not {self.output_kind!r}", "output_kind"
            )

        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above_low=True)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("typical_p", self.typical_p, 0.0, 1.0, above_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        most = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        _integer("min_tokens", self.min_tokens, 0, most)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        for name in ("attention_sinks", "window", "n_keep", "thinking_token_budget"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, 2**31 - 1)
        if not isinstance(self.cache_prompt, bool):
            raise InvalidRequestError(
                f"must be True or False, not {self.cache_prompt!r}", "cache_prompt"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", "stop")

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field. An invalid value is refused, and changes nothing."""
        if not hasattr(self, _LAST_FIELD):  # under construction: __post_init__ validates it
            object.__setattr__(self, name, value)
            return
        if name in _UNSUPPORTED:
            _refuse_unsupported(name, value)
            return
        if name not in self.__slots__:
            raise AttributeError(f"SamplingParams have no {name!r}")
        changed = self.with_changes(**{name: value})
        for slot in self.__slots__:
            object.__setattr__(self, slot, getattr(changed, slot))

    def __copy__(self) -> SamplingParams:
        return self.clone()

    def __deepcopy__(self, memo: object) -> SamplingParams:
        return self.clone()

    def clone(self) -> SamplingParams:
        """Return an independent object with the same fields."""
        return replace(self)

    @property
    def num_samples(self) -> int:
        """Number of completions to generate for a prompt: ``best_of`` where it is given, else
        ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def max_draft_tokens(self) -> int | None:
        """Largest number of tokens to draft at once; None leaves it to the engine."""
        asked = self.speculative
        return asked.max_tokens if isinstance(asked, SpeculativeParams) else None

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens of the request change its logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def with_changes(self, **changes: Any) -> SamplingParams:
        """Return a copy with the given fields replaced, validated again."""
        return replace(self, **changes)


# By name, in the order of the fields: values that ask for nothing, and what to do about others.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermarking": ((None, False), "octavo marks no text; leave it None"),
    "prompt_logprob_token_ids": ((None,), "use prompt_logprobs, which has the likeliest"),
    "prompt_logprob_start": ((None, 0), "log-probabilities begin with the prompt"),
    "logprob_token_ids": ((None, []), "use logprobs, which has the likeliest"),
    "flat_logprobs": ((None, False), "log-probabilities come as a dictionary a position"),
    "spaces_between_special_tokens": ((None, True), "text is as the tokenizer joins it"),
    "stream_interval": ((None, 1), "an output comes whenever something is new"),
    "skip_clone": ((None, False, True), "a request has a copy anyway"),
    "extra_args": ((None, {}), "there are no samplers beside octavo's"),
    "skip_reading_prefix_cache": ((None, False), "use cache_prompt=False"),
    "repetition_detection": ((None,), "use repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": ((None, 0), "octavo does not return the routes of experts"),
    "trace_decode_token_ids": ((None,), "tokens are sampled"),
}


def _refuse_unsupported(name: str, value: Any) -> None:
    nothing, why = _UNSUPPORTED[name]
    if plain_list(plain(value)) not in nothing:
        raise InvalidRequestError(f"{value!r} is not supported: {why}", name)


_SCALARS = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "ignore_eos", "max_tokens"),
    *("min_tokens", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens"),
    *("include_stop_str_in_output", "attention_sinks", "window", "n_keep", "cache_prompt"),
    "thinking_token_budget",
)
_LAST_FIELD = fields(SamplingParams)[-1].name
assert _LAST_FIELD == "output_kind"


def check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raise InvalidRequestError if the log-probabilities of a prompt would be too many.

    They are counted with the prompt's own tokens, which come with the most likely ones.
    """
    if params.prompt_logprobs is None:
        return
    each = params.prompt_logprobs + 1
    if num_prompt_tokens * each > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{params.prompt_logprobs} at each of {num_prompt_tokens} positions, and the tokens' "
            f"own, are {num_prompt_tokens * each:,} log-probabilities; at most "
            f"{MAX_PROMPT_LOGPROBS:,} can be had in one request: ask for fewer, or for a part of "
            "the prompt",
            "prompt_logprobs",
        )


def _integer(field: str, value: Any, low: int, high: int) -> None:
    # bool is an int to Python, but never what a caller means by a count.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"must be an integer, not {value!r}", field)
    if not low <= value <= high:
        raise InvalidRequestError(f"must be in [{low}, {high}], not {value}", field)


def _number(field: str, value: Any, low: float, high: float, *, above_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"must be a number, not {value!r}", field)
    inside = (value > low if above_low else value >= low) and value <= high
    if not inside or value > sys.float_info.max:  # a NaN is never inside
        bracket = "(" if above_low else "["
        raise InvalidRequestError(f"must be in {bracket}{low:g}, {high:g}], not {value}", field)


def _strings(field: str, value: str | Iterable[str] | None, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else tuple(value)
    if len(strings) > most:
        raise InvalidRequestError(f"at most {most} strings, not {len(strings)}", field)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"must hold non-empty strings, not {string!r}", field)
    return strings


def _token_ids(field: str, value: Iterable[int] | None) -> tuple[int, ...]:
    ids = () if value is None else tuple(plain_list(value))
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31:
        return ids  # as nearly always, and without a loop in Python: there may be thousands
    ids = tuple(map(plain, ids))
    for token_id in ids:
        _integer(field, token_id, 0, 2**31 - 1)
    return ids


def _logit_bias(value: Mapping[Any, Any] | None) -> Mapping[int, float] | None:
    if not value:
        return None
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"at most {MAX_LOGIT_BIAS} entries", "logit_bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        # JSON objects have string keys only.
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else plain(key)
        amount = plain(amount)
        _integer("logit_bias", token_id, 0, 2**31 - 1)
        _number("logit_bias", amount, -100.0, 100.0)
        bias[token_id] = float(amount)
    return bias
