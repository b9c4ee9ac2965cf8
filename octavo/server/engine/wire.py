"""JSON messages between the server and its engine process, each after its length in four bytes.

They cross a socket pair that no other process can open. JSON because it cannot carry code, and
because what crosses is small: a prompt's ids once, and some forty bytes for each token.

To the engine, by ``op``:

    start      args: what EngineArgs takes, cpus: those to run on            (the first message)
               and clock: {now, boot}, the server's and of which start of its machine, for an engine
               that may be on another one
               and transfer: {own, peers}, files through which KV is passed on
               or links: {computes_prompts, peers: [replica], bytes: of what one keeps}, to other
               machines
    add        id, ids, params: those that differ from their defaults, bad_words: [ids], priority,
               salt, tenant, weight, arrival, isolated: whether in steps of its own
               and resumed: [[index, ids, cumulative logprob]], the samples that go on from another
               engine's output
               and kv: {replica, tokens}, the replica that passes on the KV of so many tokens
               and hands_over: true, if others go on with it as soon as all samples have begun
    abort      id
    peer_ended  replica      what it has not passed on by now does not come
    invite     replica       answered by ``invited``: that replica reads the KV of this one
    connect    replica, ticket     this one reads the KV of that replica
    release    id            what ran isolated may share steps from now on
    meter      facts: what StepFacts.as_json gives; steps are measured against these
    snapshots  is_enabled    whether to send snapshots
    ping       number, now: the server's clock; answered between two steps, by the engine
    stop

From the engine, by ``ev``:

    ready      facts: the fields of EngineFacts
    failed     kind, message, field                  it cannot start; the process ends
    refused    id, kind, message, field              and further attributes of an error
    step       time, record, begun: [id], deltas: [...], stats: {id: [...]}
               and prompt_logprobs: {id: [...]}, where there are any
               and snapshot: {...}, while these are enabled (`octavo.core.engine_snapshot`)
    snapshot   snapshot                              of an idle engine, between steps
    idle       record                                an abort has left nothing to do
    pong       number, record
    invited    replica, ticket                       the replica may connect by it, once
    unlinked   replica                               the link to it has ended: another one is needed
    handed_over  id, tokens, record                  others go on: the KV of so many tokens is saved

A ``record`` is the engine's StepStats; ``stats`` are those of a request, when its first token or
its last comes. Both are lists, in the order of the fields.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from octavo.base import errors
from octavo.base.errors import (
    ConstraintError,
    EngineError,
    EngineUnavailableError,
    OctavoError,
    PromptTooLongError,
    QueueFullError,
)
from octavo.core.batch import TokenLogprobs
from octavo.core.sampling_params import SamplingParams, SpeculativeParams
from octavo.core.sink_window import SinkWindowRules
from octavo.core.stats import StepStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.core.thought_texts import ThoughtTexts
from octavo.server.engine.generation import EngineFacts, GenerationStats
from octavo.serving.outputs import Delta

Message = dict[str, Any]

# More than any message needs: a larger one is a bug, and must not become an allocation.
MAX_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


def encode_message(message: Message) -> bytes:
    """Return one message as bytes."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class MessageDecoder:
    """Cuts a stream of bytes, which arrive in any pieces, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that ``data`` completes."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer)
            if size > MAX_BYTES:
                raise ValueError(f"a message of {size} bytes")
            end = _LENGTH.size + size
            if len(buffer) < end:
                return
            body = bytes(buffer[_LENGTH.size : end])
            del buffer[:end]
            yield json.loads(body)


def delta_to_list(request_id: str, delta: Delta) -> list[Any]:
    """Return a delta as the ``step`` message holds it, as short as it can be."""
    items: list[Any] = [request_id, delta.index, delta.text, delta.token_ids]
    if delta.logprobs or delta.finish_reason is not None:
        items.append(delta.logprobs)
    if delta.finish_reason is not None:
        items += [delta.finish_reason, delta.stop_reason, delta.cumulative_logprob, delta.error]
    return items


def delta_from_list(items: list[Any]) -> tuple[str, Delta]:
    """Return the request's id and the delta of what ``delta_to_list`` made."""
    request_id, index, text, token_ids, *rest = items
    if not rest:
        return request_id, Delta(index, text, token_ids)
    logprobs, *end = rest
    return request_id, Delta(index, text, token_ids, logprobs_from_list(logprobs), *end)


def logprobs_from_list(entries: list[list[Any]]) -> list[TokenLogprobs]:
    """Return log-probabilities from JSON, in which a named tuple is a list."""
    return [
        TokenLogprobs(token_id, logprob, rank, tuple((i, value) for i, value in top))
        for token_id, logprob, rank, top in entries
    ]


# -- records -----------------------------------------------------------------------------------

_figures_of_step = attrgetter(*(field.name for field in fields(StepStats)))


def record_to_list(record: StepStats) -> tuple[Any, ...]:
    """Return the values of all fields of a step's statistics."""
    figures: tuple[Any, ...] = _figures_of_step(record)
    return figures


def record_from_list(figures: list[Any]) -> StepStats:
    """Return the statistics of what ``record_to_list`` made."""
    values: list[Any] = [tuple(each) if isinstance(each, list) else each for each in figures]
    return StepStats(*values)


# Statistics of a request that the engine reports; the server counts tokens as they arrive.
_STATS_OF_ENGINE = (
    "num_cached_tokens",
    "miss_reason",
    "num_preemptions",
    "num_draft_tokens",
    "num_accepted_tokens",
    "queue_time",
    "ttft",
    "tpot",
    "e2e",
    "prefill_time",
    "decode_time",
)
stats_to_list = attrgetter(*_STATS_OF_ENGINE)


def set_stats(stats: GenerationStats, values: list[Any]) -> None:
    """Set the statistics that ``stats_to_list`` sent."""
    for name, value in zip(_STATS_OF_ENGINE, values, strict=True):
        setattr(stats, name, value)


def facts_from_dict(values: dict[str, Any]) -> EngineFacts:
    """Return the facts from JSON, which has no tuples."""
    facts = EngineFacts(**values)
    return replace(
        facts,
        eos_token_ids=tuple(facts.eos_token_ids),
        choices=tuple(facts.choices),
        windows=tuple(facts.windows),
        sink_windows=SinkWindowRules(**values.get("sink_windows", {})),
    )


# -- parameters ----------------------------------------------------------------------------------

_DEFAULTS = SamplingParams()
# output_kind is left out: the engine's side always sends what is new.
_PARAMS = tuple(each.name for each in fields(SamplingParams) if each.name != "output_kind")


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    values = {
        name: value
        for name in _PARAMS
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name)
    }
    if params.logit_bias is not None:
        values["logit_bias"] = dict(params.logit_bias)
    if isinstance(params.speculative, SpeculativeParams):
        values["speculative"] = asdict(params.speculative)
    if isinstance(params.structured_outputs, StructuredOutputs):
        values["structured_outputs"] = params.structured_outputs.to_dict()
    if isinstance(params.thought_texts, ThoughtTexts):
        values["thought_texts"] = asdict(params.thought_texts)
    return values


# -- errors --------------------------------------------------------------------------------------


def error_to_message(error: BaseException) -> Message:
    """Return the fields of a message that carries an error of the engine's side."""
    message: Message = {
        "kind": type(error).__name__,
        "message": str(error),
        "field": getattr(error, "field", None),
    }
    if isinstance(error, ConstraintError):
        message["reason"] = error.reason
    if isinstance(error, QueueFullError | EngineUnavailableError):
        message["retry_after"] = error.retry_after
    if isinstance(error, PromptTooLongError):
        message |= {"num_prompt_tokens": error.num_prompt_tokens, "limit": error.limit}
    return message


def error_from_message(message: Message) -> OctavoError:
    """Return the exception that a message names; an EngineError if it is none of octavo's."""
    kind = getattr(errors, message["kind"], None)
    text = message["message"]
    if kind is PromptTooLongError:
        return PromptTooLongError(text, message["num_prompt_tokens"], message["limit"])
    if kind in (errors.InvalidRequestError, errors.ConstraintError):
        error = kind(text)
        error.field = message["field"]
        if isinstance(error, errors.ConstraintError):
            error.reason = message["reason"]
        return error
    if kind in (QueueFullError, EngineUnavailableError):
        delayed: OctavoError = kind(text, message["retry_after"])
        return delayed
    if kind is errors.ModelFileError or kind is None or not issubclass(kind, OctavoError):
        return EngineError(text)
    made = kind(text)
    assert isinstance(made, OctavoError)
    return made
