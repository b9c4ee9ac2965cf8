"""Checks answers to many varied schemas: all that are finished are valid, and all that are cut can
be finished.

Answers are those of the whole engine, in full batches, with random logits and with the model's.
Prompts are short, and do not have the schema: what keeps an answer to it is its mask alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConstraintError
from octavo.bench.structured.completion import completed
from octavo.bench.structured.validity import Validity
from octavo.bench.structured.varied_schemas import varied_schema
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import ConstraintStats
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import compile_source
from octavo.grammars.grammar_mask import GrammarMask
from octavo.grammars.sources import source_of
from octavo.grammars.vocabulary import byte_vocabulary
from octavo.serving.text_engine import PreparedMask
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession

# So high that the model hardly matters: nearly every allowed token is as likely as any other.
RANDOM_TEMPERATURE = 100.0
_PROMPT = "An example in JSON:\n"
_AT_ONCE = 128  # schemas; each has a mask
_MAX_SHOWN = 20
_KEYWORD = re.compile(r"'([$\w]+)' at #|format '([^']+)'")


@dataclass(slots=True)
class ValidityRow:
    """Counts of answers of a kind. ``refused``: schemas by the keyword that is not supported."""

    kind: str
    schemas: int = 0
    finished: int = 0
    valid: int = 0
    cut: int = 0
    completed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return self.valid == self.finished and self.completed == self.cut

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "schemas": self.schemas,
            "finished": self.finished,
            "valid": self.valid,
            "cut": self.cut,
            "completed": self.completed,
            "refused": dict(self.refused.most_common()),
            "failures": self.failures[:_MAX_SHOWN],
        }


class ValidityStudy:
    """The checks of one engine.

    Args:
        numbers: of the schemas.
        advance: called ``num_turns`` times.
    """

    def __init__(
        self,
        session: OfflineSession,
        numbers: range,
        max_tokens: int,
        advance: Callable[[], object] = lambda: None,
    ):
        self._session, self._numbers, self._max_tokens = session, numbers, max_tokens
        self._advance = advance
        self._validity = Validity()
        self._bytes = byte_vocabulary()

    @staticmethod
    def num_turns(num_schemas: int) -> int:
        """Return how often ``advance`` is called."""
        return 2 * -(-num_schemas // _AT_ONCE)

    def measure(self) -> list[ValidityRow]:
        return [
            self._row("random logits", RANDOM_TEMPERATURE),
            self._row("model", 0.0),
        ]

    def _row(self, kind: str, temperature: float) -> ValidityRow:
        row = ValidityRow(kind)
        for begin in range(0, len(self._numbers), _AT_ONCE):
            self._answer(row, self._numbers[begin : begin + _AT_ONCE], temperature)
            self._advance()
        return row

    def _answer(self, row: ValidityRow, numbers: Sequence[int], temperature: float) -> None:
        """Answer under schemas, all at once, and count in ``row``."""
        masks: dict[int, PreparedMask] = {}
        for number in numbers:
            try:
                masks[number] = self._session.prepare_mask(self._params(number, temperature))
            except ConstraintError as error:
                found = _KEYWORD.search(str(error))
                row.refused[(found[1] or found[2]) if found else error.reason] += 1
        row.schemas += len(numbers)
        if not masks:
            return
        timing = self._session.run(
            [WorkloadRequest(str(number), prompt=_PROMPT) for number in masks],
            ask=lambda request: self._params(int(request.request_id), temperature),
            mask_of=lambda request: masks[int(request.request_id)],
        )
        for number, token_ids in zip(masks, timing.output_token_ids, strict=True):
            self._check(row, number, token_ids)

    def _check(self, row: ValidityRow, number: int, token_ids: list[int]) -> None:
        schema = varied_schema(number)
        is_finished = bool(token_ids) and token_ids[-1] in self._session.stop_token_ids
        whole: bytes | None = self._text(token_ids[:-1] if is_finished else token_ids)
        if not is_finished:
            row.cut += 1
            whole = self._completed(schema, self._text(token_ids), number)
        is_valid = whole is not None and self._validity.is_valid(whole, schema)
        row.finished += is_finished
        row.valid += is_finished and is_valid
        row.completed += is_valid and not is_finished
        if not is_valid:
            text = self._text(token_ids) if whole is None else whole
            shown = text.decode(errors="replace")
            row.failures.append({"number": number, "schema": json.dumps(schema), "text": shown})

    def _text(self, token_ids: list[int]) -> bytes:
        return b"".join(map(self._session.tokenizer.token_bytes, token_ids))

    def _completed(self, schema: dict[str, Any], text: bytes, number: int) -> bytes | None:
        """Return a text that was cut with an end; None if it has none.

        It is followed byte by byte, and not by the tokens that it was made of.
        """
        mask = self._byte_mask(schema)
        if mask.num_allowed(list(text)) < len(text):
            return None
        mask.advance(list(text))
        words = re.findall(rb"[\w.]+", json.dumps(schema).encode())
        text_of = self._bytes.texts.__getitem__
        rest = completed(mask, text_of, self._bytes.stop_token_ids, words, seed=number)
        return None if rest is None else text + rest

    def _byte_mask(self, schema: dict[str, Any]) -> GrammarMask:
        asked, vocabulary = StructuredOutputs(json=schema), self._bytes
        source = source_of(asked, vocabulary.special_ids, vocabulary.stop_token_ids)
        start = compile_source(source, asked, vocabulary)
        return GrammarMask(start, vocabulary.vocab_size, ConstraintStats())

    def _params(self, number: int, temperature: float) -> SamplingParams:
        return SamplingParams(
            structured_outputs=StructuredOutputs(json=varied_schema(number)),
            temperature=temperature,
            max_tokens=self._max_tokens,
            seed=number,
            detokenize=False,
        )
