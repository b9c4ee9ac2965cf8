"""Trains a draft head from a model's answers to prompts, and their hidden states.

Each part has a share of the time, and keeps its results beside OUT (``work_folder.py`` of
``quantize``): answers and hidden states in pieces, the head in training every few steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.base.files import NewFolder, sha256_of
from octavo.draft_training.evaluation import acceptance, expected_tokens, ranks
from octavo.draft_training.examples import Examples, TargetWeights, TrainingSequences
from octavo.draft_training.head_kinds import KINDS, DraftHeadKind, described
from octavo.draft_training.model_answers import (
    ModelAnswer,
    OpenAnswering,
    TrainingPrompt,
    answer_prompts,
    batches,
    training_prompts,
)
from octavo.draft_training.sequence_states import HiddenStates, SequenceHiddenStates
from octavo.draft_training.shortlist import coverage, shortlist
from octavo.draft_training.stateless_heads import TrainableHead
from octavo.draft_training.training_loop import Schedule, Training, TrainStepReport
from octavo.draft_training.training_state import restore, snapshot
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import EMBEDDING, HEAD, ModelConfig
from octavo.models.loader import load_checkpoint
from octavo.models.parameters import Parameters
from octavo.models.safetensors_writer import write_safetensors
from octavo.quantize.calibration_files import read_documents
from octavo.quantize.work_folder import WorkFolder
from octavo.runtime.capacity import RankSpec
from octavo.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, how much of it is done, and how much there is."""

# Shares of the time to answer and to compute hidden states; training has the rest.
_ANSWERING, _RECORDING = 0.2, 0.3
_PART = 32  # prompts that are answered, and kept, together
_HELD_OUT_EVERY = 12
_MEASURED_STEPS = 8  # steps that are timed to find how many fit into the time
_KEEP_EVERY = 50  # steps
_EVALUATED_POSITIONS = 4096
_FORMAT = 2  # raised with the files of the work folder, and when the same settings give other heads


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The settings of a training.

    Args:
        kind: the kind of heads, one of ``KINDS``.
        minutes: about how long all of it may take.
        data: a file of texts or conversations, see ``model_answers.training_prompts``; None for the
            built-in prompts.
        tokens: the most tokens of all answers.
        answer_tokens: the most tokens of one answer.
        shortlist: number of tokens that a head can draft.
        steps: training steps; None is what fits into the time.
        batch_size: positions of a training step.
        seed: draws prompts, answers, the initial head, and the order of training.

    Raises:
        ConfigError: names the field that is wrong.
    """

    kind: str = "recurrent"
    minutes: float = 30.0
    data: Path | None = None
    tokens: int = 200_000
    answer_tokens: int = 256
    shortlist: int = 8192
    steps: int | None = None
    batch_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 0 < self.minutes < math.inf:
            raise ConfigError(f"minutes must be a number above 0, not {self.minutes}")
        for name in ("tokens", "answer_tokens", "shortlist", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be 1 or more, not {self.steps}")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Trained heads on disk, with their figures on held-out answers.

    ``acceptance``: the acceptance probability of each draft token of a chain, given those before
    it. ``coverage``: the share of the answers' tokens that are in the shortlist.
    """

    out: Path
    kind: str
    acceptance: list[float]
    coverage: float
    num_parameters: int
    num_tokens: int
    num_steps: int
    elapsed_s: float

    def as_json(self) -> dict[str, Any]:
        expected = [expected_tokens(self.acceptance, k + 1) for k in range(len(self.acceptance))]
        return {**asdict(self), "out": str(self.out), "expected_tokens": expected}


def train_draft(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    open_answering: OpenAnswering,
    out: Path,
    request: TrainRequest,
    progress: Progress = lambda what, done, total: None,
) -> TrainResult:
    """Train heads for a model, and write them to ``out``, completely or not at all.

    An interrupted run is continued by the next one with the same settings.

    Raises:
        ConfigError: ``out`` exists or cannot be written, the data cannot be read, or there are too
            few answers. ModelError: the model cannot be read or run.
    """
    begin = time.perf_counter()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already: give another name, or remove it")
    work = WorkFolder(out, checkpoint, _about(request))
    job = _TrainingJob(checkpoint, tokenizer, request, work, progress)
    try:
        job.answer(open_answering)
        job.record_states()
        training = job.train()
        made = job.write(training, out, begin)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    job.work.remove()
    return made


def _about(request: TrainRequest) -> dict[str, Any]:
    """All that a head depends on, beside the model."""
    settings = asdict(request)
    if request.data is not None and request.data.is_file():
        settings["data"] = sha256_of(request.data)
    return {"format": _FORMAT, "settings": settings}


class _TrainingJob:
    """The parts of a training, in their order. ``work`` keeps their results."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        request: TrainRequest,
        work: WorkFolder,
        progress: Progress,
    ):
        self.work = work
        self._checkpoint, self._tokenizer, self._request = checkpoint, tokenizer, request
        self._progress = progress
        self._kind: DraftHeadKind = KINDS[request.kind]()
        self._config: ModelConfig = checkpoint.config()
        self._seconds = request.minutes * 60

    def answer(self, open_answering: OpenAnswering) -> None:
        """Have the model answer prompts until there are enough tokens, or the time is over."""
        if "answered" in self.work:
            return
        prompts = self._prompts()
        done = self._num_kept("answers")
        count = sum(len(each.answer_ids) for each in self._answers())
        end = time.perf_counter() + self._seconds * _ANSWERING
        with open_answering() as answer:
            for number, part in enumerate(batches(prompts, _PART)):
                if number < done:
                    continue
                answers = answer_prompts(answer, part)
                self.work.keep(f"answers-{number}", _packed(answers))
                count += sum(len(each.answer_ids) for each in answers)
                self._progress(
                    "answering, tokens", min(count, self._request.tokens), self._request.tokens
                )
                if count >= self._request.tokens or time.perf_counter() > end:
                    break
        self.work.keep("answered", {})

    def _prompts(self) -> list[TrainingPrompt]:
        request = self._request
        # Answers may be short, so there are more prompts than full-length answers would need.
        count = max(4 * _HELD_OUT_EVERY, 4 * request.tokens // request.answer_tokens)
        return training_prompts(self._tokenizer, request.data, count, request.seed)

    def record_states(self) -> None:
        """Compute and keep the hidden states of the answers, as many as there is time for."""
        if "looked" in self.work:
            return
        total = self._num_kept("answers")
        longest = max((len(ids) for ids in self._sequences(range(total))), default=1)
        spec = RankSpec(self._checkpoint.path)
        depths = self._kind.depths(self._config)
        states = HiddenStates(spec, self._model(), self._config, longest, depths)
        size = self._config.hidden_size
        none = SequenceHiddenStates(
            *(np.empty((0, n * size), dtype=np.float32) for n in (1, len(depths)))
        )
        end = time.perf_counter() + self._seconds * _RECORDING
        for number in range(self._num_kept("hidden"), total):
            seen = states.of(self._sequences(range(number, number + 1)))
            self.work.keep(f"hidden-{number}", _as_bfloat16([none, *seen]))
            self._progress("computing hidden states", number + 1, total)
            if time.perf_counter() > end:
                break
        states.close()
        self.work.keep("looked", {})

    def train(self) -> Training:
        """Train the head, from where an interrupted run has left it."""
        examples = self._examples(held_out=False)
        training = Training(self._new_head(examples), examples, self._schedule(examples))
        if "head" in self.work:
            restore(training, self.work.load("head"))
        while training.step < training.schedule.steps:
            training.run(training.step + _KEEP_EVERY, self._on_step)
            self.work.keep("head", snapshot(training))
        return training

    def _new_head(self, examples: Examples[Any]) -> TrainableHead[Any]:
        return self._kind.create(self._config, examples.target, self._request.seed)

    def _on_step(self, report: TrainStepReport) -> None:
        self._progress(f"training, loss {report.loss:.2f}", report.step, report.of)

    def write(self, training: Training, out: Path, begin: float) -> TrainResult:
        examples = self._examples(held_out=True)
        places = ranks(training.head, examples, _evaluated_units(examples))
        target = examples.target
        with NewFolder(out) as new:
            config = described(self._kind, self._config, target, places)
            text = json.dumps(config, indent=2) + "\n"
            (new.folder / "config.json").write_text(text, encoding="utf-8")
            write_safetensors(new.folder, self._kind.tensors(training.head, target))
            new.publish()
        answers = [each.answer_ids for each in self._held(True)]
        return TrainResult(
            out,
            self._request.kind,
            acceptance(places),
            coverage(target.shortlist.numpy(), np.concatenate(answers)),
            sum(parameter.numel() for parameter in training.head.parameters()),
            sum(len(each.answer_ids) for each in self._answers()),
            training.step,
            time.perf_counter() - begin,
        )

    # -- intermediate results ----------------------------------------------------------------

    def _num_kept(self, what: str) -> int:
        """Number of pieces of a kind that are kept, from the first without a gap."""
        number = 0
        while f"{what}-{number}" in self.work:
            number += 1
        return number

    def _answers(self, what: str = "answers") -> list[ModelAnswer]:
        """The answers of all pieces that also have ``what``."""
        pieces = range(self._num_kept(what))
        return [
            each for number in pieces for each in _unpacked(self.work.load(f"answers-{number}"))
        ]

    def _sequences(self, pieces: range) -> list[list[int]]:
        answers = (each for n in pieces for each in _unpacked(self.work.load(f"answers-{n}")))
        return [[*each.prompt_ids, *each.answer_ids] for each in answers]

    def _held(self, held_out: bool) -> list[ModelAnswer]:
        return [
            each for n, each in enumerate(self._answers("hidden")) if _is_held_out(n) == held_out
        ]

    def _examples(self, *, held_out: bool) -> Examples[Any]:
        """Training examples of the answers that are held out, or of the others."""
        answers = self._answers("hidden")
        if not any(_is_held_out(number) for number in range(len(answers))):
            raise ConfigError(
                f"{len(answers)} answers are too few to train on: give more minutes or tokens"
            )
        sequences = sequences_of(answers, self._seen("hidden"), self._seen("streams"), held_out)
        if not len(sequences.starts(self._kind.steps)):
            raise ConfigError("the answers are too short to train on: give prompts of longer ones")
        return self._kind.examples(self._target(), sequences)

    def _seen(self, what: str) -> Tensor:
        """The kept states of all tokens, bfloat16 [T, ...]."""
        pieces = (self.work.load(f"hidden-{n}")[what] for n in range(self._num_kept("hidden")))
        return torch.cat([torch.from_numpy(piece) for piece in pieces]).view(torch.bfloat16)

    def _target(self) -> TargetWeights:
        own = [token for each in self._held(False) for token in each.answer_ids]
        prompts = (token for each in self._held(False) for token in each.prompt_ids)
        other = [*prompts, *self._built_in_text()]
        listed = shortlist(own, other, self._request.shortlist, self._config.vocab_size)
        parameters = Parameters(self._checkpoint)
        embedding = torch.from_numpy(parameters.rows(EMBEDDING))
        head = torch.from_numpy(parameters.rows(HEAD)) if HEAD in parameters.names else embedding
        ids = torch.from_numpy(listed)
        norm = self._model().model.norm.weight.value
        return TargetWeights(
            embedding.to(torch.bfloat16), ids, head[ids].contiguous(), torch.from_numpy(norm)
        )

    def _model(self) -> Any:
        return load_checkpoint(self._checkpoint, self._config)

    def _built_in_text(self) -> list[int]:
        texts = [text for text in read_documents(None) if isinstance(text, str)]
        return [token for text in texts for token in self._tokenizer.encode(text)]

    def _schedule(self, examples: Examples[Any]) -> Schedule:
        """The schedule of the run, which an interrupted run has kept."""
        if "schedule" not in self.work:
            steps = self._request.steps or self._steps_in_time(examples)
            self.work.keep("schedule", {"steps": np.array(steps)})
        steps = int(self.work.load("schedule")["steps"])
        return Schedule(steps, self._request.batch_size, seed=self._request.seed)

    def _steps_in_time(self, examples: Examples[Any]) -> int:
        """Number of steps that fit into the remaining time, by timing a few that are discarded."""
        schedule = Schedule(_MEASURED_STEPS + 1, self._request.batch_size)
        trial = Training(self._new_head(examples), examples, schedule)
        trial.run(1)  # warm-up: the first step allocates memory
        begin = time.perf_counter()
        trial.run(_MEASURED_STEPS + 1)
        of_one = (time.perf_counter() - begin) / _MEASURED_STEPS
        return max(1, int(self._seconds * (1 - _ANSWERING - _RECORDING) / of_one))


def sequences_of(
    answers: list[ModelAnswer], hidden: Tensor, streams: Tensor, held_out: bool
) -> TrainingSequences:
    """The sequences of the answers that are held out, or of the others.

    ``hidden``, ``streams``: the states of all answers, concatenated, bfloat16 [T, ...].
    """
    lengths = torch.tensor([len(each.prompt_ids) + len(each.answer_ids) for each in answers])
    is_chosen = torch.tensor([_is_held_out(number) == held_out for number in range(len(answers))])
    rows = is_chosen.repeat_interleave(lengths)
    chosen = [each for number, each in enumerate(answers) if is_chosen[number]]
    counts = lengths[is_chosen]
    return TrainingSequences(
        torch.tensor([token for each in chosen for token in (*each.prompt_ids, *each.answer_ids)]),
        hidden[rows],
        streams[rows],
        counts.cumsum(0).repeat_interleave(counts),
        torch.cat(
            [
                torch.arange(int(count)) >= len(each.prompt_ids)
                for each, count in zip(chosen, counts, strict=True)
            ]
        ),
    )


def _is_held_out(number: int) -> bool:
    return number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1


def _evaluated_units(examples: Examples[Any]) -> Tensor:
    """Units to evaluate: evenly spaced ones of at most ``_EVALUATED_POSITIONS`` positions."""
    most = max(1, _EVALUATED_POSITIONS // examples.unit_size)
    return examples.units[:: max(1, -(-len(examples.units) // most))]


def _as_bfloat16(seen: Iterable[SequenceHiddenStates]) -> dict[str, np.ndarray]:
    """The states of some sequences, concatenated, as bfloat16 in int16 arrays."""
    hidden, streams = zip(*seen, strict=True)
    arrays = {"hidden": np.concatenate(hidden), "streams": np.concatenate(streams)}
    return {
        name: torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy()
        for name, array in arrays.items()
    }


def _packed(answers: list[ModelAnswer]) -> dict[str, np.ndarray]:
    lengths = [(len(each.prompt_ids), len(each.answer_ids)) for each in answers]
    token_ids = [token for each in answers for token in (*each.prompt_ids, *each.answer_ids)]
    return {
        "lengths": np.array(lengths, dtype=np.int32).reshape(-1, 2),
        "token_ids": np.array(token_ids, dtype=np.int32),
    }


def _unpacked(arrays: dict[str, np.ndarray]) -> Iterator[ModelAnswer]:
    token_ids, start = arrays["token_ids"].tolist(), 0
    for prompt, answer in arrays["lengths"].tolist():
        end = start + prompt
        yield ModelAnswer(token_ids[start:end], token_ids[end : end + answer])
        start = end + answer
