"""From a model to a folder of heads: it answers, is looked at, and its heads are trained.

Each part takes a share of the time, and leaves what it has done beside OUT (``workfolder.py``):
answers and hidden states in pieces, the head on its way every now and then.
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
from octavo.draft_training.kinds import KINDS, Kind, described
from octavo.draft_training.loop import Schedule, Training, TrainStepReport
from octavo.draft_training.model_answers import (
    ModelAnswer,
    OpenTalk,
    TrainingPrompt,
    answered,
    asks,
    parts,
)
from octavo.draft_training.sequence_states import HiddenStates, Seen
from octavo.draft_training.shortlist import coverage, shortlist
from octavo.draft_training.state import restore, snapshot
from octavo.draft_training.stateless_heads import TrainableHead
from octavo.draft_training.work_folder import WorkFolder
from octavo.models.checkpoint import Checkpoint
from octavo.models.config import ModelConfig
from octavo.models.family import EMBEDDING, HEAD
from octavo.models.loader import load_checkpoint
from octavo.models.parameters import Parameters
from octavo.models.safetensors_writer import write_safetensors
from octavo.quantize.calibration_files import read_documents
from octavo.runtime.capacity import RankSpec
from octavo.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is, and how much there is."""

# Shares of the time; training has the rest.
_ANSWERING, _LOOKING = 0.2, 0.3
_PART = 32  # conversations that are answered, and kept, together
_HELD_OUT_EVERY = 12
_MEASURED_STEPS = 8  # that say how long a step takes
_KEEP_EVERY = 50  # steps
_JUDGED_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What is asked for.

    Args:
        kind: of heads, one of ``KINDS``.
        minutes: that all of it may take, about.
        data: a file with texts or conversations to ask of, see ``data.asks``; None: octavo's own.
        tokens: of answers, at most.
        answer_tokens: of one answer, at most.
        shortlist: tokens that a head may guess.
        steps: of training; None is what fits into the time.
        seed: draws questions, answers, the start of a head, and the order of training.

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
    """Heads on disk, and how good they are on answers that they were not trained on.

    ``acceptance``: how often each guess of a chain is right where those before it are.
    ``coverage``: which part of the answers' tokens is in the shortlist.
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
    open_talk: OpenTalk,
    out: Path,
    wanted: TrainRequest,
    progress: Progress = lambda what, done, total: None,
) -> TrainResult:
    """Train heads for a model into ``out``, which is there whole or not at all.

    A run that was ended is gone on from by the next one with the same settings.

    Raises:
        ConfigError: ``out`` is there already or cannot be written, the data cannot be read, there
            are too few answers. ModelError: the model cannot be read or run.
    """
    begin = time.perf_counter()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give another name, or remove it")
    job = _Job(checkpoint, tokenizer, wanted, WorkFolder(out, _about(checkpoint, wanted)), progress)
    try:
        job.answer(open_talk)
        job.look()
        training = job.train()
        made = job.write(training, out, begin)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    job.work.remove()
    return made


def _about(checkpoint: Checkpoint, wanted: TrainRequest) -> dict[str, Any]:
    """Everything that a head depends on. Files of the model count by size and time."""
    settings = asdict(wanted)
    if wanted.data is not None and wanted.data.is_file():
        settings["data"] = sha256_of(wanted.data)
    files = [path.stat() for path in checkpoint.files]
    return {
        "settings": settings,
        "source": str(checkpoint.path.resolve()),
        "files": [(stat.st_size, stat.st_mtime_ns) for stat in files],
    }


class _Job:
    """The parts of a run, in their order. ``work`` has what they leave for the next one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        wanted: TrainRequest,
        work: WorkFolder,
        progress: Progress,
    ):
        self.work = work
        self._checkpoint, self._tokenizer, self._wanted = checkpoint, tokenizer, wanted
        self._progress = progress
        self._kind: Kind = KINDS[wanted.kind]()
        self._config: ModelConfig = checkpoint.config()
        self._seconds = wanted.minutes * 60

    def answer(self, open_talk: OpenTalk) -> None:
        """Have the model answer until there are tokens enough, or the time for it is over."""
        if "answered" in self.work:
            return
        asked = self._asks()
        done = self._num_kept("answers")
        count = sum(len(each.answer_ids) for each in self._spoken())
        end = time.perf_counter() + self._seconds * _ANSWERING
        with open_talk() as talk:
            for number, part in enumerate(parts(asked, _PART)):
                if number < done:
                    continue
                spoken = answered(talk, part)
                self.work.keep(f"answers-{number}", _packed(spoken))
                count += sum(len(each.answer_ids) for each in spoken)
                self._progress(
                    "answering, tokens", min(count, self._wanted.tokens), self._wanted.tokens
                )
                if count >= self._wanted.tokens or time.perf_counter() > end:
                    break
        self.work.keep("answered", {})

    def _asks(self) -> list[TrainingPrompt]:
        wanted = self._wanted
        # An answer may be short; and there are as many prompts as anybody could want.
        count = max(4 * _HELD_OUT_EVERY, 4 * wanted.tokens // wanted.answer_tokens)
        return asks(self._tokenizer, wanted.data, count, wanted.seed)

    def look(self) -> None:
        """Keep the hidden states of the answers, as many as there is time for."""
        if "looked" in self.work:
            return
        total = self._num_kept("answers")
        longest = max((len(ids) for ids in self._sequences(range(total))), default=1)
        spec = RankSpec(self._checkpoint.path)
        depths = self._kind.depths(self._config)
        states = HiddenStates(spec, self._model(), self._config, longest, depths)
        size = self._config.hidden_size
        none = Seen(*(np.empty((0, n * size), dtype=np.float32) for n in (1, len(depths))))
        end = time.perf_counter() + self._seconds * _LOOKING
        for number in range(self._num_kept("hidden"), total):
            seen = states.of(self._sequences(range(number, number + 1)))
            self.work.keep(f"hidden-{number}", _halved([none, *seen]))
            self._progress("looking at answers", number + 1, total)
            if time.perf_counter() > end:
                break
        states.close()
        self.work.keep("looked", {})

    def train(self) -> Training:
        """Train the head, from where an ended run has left it."""
        examples = self._examples(held_out=False)
        training = Training(self._new_head(examples), examples, self._schedule(examples))
        if "head" in self.work:
            restore(training, self.work.load("head"))
        while training.step < training.schedule.steps:
            training.run(training.step + _KEEP_EVERY, self._on_step)
            self.work.keep("head", snapshot(training))
        return training

    def _new_head(self, examples: Examples[Any]) -> TrainableHead[Any]:
        return self._kind.create(self._config, examples.target, self._wanted.seed)

    def _on_step(self, report: TrainStepReport) -> None:
        self._progress(f"training, loss {report.loss:.2f}", report.step, report.of)

    def write(self, training: Training, out: Path, begin: float) -> TrainResult:
        examples = self._examples(held_out=True)
        places = ranks(training.head, examples, _judged(examples))
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
            self._wanted.kind,
            acceptance(places),
            coverage(target.shortlist.numpy(), np.concatenate(answers)),
            sum(parameter.numel() for parameter in training.head.parameters()),
            sum(len(each.answer_ids) for each in self._spoken()),
            training.step,
            time.perf_counter() - begin,
        )

    # -- what is kept ------------------------------------------------------------------------

    def _num_kept(self, what: str) -> int:
        """How many pieces there are, from the first without a gap."""
        number = 0
        while f"{what}-{number}" in self.work:
            number += 1
        return number

    def _spoken(self, what: str = "answers") -> list[ModelAnswer]:
        """The answers of all pieces of which there is ``what``, too."""
        pieces = range(self._num_kept(what))
        return [
            each for number in pieces for each in _unpacked(self.work.load(f"answers-{number}"))
        ]

    def _sequences(self, pieces: range) -> list[list[int]]:
        spoken = (each for n in pieces for each in _unpacked(self.work.load(f"answers-{n}")))
        return [[*each.prompt_ids, *each.answer_ids] for each in spoken]

    def _held(self, held_out: bool) -> list[ModelAnswer]:
        return [
            each for n, each in enumerate(self._spoken("hidden")) if _is_held_out(n) == held_out
        ]

    def _examples(self, *, held_out: bool) -> Examples[Any]:
        """Of the answers that are trained on, or of the others."""
        spoken = self._spoken("hidden")
        if not any(_is_held_out(number) for number in range(len(spoken))):
            raise ConfigError(
                f"{len(spoken)} answers are too few to learn from: give it more minutes or tokens"
            )
        sequences = sequences_of(spoken, self._seen("hidden"), self._seen("streams"), held_out)
        if not len(sequences.starts(self._kind.steps)):
            raise ConfigError("the answers are too short to learn from: ask for longer ones")
        return self._kind.examples(self._target(), sequences)

    def _seen(self, what: str) -> Tensor:
        """Of all tokens that were looked at, bfloat16 [T, ...]."""
        pieces = (self.work.load(f"hidden-{n}")[what] for n in range(self._num_kept("hidden")))
        return torch.cat([torch.from_numpy(piece) for piece in pieces]).view(torch.bfloat16)

    def _target(self) -> TargetWeights:
        own = [token for each in self._held(False) for token in each.answer_ids]
        prompts = (token for each in self._held(False) for token in each.prompt_ids)
        other = [*prompts, *self._built_in_text()]
        listed = shortlist(own, other, self._wanted.shortlist, self._config.vocab_size)
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
        """The same one for a run that goes on as for the one that was ended."""
        if "schedule" not in self.work:
            steps = self._wanted.steps or self._steps_in_time(examples)
            self.work.keep("schedule", {"steps": np.array(steps)})
        steps = int(self.work.load("schedule")["steps"])
        return Schedule(steps, self._wanted.batch_size, seed=self._wanted.seed)

    def _steps_in_time(self, examples: Examples[Any]) -> int:
        """How many fit into what is left, by the time of a few that are not kept."""
        schedule = Schedule(_MEASURED_STEPS + 1, self._wanted.batch_size)
        trial = Training(self._new_head(examples), examples, schedule)
        trial.run(1)  # the first one makes room for all of them
        begin = time.perf_counter()
        trial.run(_MEASURED_STEPS + 1)
        of_one = (time.perf_counter() - begin) / _MEASURED_STEPS
        return max(1, int(self._seconds * (1 - _ANSWERING - _LOOKING) / of_one))


def sequences_of(
    spoken: list[ModelAnswer], hidden: Tensor, streams: Tensor, held_out: bool
) -> TrainingSequences:
    """Those answers that are held out, or the others. ``hidden``, ``streams``: bfloat16 [T, ...],
    of all of them one behind the other."""
    lengths = torch.tensor([len(each.prompt_ids) + len(each.answer_ids) for each in spoken])
    is_chosen = torch.tensor([_is_held_out(number) == held_out for number in range(len(spoken))])
    rows = is_chosen.repeat_interleave(lengths)
    chosen = [each for number, each in enumerate(spoken) if is_chosen[number]]
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


def _judged(examples: Examples[Any]) -> Tensor:
    """Units of not too many positions, evenly from all over."""
    most = max(1, _JUDGED_POSITIONS // examples.unit_size)
    return examples.units[:: max(1, -(-len(examples.units) // most))]


def _halved(seen: Iterable[Seen]) -> dict[str, np.ndarray]:
    """What was seen of some sequences, one behind the other, as bfloat16 in int16."""
    hidden, streams = zip(*seen, strict=True)
    arrays = {"hidden": np.concatenate(hidden), "streams": np.concatenate(streams)}
    return {
        name: torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy()
        for name, array in arrays.items()
    }


def _packed(spoken: list[ModelAnswer]) -> dict[str, np.ndarray]:
    lengths = [(len(each.prompt_ids), len(each.answer_ids)) for each in spoken]
    token_ids = [token for each in spoken for token in (*each.prompt_ids, *each.answer_ids)]
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
