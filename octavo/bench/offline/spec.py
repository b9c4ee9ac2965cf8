"""Measures a method of speculative decoding beside plain decoding of the same requests.

Both alternate in one engine: requests that turn drafting off are decoded plainly, and the drafter
takes no part in them. Cache salts keep prefixes and remembered answers of the turns apart. The
steps after the last prompt's are timed.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.base.errors import BenchmarkError, ConfigError
from octavo.bench.spec_prompts import PROMPTS
from octavo.core.sampling_params import SamplingParams, SpeculativeParams
from octavo.core.stats import DraftStats
from octavo.measure.statistics import MedianRange
from octavo.speculation.analysis import break_even_batch
from octavo.workload.datasets import random_requests, read_jsonl
from octavo.workload.requests import WorkloadRequest
from octavo.workload.rows import WorkloadFileError

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession

RANDOM = "random"
WORKLOADS = (*PROMPTS, RANDOM)
_RANDOM_PROMPTS, _RANDOM_LENGTH = 8, 128
# Greedy tokens after random ones soon repeat, which is easy to draft.
_RANDOM_TEMPERATURE = 1.0
MOST_BATCH = 256  # the largest batch that is considered for the break-even


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """The measurements to make.

    ``workloads``: names out of ``WORKLOADS``, or files of JSON lines. ``temperature``: None is
    greedy, but 1 for random text.
    """

    workloads: tuple[str, ...]
    batch_sizes: tuple[int, ...] = (1,)
    max_tokens: int = 128
    repeat: int = 3
    temperature: float | None = None
    seed: int = 0

    @property
    def num_turns(self) -> int:
        """Number of turns of each method, one workload at one batch size each."""
        return len(self.workloads) * len(self.batch_sizes) * self.repeat


@dataclass(slots=True)
class Decoded:
    """Answered requests. ``seconds``, ``num_tokens``: sums over the timed steps."""

    seconds: float = 0.0
    num_tokens: int = 0
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def tps(self) -> float:
        return self.num_tokens / self.seconds

    def add(self, other: Decoded) -> None:
        self.seconds += other.seconds
        self.num_tokens += other.num_tokens
        self.token_ids += other.token_ids


@dataclass(frozen=True, slots=True)
class MeasuredStepTimes:
    """Median seconds of plain steps by their rows; draft tokens are rows like any other."""

    seconds_of: Mapping[int, float]

    def __call__(self, batch: int, rows: float) -> float:
        """Interpolate linearly between measured rows, and extrapolate from the last two."""
        known = sorted(self.seconds_of)
        if len(known) == 1:
            return self.seconds_of[known[0]]
        wanted = batch * rows
        place = min(max(1, bisect.bisect_left(known, wanted)), len(known) - 1)
        low, high = known[place - 1], known[place]
        first, last = self.seconds_of[low], self.seconds_of[high]
        slope = max(0.0, (last - first) / (high - low))  # noise makes no further row a gain
        return first + slope * (wanted - low)


@dataclass(frozen=True, slots=True)
class SpecRow:
    """The result of a method on a workload at a batch size.

    ``turns``: pairs of plain and speculative decoding. ``drafts``, ``draft_seconds``: sums over all
    turns.
    """

    method: str
    workload: str
    batch_size: int
    num_requests: int
    turns: tuple[tuple[Decoded, Decoded], ...]
    drafts: DraftStats
    draft_seconds: float
    step_times: MeasuredStepTimes

    @property
    def base_decode_tps(self) -> MedianRange:
        return MedianRange.of([plain.tps for plain, _ in self.turns])

    @property
    def decode_tps(self) -> MedianRange:
        return MedianRange.of([drafted.tps for _, drafted in self.turns])

    @property
    def speedup(self) -> MedianRange:
        return MedianRange.of([drafted.tps / plain.tps for plain, drafted in self.turns])

    @property
    def same_tokens(self) -> bool:
        return all(plain.token_ids == drafted.token_ids for plain, drafted in self.turns)

    @property
    def accepted_by_position(self) -> list[float]:
        """Shares of all drafts that were accepted up to each position."""
        drafts = self.drafts
        return [count / drafts.num_drafts for count in drafts.accepted_by_position]

    @property
    def break_even_batch(self) -> int | None:
        """The least batch at which such drafts, if all requests had them in every step, would take
        as long as plain decoding; None without drafts, or if there is none up to 256."""
        drafts = self.drafts
        if drafts.mean_accepted_length is None:
            return None
        length = max(1, round(drafts.num_tokens / drafts.num_drafts))
        a_token = self.draft_seconds / drafts.num_tokens
        return break_even_batch(
            drafts.mean_accepted_length,
            length,
            self.step_times,
            lambda batch: a_token * batch,
            MOST_BATCH,
        )

    def as_json(self) -> dict[str, Any]:
        drafted_s = sum(drafted.seconds for _, drafted in self.turns)
        return {
            "method": self.method,
            "workload": self.workload,
            "batch_size": self.batch_size,
            "requests": self.num_requests,
            "decode_tps": self.decode_tps.median,
            "base_decode_tps": self.base_decode_tps.median,
            "speedup": self.speedup.median,
            "speedup_min": self.speedup.min,
            "speedup_max": self.speedup.max,
            "mean_accepted_length": self.drafts.mean_accepted_length,
            "acceptance_rate": self.drafts.acceptance_rate,
            "accepted_by_position": self.accepted_by_position,
            "drafts": self.drafts.num_drafts,
            "drafted": self.drafts.num_tokens,
            "accepted": self.drafts.num_accepted,
            "draft_share": self.draft_seconds / drafted_s,
            "break_even_batch": self.break_even_batch,
            "same_tokens": self.same_tokens,
        }


# -- requests -------------------------------------------------------------------------------------


def check_workload(name: str) -> str:
    """Return the name. ConfigError if it is neither a workload nor a file of requests."""
    if name not in WORKLOADS:
        try:
            read_jsonl(name)
        except WorkloadFileError as error:
            known = ", ".join(WORKLOADS)
            raise ConfigError(f"none of {known}, and no file of requests: {error}") from error
    return name


def requests_of(
    session: OfflineSession, workload: str, num: int | None = None
) -> list[WorkloadRequest]:
    """The requests of a workload: all of them, or ``num``.

    If that is more than the workload has, prompts are repeated with a note that makes their text
    differ, so that no answer or prefix of another request is found. A model without a chat template
    gets the text as it is.
    """
    if workload == RANDOM:
        count = _RANDOM_PROMPTS if num is None else num
        avoid = session.tokenizer.stop_token_ids
        return random_requests(count, session.vocab_size, _RANDOM_LENGTH, 1, avoid=avoid)
    if workload not in PROMPTS:
        found = read_jsonl(workload, session.tokenizer)
        if num is not None and num > len(found):
            raise ConfigError(f"{workload} has {len(found)} requests, and a batch takes {num}")
        return found[:num]
    prompts = PROMPTS[workload]
    texts = [
        prompts[index % len(prompts)] + _again(index // len(prompts))
        for index in range(len(prompts) if num is None else num)
    ]
    is_chat = session.tokenizer.chat_template is not None
    return [
        WorkloadRequest(str(index), messages=({"role": "user", "content": text},))
        if is_chat
        else WorkloadRequest(str(index), prompt=text + "\n\n")
        for index, text in enumerate(texts)
    ]


def _again(times: int) -> str:
    return f"\n\n(This is request number {times + 1} about it.)" if times else ""


def batches_of(
    session: OfflineSession, workload: str, batch_size: int
) -> list[list[WorkloadRequest]]:
    """The requests of a workload in full batches."""
    requests = requests_of(session, workload)
    if len(requests) < batch_size:
        requests = requests_of(session, workload, batch_size)
    starts = range(0, len(requests) - batch_size + 1, batch_size)
    return [requests[start : start + batch_size] for start in starts]


# -- measuring ------------------------------------------------------------------------------------


class SpecStudy:
    """Measures the method of a session."""

    def __init__(self, session: OfflineSession, method: str, plan: SpecPlan):
        if max(plan.batch_sizes) > session.info["max_num_seqs"]:
            raise ConfigError(
                f"a batch of {max(plan.batch_sizes)} needs max_num_seqs of as many, and it is "
                f"{session.info['max_num_seqs']}: raise it, or leave it out"
            )
        self.session = session
        self.method = method
        self.plan = plan
        self.step_times = measure_steps(session)
        self._count = 0

    def measure(
        self, workload: str, batch_size: int, advance: Callable[[], None] = lambda: None
    ) -> SpecRow:
        """Measure a workload at a batch size. ``advance`` is called after each turn.

        Raises:
            BenchmarkError: a request failed, or nothing was decoded. RequestError: one cannot be
                served.
        """
        batches = batches_of(self.session, workload, batch_size)
        for drafted in (False, True):
            self._decode(batches[0], workload, drafted)  # a warm-up
        drafts, before, turns = DraftStats(), self.session.draft_seconds, []
        for number in range(self.plan.repeat):
            turns.append(self._turn(batches, workload, number, drafts))
            advance()
        seconds = self.session.draft_seconds - before
        return SpecRow(
            self.method,
            workload,
            batch_size,
            sum(map(len, batches)),
            tuple(turns),
            drafts,
            seconds,
            self.step_times,
        )

    def _turn(
        self,
        batches: Sequence[Sequence[WorkloadRequest]],
        workload: str,
        number: int,
        drafts: DraftStats,
    ) -> tuple[Decoded, Decoded]:
        """Decode all batches, each plainly and with drafts, in alternating order."""
        both = {False: Decoded(), True: Decoded()}
        for index, batch in enumerate(batches):
            first = (number + index) % 2 == 1
            for drafted in (first, not first):
                both[drafted].add(self._decode(batch, workload, drafted, drafts))
        if not all(each.num_tokens and each.seconds for each in both.values()):
            raise BenchmarkError(
                f"{workload}: the answers ended with their first tokens; nothing was decoded"
            )
        return both[False], both[True]

    def _decode(
        self,
        batch: Sequence[WorkloadRequest],
        workload: str,
        drafted: bool,
        drafts: DraftStats | None = None,
    ) -> Decoded:
        self._count += 1
        timing = self.session.run(
            batch,
            cache_salt=f"spec-{self._count}",
            ask=lambda request: self._params(request, workload, drafted),
        )
        if drafts is not None:
            for stats in timing.requests:
                drafts.add(stats.drafts)
        prompts = [i for i, step in enumerate(timing.steps) if not step.is_pure_decode]
        steps = timing.steps[prompts[-1] + 1 if prompts else 0 :]
        return Decoded(
            sum(step.wall_s for step in steps),
            sum(step.num_new_tokens for step in steps),
            timing.output_token_ids,
        )

    def _params(self, request: WorkloadRequest, workload: str, drafted: bool) -> SamplingParams:
        temperature = self.plan.temperature
        if temperature is None:
            temperature = _RANDOM_TEMPERATURE if workload == RANDOM else 0.0
        params = _params(temperature, drafted, self.plan.max_tokens)
        seed = self.plan.seed + int(request.request_id)
        return params.with_changes(seed=seed, ignore_eos=workload == RANDOM)


def _params(temperature: float, drafted: bool, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        speculative=SpeculativeParams(enabled=drafted),
    )


def measure_steps(session: OfflineSession) -> MeasuredStepTimes:
    """Time plain steps of 1, 2, 4, … 32 requests with short contexts."""
    found: dict[int, float] = {}
    for rows in (1, 2, 4, 8, 16, 32):
        if rows > session.info["max_num_seqs"]:
            break
        requests = random_requests(rows, session.vocab_size, 8, 8, seed=rows)
        timing = session.run(
            requests, ask=lambda request: _params(0, False, 16), cache_salt=f"steps-{rows}"
        )
        seconds = [
            step.wall_s / step.num_multi_steps
            for step in timing.steps
            if step.is_pure_decode and step.num_seqs == rows
        ]
        if seconds:
            found[rows] = statistics.median(seconds)
    return MeasuredStepTimes(found)
