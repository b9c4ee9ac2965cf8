"""Real weights against transformers, which dequantizes the same GGUF files to float32.

What transformers said is recorded beside this file, with the hashes of what it was asked; with
``-m long`` it is asked again, about all logits. ``-m long --record`` writes the records anew.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from weights import dequantized_once

from octavo.models.gguf import GGUFFile

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "recorded"
NUM_COLUMNS = 16  # of each row of logits, at random but the same for all rows
NUM_TOP = 4
NUM_TOKENS = 64
NUM_DECODED = 16
PROMPT_LENGTH = 6
AT_ONCE = 4  # prompts whose logits are in memory together
PROMPTS = """\
The capital of France is a city that
Once upon a time there was a little
To make bread you need flour, water and
The first law of thermodynamics says that energy
def fibonacci(n): return n if n <
My grandmother used to tell me that the
In the year 1969, two men walked
The recipe calls for three eggs, some sugar
Dear Sir or Madam, I am writing to
Photosynthesis is the process by which green plants
The stock market fell sharply on Monday after
import numpy as np; x = np.mean(
She opened the door and saw that nobody
The quick brown fox jumps over the lazy
Water boils at a temperature of one hundred
There are seven days in a week, and
The old lighthouse keeper climbed the stairs every
In mathematics, a prime number is one that
He said that he would never go back
A good teacher knows that every student learns
""".splitlines()


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other lose more than they win where others use the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with dequantized_once():
        yield
    torch.set_num_threads(before)


def encode(text, vocabulary, space):
    """Longest match from the left: not what the tokenizer does, but close to how text looks."""
    text, tokens = text.replace(" ", space), []
    while text:
        length = next(n for n in range(len(text), 0, -1) if text[:n] in vocabulary)
        tokens.append(vocabulary[text[:length]])
        text = text[length:]
    return tokens


def make_prompts(path, space, bos):
    """20 prompts of the same length, so that transformers can run them as one batch."""
    tokens = GGUFFile(path).metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    prompts = [bos + encode(text, vocabulary, space)[:PROMPT_LENGTH] for text in PROMPTS]
    assert len(prompts) == 20 and len({tuple(prompt) for prompt in prompts}) == 20
    assert all(len(prompt) == len(bos) + PROMPT_LENGTH for prompt in prompts)
    return prompts


def longer_than_the_window(prompts):
    """Longer than Gemma's 512 positions; the last logits depend on all of it."""
    return sum(prompts, start=[])[:130] * 5


def load_reference(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


# -- what is kept of logits ----------------------------------------------------------------------


class Record:
    """Some logits of every row: the best ones, and random columns."""

    def __init__(self, path: Path, about: dict[str, str]):
        self.path, self.about = path, about
        self.arrays: dict[str, np.ndarray] = {}

    def read(self) -> Record:
        with np.load(self.path) as arrays:
            self.arrays = dict(arrays)
        about = json.loads(str(self.arrays.pop("about")))
        assert {name: about[name] for name in self.about} == self.about, "of something else: record"
        return self

    def write(self, version: str) -> None:
        about = json.dumps({**self.about, "transformers": version})
        np.savez_compressed(self.path, about=np.array(about), **self.arrays)

    def add(self, name: str, logits: torch.Tensor) -> None:
        """Logits of float32 [..., V]."""
        top = logits.topk(NUM_TOP)
        new = {
            "columns": logits[..., self._columns(logits.shape[-1])].numpy(),
            "top": top.values.numpy(),
            "top_ids": top.indices.int().numpy(),
        }
        self.arrays |= {f"{name}.{key}": values for key, values in new.items()}

    def check(self, name: str, logits: torch.Tensor) -> None:
        """Agreement to 1e-3, and the same best token wherever it leads by more than that."""
        columns, top, ids = (
            torch.from_numpy(self.arrays[f"{name}.{key}"]) for key in ("columns", "top", "top_ids")
        )
        ids = ids.long()
        assert (logits[..., self._columns(logits.shape[-1])] - columns).abs().max() <= 1e-3
        assert (logits.gather(-1, ids) - top).abs().max() <= 1e-3
        clear = top[..., 0] - top[..., 1] > 1e-3
        assert torch.equal(logits.argmax(-1)[clear], ids[..., 0][clear])
        assert (logits.amax(-1) - top[..., 0]).abs().max() <= 1e-3

    @staticmethod
    def _columns(vocab_size: int) -> torch.Tensor:
        return torch.from_numpy(np.random.RandomState(0).randint(0, vocab_size, NUM_COLUMNS))


def record_of(path: Path, prompts: list[list[int]]) -> Record:
    with open(path, "rb") as file:
        model = hashlib.file_digest(file, "sha256").hexdigest()
    inputs = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    return Record(RECORDED / f"{path.stem}.npz", {"model": model, "prompts": inputs})


# -- against the record ----------------------------------------------------------------------------


def compare(path, prompts, driver):
    """Logits at all positions of 12 prompts and of the 64 greedy tokens of each. Every such one is
    the best one after those before it, so that they are our greedy answer too, by induction; some
    are also decoded one by one."""
    ours, record = driver(path), record_of(path, prompts).read()
    answers = record.arrays["answers"].tolist()
    some = answers[:AT_ONCE]
    assert ours.greedy(prompts[:AT_ONCE], NUM_DECODED) == [answer[:NUM_DECODED] for answer in some]
    for start in range(0, len(prompts), 2 * AT_ONCE):  # with -m long, all of them
        whole = [p + a for p, a in zip(prompts, answers, strict=True)][start : start + AT_ONCE]
        logits = torch.stack(ours.logits(whole))
        record.check(str(start), logits)
        best = logits[:, -NUM_TOKENS - 1 : -1].argmax(-1).tolist()
        assert best == answers[start : start + AT_ONCE]
    return ours, record


def test_smollm2(smollm2_gguf, driver):
    compare(smollm2_gguf, make_prompts(smollm2_gguf, "Ġ", []), driver)


@pytest.mark.long
def test_gemma3(gemma3_gguf, driver):
    prompts = make_prompts(gemma3_gguf, "▁", [2])
    ours, record = compare(gemma3_gguf, prompts, driver)
    record.check("long", ours.logits([longer_than_the_window(prompts)], last=8)[0])


# -- against transformers --------------------------------------------------------------------------


def check(ours, theirs):
    """As `Record.check`, of all logits."""
    assert (ours - theirs).abs().max() <= 1e-3
    top = theirs.topk(2).values
    clear = top[..., 0] - top[..., 1] > 1e-3
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


@torch.no_grad()
def ask(path, prompts, driver, record, note):
    """Compare all logits with those of transformers, which ``note(name, logits)`` gets.

    If transformers, shown a prompt and our answer, finds each token of the answer the best one
    after those before it, then its own greedy answer is the same, by induction.
    """
    ours, theirs = driver(path), load_reference(path)
    answers = ours.greedy(prompts, NUM_TOKENS)
    for start in range(0, len(prompts), AT_ONCE):
        whole = [p + a for p, a in zip(prompts, answers, strict=True)][start : start + AT_ONCE]
        expected = theirs(torch.tensor(whole)).logits
        check(torch.stack(ours.logits(whole)), expected)
        best = expected[:, -NUM_TOKENS - 1 : -1].argmax(-1).tolist()
        assert best == answers[start : start + AT_ONCE]
        note(str(start), expected)
    return ours, theirs, answers


@pytest.mark.long
@pytest.mark.parametrize(
    ("fixture", "space", "bos"), [("smollm2_gguf", "Ġ", []), ("gemma3_gguf", "▁", [2])]
)
def test_all_logits_of_transformers_and_the_record_of_them(request, driver, fixture, space, bos):
    import transformers

    path = request.getfixturevalue(fixture)
    prompts = make_prompts(path, space, bos)
    record, anew = record_of(path, prompts), request.config.getoption("--record")
    note = record.add if anew else record.read().check
    ours, theirs, answers = ask(path, prompts, driver, record, note)
    if bos:
        long = longer_than_the_window(prompts)
        with torch.no_grad():
            expected = theirs(torch.tensor([long]), logits_to_keep=8).logits[0]
        check(ours.logits([long], last=8)[0], expected)
        note("long", expected)
    if anew:
        record.arrays["answers"] = np.array(answers, dtype=np.int32)
        record.write(transformers.__version__)
    else:
        assert record.arrays["answers"].tolist() == answers
