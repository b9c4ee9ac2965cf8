"""Rows of logits to tokens: who is constrained how, whose error it is, and independence of rows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from watched_requests import read_in_a_step, requests_of

from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import Bits, create_mask
from octavo.kernels.cuda.sampling import RECORD_WORDS
from octavo.runtime import sampler
from octavo.runtime.cuda_sampling import SamplingArrays
from octavo.runtime.logits import apply_temperature, apply_top_p, draw, most_likely, token_weights
from octavo.runtime.native_sampling import SampleArray
from octavo.runtime.random import uniforms
from octavo.runtime.sampler import SamplingRow, compute_logprobs, sample
from octavo.runtime.sampling_row import sampling_row

INF = math.inf
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def bits_after(params: SamplingParams, output, stop=(), bad_words=()) -> Bits | None:
    """Which tokens may come after ``output``, of more than any vocabulary of these tests has."""
    mask = create_mask(params, 2**16, stop, bad_words)
    if mask is None:
        return None
    mask.advance(output)
    return mask.bitmask()


def make_row(
    *, seed=0, sample_index=0, prompt=(), output=(), stop=(), bad_words=(), **settings
) -> SamplingRow:
    params = SamplingParams(**settings)
    bits = bits_after(params, output, stop, bad_words)
    return SamplingRow(params, seed, sample_index, prompt, output, bits)


def greedy(logits: list[float], **row) -> int:
    """The greedy token of one row, which must not be an error."""
    output = sample(torch.tensor([logits], dtype=torch.float32), [make_row(temperature=0, **row)])
    assert output.errors == {}
    return output.token_ids[0]


# ---- Greedy rows and constraints


def test_greedy_takes_the_lowest_of_equals(device):
    logits = torch.tensor([[1.0, 3, 3, 2], [5, 5, 5, 5], [-INF, -3, -2, -2]], device=device)
    output = sample(logits, [make_row(temperature=0)] * 3)
    assert output == ([1, 0, 2], [None] * 3, {})


def test_no_rows():
    assert sample(torch.empty(0, 4), []) == ([], [], {})


def test_allowed_token_ids():
    assert greedy([1, 4, 3, 2]) == 1
    assert greedy([1, 4, 3, 2], allowed_token_ids=[0, 3]) == 3


def test_logit_bias_cannot_revive_what_is_not_allowed():
    assert greedy([1, 4, 3, 2], logit_bias={3: 5.0}) == 3
    assert greedy([1, 4, 3, 2], logit_bias={3: 5.0}, allowed_token_ids=[0, 2]) == 2
    assert greedy([1, 4, 3, 2], logit_bias={3: 5.0}, bad_words=[(3,)]) == 1


def test_min_tokens_bans_stop_tokens_until_it_is_reached():
    logits = [1.0, 4, 3, 2]
    assert greedy(logits, stop=(1, 2), min_tokens=2, output=[0]) == 3
    assert greedy(logits, stop=(1, 2), min_tokens=2, output=[0, 0]) == 1
    assert greedy(logits, stop=(1, 2), min_tokens=0) == 1
    assert greedy(logits, stop=(1, 2), min_tokens=2, output=[0, 0], logit_bias={0: 1.0}) == 1


@pytest.mark.parametrize(
    ("bad_words", "output", "expected"),
    [
        ([(1,)], [], 2),
        ([(3, 1)], [], 1),
        ([(3, 1)], [3], 2),
        ([(3, 1)], [1, 3], 2),
        ([(3, 1)], [3, 0], 1),
        ([(0, 3, 1)], [3], 1),  # longer than the output: the prompt does not count
        ([(0, 3, 1)], [0, 3], 2),
        ([(0, 3, 1)], [2, 0, 3], 2),
        ([(3, 1), (2,)], [3], 3),
        ([()], [3], 1),
    ],
)
def test_bad_words(bad_words, output, expected):
    row = {"prompt": [0, 3], "bad_words": bad_words}
    assert greedy([1, 4, 3, 2], output=output, **row) == expected
    assert greedy([1, 4, 3, 2], output=np.array(output, dtype=np.int64), **row) == expected


def test_penalties_look_at_the_right_history():
    logits = [1.0, 4, 3, 2]
    assert greedy(logits, prompt=[1], repetition_penalty=2.0) == 2
    assert greedy(logits, output=[1], repetition_penalty=2.0) == 2
    assert greedy(logits, prompt=[1], frequency_penalty=2.0, presence_penalty=2.0) == 1
    assert greedy(logits, output=[1], presence_penalty=0.9) == 1
    assert greedy(logits, output=[1, 1], presence_penalty=0.9) == 1
    assert greedy(logits, output=[1], frequency_penalty=0.9) == 1
    assert greedy(logits, output=[1, 1], frequency_penalty=0.9) == 2
    assert greedy(logits, output=range(4), repetition_penalty=2.0) == 1
    both = {"repetition_penalty": 1.01, "frequency_penalty": 0.9}
    assert greedy(logits, prompt=[1, 1, 1], **both) == 1
    assert greedy(logits, prompt=[1], output=[1, 1], **both) == 2


def test_bias_comes_before_the_repetition_penalty():
    # -1 + 6 = 5, halved: 2.5. The other way round: -1 doubled is -2, + 6 = 4.
    assert greedy([3, -1], prompt=[1], logit_bias={1: 6.0}, repetition_penalty=2.0) == 0


def test_unknown_tokens_that_can_do_no_harm_are_ignored():
    row = {"prompt": [99, 1], "output": [1, 77], "stop": (55, 1), "bad_words": [(2,), (44,)]}
    assert greedy([1, 4, 3, 2], min_tokens=5, repetition_penalty=1.5, **row) == 3
    assert greedy([1, 4, 3, 2], allowed_token_ids=[0, 4], logit_bias={4: 9.0}) == 0


def test_logits_are_not_modified(device):
    logits = torch.randn(8, 600, device=device)
    before = logits.clone()
    rows = [
        make_row(seed=i, top_p=0.9, min_p=0.01, typical_p=0.9, output=[1], presence_penalty=1.0)
        for i in range(4)
    ]
    sample(logits, rows + [make_row(seed=9, logit_bias={1: 3.0})] * 2 + [make_row()] * 2)
    assert torch.equal(logits, before)


# ---- Random rows


def test_seed_sample_and_position_give_distinct_draws():
    logits = torch.zeros(1, 1000)

    def token(seed: int, sample_index: int, position: int) -> int:
        row = make_row(seed=seed, sample_index=sample_index, output=range(position))
        return sample(logits, [row]).token_ids[0]

    assert token(1, 0, 5) == token(1, 0, 5)
    drawn = [token(s, i, p) for s in range(3) for i in range(3) for p in range(3)]
    assert len(set(drawn)) > 20  # of 27


def test_draw_is_the_inverse_of_the_distribution_function():
    position = next(p for p in range(50) if 0.5 < uniforms([3], [1], [p])[0] < 0.75)
    row = make_row(seed=3, sample_index=1, output=range(position))
    assert sample(torch.zeros(1, 4), [row]).token_ids == [2]


def test_low_temperature_is_greedy():
    rows = [make_row(seed=i, temperature=1e-6) for i in range(50)]
    assert sample(torch.tensor([[1.0, 1.0, 0.9]] * 50), rows).token_ids == [0] * 50


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_cut_to_one_token_is_greedy(device, params):
    logits = torch.randn(64, 700, device=device)
    rows = [make_row(seed=i, temperature=2.0, **params) for i in range(64)]
    assert sample(logits, rows).token_ids == logits.argmax(-1).tolist()


def test_top_k_of_equals_keeps_the_lowest_ids():
    rows = [make_row(seed=i, top_k=3) for i in range(400)]
    assert set(sample(torch.zeros(400, 1000), rows).token_ids) == {0, 1, 2}


def test_top_p_of_equals_keeps_the_lowest_ids():
    rows = [make_row(seed=i, top_p=0.0025) for i in range(400)]
    assert set(sample(torch.zeros(400, 1000), rows).token_ids) == {0, 1, 2}


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 6.0, 40.0])
def test_ranking_only_what_may_survive_top_p_changes_nothing(device, scale):
    """The slow twin ranks the whole vocabulary."""
    num_rows, vocab_size = 60, 2000
    generator = torch.Generator().manual_seed(int(scale * 10))
    logits = (scale * torch.randn(num_rows, vocab_size, generator=generator)).to(device)
    top_ps = [(i + 1) / (num_rows + 1) for i in range(num_rows)]
    rows = [make_row(seed=i, temperature=0.7, top_p=top_ps[i]) for i in range(num_rows)]

    cooled = apply_temperature(logits, torch.tensor([0.7] * num_rows, device=device))
    ranked = most_likely(cooled, vocab_size)
    top_p = torch.tensor(top_ps, dtype=torch.float64, device=device)
    uniform = torch.from_numpy(uniforms(range(num_rows), [0] * num_rows, [0] * num_rows))
    column = draw(token_weights(apply_top_p(ranked.logits, top_p)), uniform.to(device))
    expected = ranked.token_ids.gather(1, column.unsqueeze(1))[:, 0]
    assert sample(logits, rows).token_ids == expected.tolist()


def test_greedy_rows_do_no_work_of_random_rows(monkeypatch):
    def unexpected(*_args):
        raise AssertionError("not needed by any row")

    for name in ("_constrain", "_draw_rows", "most_likely", "token_weights"):
        monkeypatch.setattr(sampler, name, unexpected)
    sample(torch.randn(5, 600), [make_row(temperature=0)] * 5)


def test_top_k_rows_weigh_and_rank_only_the_head(monkeypatch):
    widths: list[int] = []

    def recorded(logits):
        widths.append(logits.shape[1])
        return token_weights(logits)

    monkeypatch.setattr(sampler, "token_weights", recorded)
    sample(torch.randn(5, 9000), [make_row(top_k=20, top_p=0.9)] * 5)
    assert widths == [20]


# ---- Errors belong to one row


BAD_ROWS = [
    ([1, math.nan, 3, 2], {}, "NaN"),
    ([1, math.nan, 3, 2], {"temperature": 0}, "NaN"),
    ([1, math.nan, 3, 2], {"allowed_token_ids": [0, 2]}, "NaN"),
    ([1, INF, 3, 2], {}, "inf"),
    ([1, INF, 3, 2], {"temperature": 0, "bad_words": [(1,)]}, "inf"),
    ([-INF] * 4, {"temperature": 0}, "inf"),
    ([-INF] * 4, {"logit_bias": {1: 5.0}, "logprobs": 2}, "inf"),
    ([1, 4, 3, 2], {"bad_words": [(0,), (1,), (2,), (3,)]}, "no token"),
    ([1, 4, -INF, 2], {"allowed_token_ids": [2]}, "no token"),
    ([1, 4, 3, 2], {"allowed_token_ids": [1], "stop": (1,), "min_tokens": 1}, "no token"),
    ([1, 4, 3, 2], {"repetition_penalty": 1e-60, "output": [1]}, "penalties"),
]


@pytest.mark.parametrize(("logits", "row", "reason"), BAD_ROWS)
def test_a_bad_row_fails_alone(device, logits, row, reason):
    good = [make_row(temperature=0), make_row(seed=5), make_row(seed=6, top_p=0.9, logprobs=2)]
    healthy = torch.tensor([[1.0, 4, 3, 2]] * 3, device=device)
    expected = sample(healthy, good)
    bad = torch.tensor([logits], dtype=torch.float32, device=device)
    mixed = sample(
        torch.cat([healthy[:1], bad, healthy[1:]]), [good[0], make_row(**row), *good[1:]]
    )
    assert list(mixed.errors) == [1]
    assert reason in mixed.errors[1]
    assert mixed.logprobs[1] is None
    assert [mixed.token_ids[i] for i in (0, 2, 3)] == expected.token_ids
    assert [mixed.logprobs[i] for i in (0, 2, 3)] == expected.logprobs


def test_errors_of_later_chunks_keep_their_row(monkeypatch):
    monkeypatch.setitem(sampler._CHUNK_SIZE, "cpu", 3 * 4)
    logits = torch.randn(10, 4)
    logits[7, 2] = math.nan
    assert list(sample(logits, [make_row(seed=i) for i in range(10)]).errors) == [7]


def test_masked_logits_are_legal(device):
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0]] * 300, device=device)
    output = sample(logits, [make_row(seed=i, typical_p=(i % 2) or 0.9) for i in range(300)])
    assert output.errors == {}
    assert set(output.token_ids) == {1, 3}


# ---- Logprobs


def test_logprobs_equal_log_softmax(device):
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(12, 50_257, generator=generator)).to(device)
    chosen = torch.randint(0, 50_257, (12,), generator=generator).to(device)
    exact = logits.double().log_softmax(-1)
    for i, entry in enumerate(compute_logprobs(logits, chosen, 5)):
        token_id = chosen[i].item()
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(exact[i, token_id].item(), abs=1e-6)
        assert entry.rank == 1 + (logits[i] > logits[i, token_id]).sum().item()
        values, ids = logits[i].topk(5)
        assert [t for t, _ in entry.top] == ids.tolist()
        assert [p for _, p in entry.top] == pytest.approx(exact[i, ids].tolist(), abs=1e-6)


def test_logprobs_of_four_tokens_with_a_tie():
    logits = torch.tensor([[0.1, 0.4, 0.4, 0.1]]).log()
    (entry,) = compute_logprobs(logits, [2], 10)
    assert (entry.token_id, entry.rank) == (2, 1)
    assert entry.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token_id for token_id, _ in entry.top] == [1, 2, 0, 3]
    assert math.fsum(math.exp(p) for _, p in entry.top) == pytest.approx(1.0, abs=1e-6)


def test_logprobs_of_unlikely_and_masked_tokens():
    logits = torch.tensor([[0.0, -100.0, -INF], [0.0, -100.0, -INF]])
    unlikely, masked = compute_logprobs(logits, [1, 2], 0)
    assert unlikely == (1, -100.0, 2, ())
    assert masked == (2, -INF, 3, ())


def test_logprobs_of_a_damaged_row_are_nan():
    (entry,) = compute_logprobs(torch.tensor([[0.0, math.nan, 1.0]]), [0], 2)
    assert math.isnan(entry.logprob)


def test_logprobs_are_those_of_the_model():
    """Before bias and temperature, and each row gets as many as it asked for."""
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 4).log()
    rows = [
        make_row(temperature=0, logprobs=2, logit_bias={0: 50.0}),
        make_row(temperature=0),
        make_row(temperature=0, logprobs=0),
        make_row(temperature=0, logprobs=3),
    ]
    biased, none, zero, three = sample(logits, rows).logprobs
    assert (biased.token_id, biased.rank) == (0, 4)
    assert biased.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token_id for token_id, _ in biased.top] == [1, 2]
    assert none is None
    assert (zero.token_id, zero.top) == (1, ())
    assert [token_id for token_id, _ in three.top] == [1, 2, 3]


# ---- Rows are independent, bit for bit


def random_rows(num: int, vocab_size: int, seed: int) -> Iterator[SamplingRow]:
    rng = random.Random(seed)

    def some_ids(most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randrange(1, most))]

    options = {
        "top_k": lambda: rng.choice([1, 5, 40, 200, vocab_size - 1]),
        "top_p": lambda: rng.choice([0.1, 0.5, 0.9, 0.99]),
        "min_p": lambda: rng.choice([0.01, 0.1]),
        "typical_p": lambda: rng.choice([0.2, 0.9]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.7]),
        "presence_penalty": lambda: rng.choice([-0.5, 0.7]),
        "logit_bias": lambda: {t: rng.uniform(-5, 5) for t in some_ids(8)},
        "allowed_token_ids": lambda: some_ids(300),
        "min_tokens": lambda: rng.choice([0, 12]),
        "logprobs": lambda: rng.choice([0, 3, 7]),
    }
    for _ in range(num):
        chosen = rng.sample(sorted(options), rng.choice([0, 0, 1, 2, 4]))
        yield make_row(
            seed=rng.getrandbits(64),
            sample_index=rng.randrange(4),
            prompt=some_ids(20),
            output=some_ids(20),
            stop=some_ids(3),
            bad_words=[tuple(some_ids(3))] if rng.random() < 0.2 else [],
            temperature=rng.choice([0, 0.3, 1.0, 1.7]),
            **{name: options[name]() for name in chosen},
        )


@pytest.mark.parametrize("vocab_size", [11, 1003, 50_257])
def test_a_row_gives_the_same_bits_in_any_company(device, vocab_size, monkeypatch):
    num_rows = 120 if vocab_size < 2000 else 24
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    logits[::3] = logits[::3].bfloat16().float()  # ties, as from a model in bfloat16
    logits[5, 3] = math.nan
    logits[7] = -INF
    logits = logits.to(device)
    rows = list(random_rows(num_rows, vocab_size, seed=vocab_size))
    together = sample(logits, rows)
    assert len(together.errors) < num_rows // 2

    def assert_same(output: sampler.SamplerOutput, indices: list[int]) -> None:
        for i, j in enumerate(indices):
            assert output.errors.get(i) == together.errors.get(j)
            if j not in together.errors:
                assert output.token_ids[i] == together.token_ids[j]
                assert output.logprobs[i] == together.logprobs[j]

    for i in range(num_rows):
        assert_same(sample(logits[i : i + 1], [rows[i]]), [i])
    rng = random.Random(0)
    for size in (2, 7, num_rows // 2, num_rows):
        indices = rng.sample(range(num_rows), size)
        assert_same(sample(logits[indices], [rows[i] for i in indices]), indices)
    for chunk_size in (1, 3 * vocab_size, 2**30):
        monkeypatch.setitem(sampler._CHUNK_SIZE, device.type, chunk_size)
        assert_same(sample(logits, rows), list(range(num_rows)))


def test_the_number_of_threads_does_not_matter():
    logits = 3 * torch.randn(16, 50_257, generator=torch.Generator().manual_seed(1))
    rows = [
        replace(row, params=row.params.with_changes(logprobs=4))
        for row in random_rows(16, 50_257, seed=2)
    ]
    before = torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            outputs.append((sample(logits, rows), sample(logits[:1], rows[:1])))
    finally:
        torch.set_num_threads(before)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("sampler", ["plain", "native", "device"])
def test_a_step_with_penalties_costs_the_same_however_long_the_answer_is(sampler):
    """Counted: the tokens of the answer that are read to sample the next one."""
    logits = torch.zeros(1, 64)
    native = SampleArray(1)
    device = SamplingArrays(
        torch.zeros((1, RECORD_WORDS), dtype=torch.int32),
        64,
        lambda size, dtype: torch.zeros(size, dtype=dtype),
    )
    write = {
        "plain": lambda request: sample(logits, [sampling_row(request)]),
        "native": lambda request: native.write([request]),
        "device": lambda request: device.write([request], [request.num_output_tokens]),
    }[sampler]
    short, long = (read_in_a_step(request, write) for request in requests_of(100, 10_000))
    assert short == long <= 2
