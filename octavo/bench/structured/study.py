"""Measures answers under schemas, beside plain decoding of as many tokens.

All kinds of rows use one engine. Where speeds are compared, turns alternate, and each row has the
medians; masks are timed in the thread that makes them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConstraintError
from octavo.bench.structured.llama_server import LlamaQuestion
from octavo.bench.structured.schemas import random_schema, record_schema
from octavo.bench.structured.timed_mask import TimedMask
from octavo.bench.structured.validity import Validity
from octavo.core.sampling_params import SamplingParams, SpeculativeParams
from octavo.core.structured_outputs import StructuredOutputs
from octavo.measure.statistics import percentile
from octavo.serving.text_engine import PreparedMask
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession, RunTiming
    from octavo.bench.structured.llama_server import LlamaServer

# So high that the model hardly matters: nearly every allowed token is as likely as any other.
_RANDOM_TEMPERATURE = 100.0
_PLAIN_STREAMS = SpeculativeParams(enabled=False)


@dataclass(frozen=True, slots=True)
class StructuredPlan:
    """The measurements to make.

    Args:
        schemas: random schemas, answered with random logits; a tenth of them by the model.
        streams: of the row with several streams at once.
        max_tokens: of an answer.
        repeat: turns of each side where speeds are compared.
    """

    schemas: int = 200
    streams: int = 32
    max_tokens: int = 256
    repeat: int = 3
    seed: int = 0


@dataclass(slots=True)
class StructuredRow:
    """Figures of answers of a kind. Speeds are tokens a second, of each turn."""

    kind: str
    schemas: int = 0
    finished: int = 0
    valid: int = 0
    refused: int = 0
    mask_seconds: list[float] = field(default_factory=list)
    compile_seconds: list[float] = field(default_factory=list)
    decode_tps: list[float] = field(default_factory=list)
    plain_decode_tps: list[float] = field(default_factory=list)

    def pairs(self) -> Iterable[tuple[float, float]]:
        """Return the speeds of turns that followed each other."""
        return zip(self.decode_tps, self.plain_decode_tps, strict=False)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "schemas": self.schemas,
            "finished": self.finished,
            "valid": self.valid,
            "refused": self.refused,
            "mask_us": _percentiles(self.mask_seconds, 1e6, {"p99": 99, "p999": 99.9}),
            "compile_ms": _percentiles(self.compile_seconds, 1e3, {"p99": 99}),
            "decode_tps": _median(self.decode_tps),
            "plain_decode_tps": _median(self.plain_decode_tps),
            "ratio": _middle([a / b for a, b in self.pairs() if b]),
        }


def _middle(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median, and the least and the most; None without any."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _percentiles(
    seconds: Sequence[float], factor: float, percents: Mapping[str, float]
) -> dict[str, float] | None:
    """Return the median and percentiles, in units of ``1 / factor`` seconds; None without any."""
    if not seconds:
        return None
    asked = {"median": 50.0, **percents}
    return {name: percentile(seconds, each) * factor for name, each in asked.items()}


def prompt_of(schema: Mapping[str, Any]) -> str:
    """Return what asks a model for an answer under a schema."""
    return (
        f"Make up one JSON object of this JSON schema. Answer with it alone.\n{json.dumps(schema)}"
    )


class StructuredStudy:
    """The measurements of one engine.

    Args:
        advance: called after each turn; there are ``num_turns``.
        peer: another engine with the same model.
    """

    def __init__(
        self,
        session: OfflineSession,
        plan: StructuredPlan,
        advance: Callable[[], object],
        peer: LlamaServer | None = None,
    ):
        self._session, self._plan, self._advance = session, plan, advance
        self._peer = peer
        self._validity = Validity()
        self._count = 0
        session.prepare_mask(self._params({"type": "null"}))  # the vocabulary is no grammar's time

    @staticmethod
    def num_turns(plan: StructuredPlan, peer: LlamaServer | None = None) -> int:
        """Return how many turns are measured."""
        return 2 + (3 if peer is None else 5) * 2 * plan.repeat

    def measure(self) -> list[StructuredRow]:
        """Return the rows, in the order of docs/metrics.md."""
        plan = self._plan
        numbers = range(plan.seed, plan.seed + plan.schemas)
        schemas = [random_schema(number) for number in numbers]
        records = [record_schema(number) for number in range(plan.seed, plan.seed + plan.streams)]
        rows = [
            self._validated("random logits", schemas, _RANDOM_TEMPERATURE),
            self._validated("model", schemas[: max(1, plan.schemas // 10)], 0.0),
            self._compared("one stream", records[:1]),
            self._compared(f"{plan.streams} streams", records),
            self._forced("forced tokens", records[:1]),
        ]
        if self._peer is not None:
            name = "llama-server"
            rows.append(self._of_peer(f"{name}, one stream", records[:1], self._peer))
            rows.append(self._of_peer(f"{name}, {plan.streams} streams", records, self._peer))
        return rows

    # -- rows --------------------------------------------------------------------------------

    def _validated(
        self, kind: str, schemas: Sequence[dict[str, Any]], temperature: float
    ) -> StructuredRow:
        row = StructuredRow(kind)
        timing = self._answer(row, schemas, temperature=temperature)
        if timing is not None:
            row.decode_tps.append(decode_tps(timing))
        self._advance()
        return row

    def _compared(self, kind: str, schemas: Sequence[dict[str, Any]]) -> StructuredRow:
        """Return a row of answers under schemas, beside as many plain tokens of each."""
        row = StructuredRow(kind)
        is_alone = len(schemas) == 1  # else masks are made together, without times of their own
        for _ in range(self._plan.repeat):
            timing = self._answer(row, schemas, is_timed=is_alone, speculative=_PLAIN_STREAMS)
            assert timing is not None
            row.decode_tps.append(decode_tps(timing))
            self._advance()
            lengths = [len(tokens) for tokens in timing.output_token_ids]
            row.plain_decode_tps.append(decode_tps(self._plain(schemas, lengths)))
            self._advance()
        return row

    def _forced(self, kind: str, schemas: Sequence[dict[str, Any]]) -> StructuredRow:
        """Return a row of answers with drafts of forced tokens, beside the same without."""
        row = StructuredRow(kind)
        undrafted = StructuredRow(kind)
        for _ in range(self._plan.repeat):
            timing = self._answer(row, schemas)
            assert timing is not None
            row.decode_tps.append(decode_tps(timing))
            self._advance()
            plain = self._answer(undrafted, schemas, speculative=_PLAIN_STREAMS)
            assert plain is not None
            row.plain_decode_tps.append(decode_tps(plain))
            self._advance()
        return row

    def _of_peer(
        self, kind: str, schemas: Sequence[dict[str, Any]], peer: LlamaServer
    ) -> StructuredRow:
        """Return a row of another server's answers, beside as many plain tokens of each."""
        row = StructuredRow(kind)
        prompts = [
            self._session.tokenizer.decode(
                self._session.token_ids(self._request(schema)), skip_special_tokens=False
            )
            for schema in schemas
        ]
        for _ in range(self._plan.repeat):
            answers = peer.answers(
                [
                    LlamaQuestion(prompt, self._plan.max_tokens, schema)
                    for prompt, schema in zip(prompts, schemas, strict=True)
                ]
            )
            row.schemas += len(answers)
            for answer, schema in zip(answers, schemas, strict=True):
                row.finished += answer.is_finished
                row.valid += answer.is_finished and self._validity.is_valid(answer.text, schema)
            row.decode_tps.append(sum(answer.decode_tps for answer in answers))
            self._advance()
            plain = peer.answers(
                [
                    LlamaQuestion(prompt, answer.num_tokens)
                    for prompt, answer in zip(prompts, answers, strict=True)
                ]
            )
            row.plain_decode_tps.append(sum(answer.decode_tps for answer in plain))
            self._advance()
        return row

    # -- runs --------------------------------------------------------------------------------

    def _params(self, schema: dict[str, Any], **settings: Any) -> SamplingParams:
        asked = {"temperature": 0.0, "max_tokens": self._plan.max_tokens, **settings}
        constraint = StructuredOutputs(json=schema, disable_any_whitespace=True)
        return SamplingParams(structured_outputs=constraint, detokenize=False, **asked)

    def _answer(
        self,
        row: StructuredRow,
        schemas: Sequence[dict[str, Any]],
        *,
        is_timed: bool = True,
        **settings: Any,
    ) -> RunTiming | None:
        """Answer under schemas, all at once, and count in ``row``; None if all are refused."""
        masks: dict[int, PreparedMask] = {}
        for index, schema in enumerate(schemas):
            begin = time.perf_counter()
            try:
                mask = self._session.prepare_mask(self._params(schema, **settings)).mask
            except ConstraintError:
                row.refused += 1
                continue
            row.compile_seconds.append(time.perf_counter() - begin)
            assert mask is not None
            masks[index] = PreparedMask(TimedMask(mask, row.mask_seconds) if is_timed else mask)
        row.schemas += len(schemas)
        if not masks:
            return None
        requests = [self._request(schemas[index], name=str(index)) for index in masks]

        def ask(request: WorkloadRequest) -> SamplingParams:
            index = int(request.request_id)
            return self._params(schemas[index], seed=index, **settings)

        timing = self._session.run(
            requests,
            cache_salt=self._salt(),
            ask=ask,
            mask_of=lambda request: masks[int(request.request_id)],
        )
        for index, token_ids in zip(masks, timing.output_token_ids, strict=True):
            if token_ids and token_ids[-1] in self._session.stop_token_ids:
                row.finished += 1
                text = self._session.tokenizer.decode(token_ids[:-1])
                row.valid += self._validity.is_valid(text, schemas[index])
        return timing

    def _plain(self, schemas: Sequence[dict[str, Any]], lengths: Sequence[int]) -> RunTiming:
        """Decode as many tokens without a schema."""
        requests = [
            self._request(schema, length) for schema, length in zip(schemas, lengths, strict=True)
        ]
        return self._session.run(
            requests,
            cache_salt=self._salt(),
            ask=lambda request: SamplingParams(
                temperature=0.0,
                max_tokens=request.output_len,
                ignore_eos=True,
                detokenize=False,
                speculative=_PLAIN_STREAMS,
            ),
        )

    def _request(
        self, schema: dict[str, Any], length: int | None = None, name: str = ""
    ) -> WorkloadRequest:
        text = prompt_of(schema)
        if self._session.tokenizer.chat_template is not None:
            messages = ({"role": "user", "content": text},)
            return WorkloadRequest(name, messages=messages, output_len=length)
        return WorkloadRequest(name, prompt=text + "\n\n", output_len=length)

    def _salt(self) -> str:
        """Return a salt, so that no turn finds the prefixes of another."""
        self._count += 1
        return f"structured-{self._count}"


def decode_tps(timing: RunTiming) -> float:
    """Return the tokens a second of the steps after the last prompt's."""
    last = max(
        (index for index, step in enumerate(timing.steps) if not step.is_pure_decode), default=-1
    )
    steps = timing.steps[last + 1 :]
    seconds = sum(step.wall_s for step in steps)
    return sum(step.num_new_tokens for step in steps) / seconds if seconds else 0.0
