"""A cache of answers to repeated deterministic requests, in memory.

`ResponseCache` submits requests to an `EngineClient`. A request whose answer could not be another
(temperature 0, or a seed of the client's own) is answered with the deltas of the first time, each
as it was, so that a stream replays chunk by chunk; everything else goes to the engine.

An entry is found by a SHA-256 over the tenant's salt, the prompt and all that shapes the answer, so
that no tenant can learn from the cache what another one asked. Only whole answers are kept: none
that was aborted, timed out or failed. The least recently used go when the bound of bytes is met.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import TypeAlias

from octavo.core.batch import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.server.engine.generation import (
    EngineClient,
    EngineObserver,
    Generation,
    GenerationRequest,
)
from octavo.serving.outputs import Delta

# What an entry costs beside its columns: the key, its place in the dictionary, the objects.
_ENTRY_BYTES = 512


class ResponseCache:
    """Keeps answers of an engine and gives them again.

    Args:
        engine: answers the requests that are not in the cache.
        max_bytes: memory that all entries together may take. Answers still being written count
            in the `UnreadOutputMemory` of the engine instead.
        observer: gets every hit like other generations, but without ``on_tokens``; such a
            generation has ``is_from_cache``.
    """

    def __init__(
        self, engine: EngineClient, max_bytes: int, observer: EngineObserver | None = None
    ):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_queries = 0  # requests that could have been answered from here
        self.num_hits = 0
        self._engine = engine
        self._observer = observer or EngineObserver()
        self._recordings: OrderedDict[bytes, Recording] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._recordings)

    def submit(self, request: GenerationRequest) -> Generation:
        """Return the cached answer, already complete, or the engine's."""
        if not request.is_deterministic or not request.params.cache_prompt:
            return self._engine.submit(request)
        self.num_queries += 1
        key = answer_key(request)
        recording = self._recordings.get(key)
        if recording is None:
            generation = self._engine.submit(request)
            # What fits in columns takes several times that as deltas.
            generation.record(
                lambda whole, deltas: self._keep(key, whole, deltas), 8 * self.max_bytes
            )
            return generation
        self.num_hits += 1
        self._recordings.move_to_end(key)
        generation = recording.replay(request)
        self._observer.on_submitted(generation)
        self._observer.on_finished(generation, generation.finish_reason or "stop")
        return generation

    def clear(self) -> None:
        """Forget all answers."""
        self._recordings.clear()
        self.num_bytes = 0

    def _keep(self, key: bytes, generation: Generation, deltas: list[Delta]) -> None:
        reasons = {delta.finish_reason for delta in deltas} - {None}
        if not reasons <= {"stop", "length"} or key in self._recordings:
            return
        recording = Recording(deltas, generation.prompt_logprobs)
        if recording.num_bytes > self.max_bytes:
            return
        self._recordings[key] = recording
        self.num_bytes += recording.num_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._recordings.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


def answer_key(request: GenerationRequest) -> bytes:
    """Return a digest of everything that the answer to a deterministic request depends on."""
    params = request.params
    # A greedy answer does not depend on the seed, and the server draws one where none is given.
    ignored = {"output_kind", "seed"} if params.temperature == 0 else {"output_kind"}
    shape = [
        (field.name, _canonical(getattr(params, field.name)))
        for field in fields(SamplingParams)
        if field.name not in ignored
    ]
    prompt = array("q", request.prompt_token_ids)
    head = repr((request.kv_salt, len(prompt), shape))  # repr keeps strings and lists apart
    digest = hashlib.sha256(head.encode())
    digest.update(prompt)
    return digest.digest()


def _canonical(value: object) -> object:
    return sorted(value.items()) if isinstance(value, dict) else value


# Log-probabilities in columns: token ids, logprobs, ranks, numbers of top entries; of those, all
# in a row, token ids and logprobs.
_LogprobColumns: TypeAlias = (
    "tuple[array[int], array[float], array[int], array[int], array[int], array[float]]"
)


class Recording:
    """The deltas of one whole answer, in columns: tens of bytes a token, not hundreds.

    It is immutable, and each replay makes new objects.
    """

    __slots__ = ("_columns", "_ends", "_logprobs", "_prompt_logprobs", "_text", "num_bytes")

    def __init__(self, deltas: Sequence[Delta], prompt_logprobs: Sequence[TokenLogprobs]):
        self._text = "".join(delta.text for delta in deltas)
        self._columns = (
            array("I", (delta.index for delta in deltas)),
            array("I", (len(delta.text) for delta in deltas)),
            array("I", (len(delta.token_ids) for delta in deltas)),
            array("I", (len(delta.logprobs) for delta in deltas)),
            array("q", (token_id for delta in deltas for token_id in delta.token_ids)),
        )
        # Of the last delta of each sample, by the delta's position.
        self._ends = {
            position: (delta.finish_reason, delta.stop_reason, delta.cumulative_logprob)
            for position, delta in enumerate(deltas)
            if delta.finish_reason is not None
        }
        self._logprobs = _to_columns([entry for delta in deltas for entry in delta.logprobs])
        self._prompt_logprobs = _to_columns(prompt_logprobs)
        self.num_bytes = _ENTRY_BYTES + sum(map(sys.getsizeof, self._parts()))

    def replay(self, request: GenerationRequest) -> Generation:
        """Return the answer as a generation that is complete."""
        generation = Generation(request, abort=lambda _: None)
        generation.is_from_cache = True
        generation.prompt_logprobs = list(_from_columns(self._prompt_logprobs))
        generation.push(list(self._deltas()))
        # No token was computed: the whole prompt counts as cached, and nothing took time.
        stats = generation.stats
        stats.num_cached_tokens = stats.num_prompt_tokens
        stats.queue_time = stats.ttft = stats.e2e = 0.0
        return generation

    def _deltas(self) -> Iterator[Delta]:
        indices, num_chars, num_tokens, num_logprobs, token_ids = self._columns
        logprobs = _from_columns(self._logprobs)
        text_at = token_at = 0
        for position, index in enumerate(indices):
            text_end = text_at + num_chars[position]
            token_end = token_at + num_tokens[position]
            yield Delta(
                index,
                self._text[text_at:text_end],
                token_ids[token_at:token_end].tolist(),
                list(islice(logprobs, num_logprobs[position])),
                *self._ends.get(position, ()),
            )
            text_at, token_at = text_end, token_end

    def _parts(self) -> Iterator[object]:
        """Yield every object in it that grows with the answer, to measure its size."""
        yield self._text
        yield self._ends
        for position, end in self._ends.items():
            yield from (position, end, *end)
        yield from self._columns
        yield from self._logprobs or ()
        yield from self._prompt_logprobs or ()


def _to_columns(entries: Sequence[TokenLogprobs]) -> _LogprobColumns | None:
    if not entries:
        return None
    return (
        array("q", (entry.token_id for entry in entries)),
        array("d", (entry.logprob for entry in entries)),
        array("q", (entry.rank for entry in entries)),
        array("I", (len(entry.top) for entry in entries)),
        array("q", (token_id for entry in entries for token_id, _ in entry.top)),
        array("d", (logprob for entry in entries for _, logprob in entry.top)),
    )


def _from_columns(columns: _LogprobColumns | None) -> Iterator[TokenLogprobs]:
    if columns is None:
        return
    token_ids, logprobs, ranks, num_top, top_ids, top_logprobs = columns
    at = 0
    for token_id, logprob, rank, num in zip(token_ids, logprobs, ranks, num_top, strict=True):
        top = zip(top_ids[at : at + num], top_logprobs[at : at + num], strict=True)
        yield TokenLogprobs(token_id, logprob, rank, tuple(top))
        at += num
