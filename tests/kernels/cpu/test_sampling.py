"""The native sampler against ``runtime/sampler.py``, its oracle.

Both choose by the same integers, but for ``exp``: torch's may differ from ours in the last bit, so
that a draw can fall on the other side of a boundary. That is rare enough to ask for equality here,
where the numbers are the same at each run; what is asked of many draws is their distribution.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from octavo.core.batch import NO_TOKEN_LEFT
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import Bits, create_mask
from octavo.kernels.cpu import abi
from octavo.runtime.native_sampling import SampleArray, status_error
from octavo.runtime.random import uniform
from octavo.runtime.sampler import SamplingRow, probabilities, sample

INF = math.inf
# Of draws that may differ from the oracle's: 4 of 620,000 were seen to, see docs/kernels.md.
MISMATCHES = 1e-4


def bits_after(params: SamplingParams, output, stop=(), bad_words=()) -> Bits | None:
    """Which tokens may come after ``output``, of more than any vocabulary of these tests has."""
    mask = create_mask(params, 2**16, stop, bad_words)
    if mask is None:
        return None
    mask.advance(output)
    return mask.bitmask()


def make_row(
    seed=0, sample_index=0, prompt=(), output=(), stop=(), bad_words=(), **settings
) -> SamplingRow:
    params = SamplingParams(**settings)
    bits = bits_after(params, output, stop, bad_words)
    return SamplingRow(params, seed, sample_index, prompt, output, bits)


def native_sample(
    native,
    logits: np.ndarray,
    rows: Sequence[SamplingRow],
    pool=None,
    probabilities: np.ndarray | None = None,
) -> tuple[list[int], dict[int, str]]:
    """Token ids and errors of ``logits`` [R, V], which are not modified; and ``probabilities``
    [R, V], if they are asked for."""
    # Each row in a page of its own with NaN around it: what reads past a row finds them.
    num_rows, vocab_size = logits.shape
    padded = np.full((num_rows, vocab_size + 64), np.nan, dtype=np.float32)
    padded[:, 32:-32] = logits
    addresses = padded.ctypes.data + padded.strides[0] * np.arange(num_rows) + 32 * 4
    addresses = addresses.astype(np.uintp)
    token_ids, status = np.full((2, num_rows), -1, dtype=np.int32)
    samples = SampleArray(num_rows)
    samples.write(rows)
    asked = 0
    if probabilities is not None:
        at = probabilities.ctypes.data + probabilities.strides[0] * np.arange(num_rows)
        at = at.astype(np.uintp)
        asked = at.ctypes.data
    native.check(
        native.lib.oct_sample_rows(
            pool or native.pool,
            num_rows,
            vocab_size,
            addresses.ctypes.data,
            samples.array,
            token_ids.ctypes.data,
            status.ctypes.data,
            asked,
        )
    )
    assert np.isnan(padded[:, :32]).all() and np.isnan(padded[:, -32:]).all()
    errors = {i: status_error(code) for i, code in enumerate(status.tolist()) if code}
    return token_ids.tolist(), errors


def distributions(rng: np.random.Generator, vocab_size: int) -> dict[str, np.ndarray]:
    """Logits of different shapes, float32 [V] each."""
    normal = rng.normal(size=vocab_size)
    peaked = normal * 2
    peaked[rng.integers(vocab_size, size=12)] += np.linspace(6, 12, 12)
    masked = normal * 4
    masked[rng.random(vocab_size) < 0.6] = -INF
    masked[rng.integers(vocab_size)] = 1.0
    lonely = normal * 1e-4
    lonely[rng.integers(vocab_size)] = 20.0
    shapes = {
        "normal": normal,
        "wide": normal * 30,
        "peaked": peaked,
        "ties": np.round(normal * 2),
        "equal": np.full(vocab_size, -3.25),
        "signed zeros": rng.choice([0.0, -0.0], size=vocab_size),
        "masked": masked,
        "lonely": lonely,
    }
    return {name: values.astype(np.float32) for name, values in shapes.items()}


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3}
CONSTRAINTS = {
    "allowed_token_ids": [0, *range(2, 600, 3)],
    "min_tokens": 100,
    "max_tokens": 100,
    "stop": [2, 8, 11],
    "bad_words": [(5,), (14,)],
    "logit_bias": {0: 1.5, 14: 8.0, 17: 3.0, 20: -4.0},
}
GREEDY = {
    "greedy": {"temperature": 0.0},
    "greedy below the bound": {"temperature": 9e-6},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "encouraged": {"temperature": 0.0, "repetition_penalty": 0.6, "presence_penalty": -2.0},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.7},
    "presence": {"temperature": 0.0, "presence_penalty": 1.1},
    "all penalties": {"temperature": 0.0, **PENALTIES},
    "allowed": {"temperature": 0.0, "allowed_token_ids": [0, 3, 14, 31, 32, 63, 64, 800]},
    "bad words": {"temperature": 0.0, "bad_words": [(1,), (7,), (33,), (40,)]},
    "biases": {"temperature": 0.0, "logit_bias": {0: -9.5, 5: 3.25, 40: 60.0, 2**20: 50.0}},
    "all constraints": {"temperature": 0.0, **CONSTRAINTS, **PENALTIES},
}
DRAWS = {
    "plain": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 100": {"temperature": 100.0},
    "temperature 1e-5": {"temperature": 1e-5},
    "top_k 1": {"top_k": 1},
    "top_k 7": {"top_k": 7},
    "top_k 500": {"top_k": 500},
    "top_k of all": {"top_k": 2**31 - 1},
    "top_p 1e-9": {"top_p": 1e-9},
    "top_p 0.5": {"top_p": 0.5},
    "top_p 0.9": {"top_p": 0.9},
    "top_p of nearly all": {"top_p": 1 - 1e-12, "temperature": 3.0},
    "min_p 0.02": {"min_p": 0.02},
    "min_p 1": {"min_p": 1.0},
    "typical_p 0.9": {"typical_p": 0.9},
    "typical_p 0.2": {"typical_p": 0.2, "temperature": 1.6},
    "typical_p 1e-9": {"typical_p": 1e-9},
    "typical_p of nearly all": {"typical_p": 1 - 1e-12, "temperature": 3.0},
    "typical_p and min_p": {"typical_p": 0.5, "min_p": 0.02},
    "typical_p and top_k": {"typical_p": 0.6, "top_k": 9},
    "typical_p and top_p": {"typical_p": 0.7, "top_p": 0.8},
    "min_p and top_k": {"min_p": 0.3, "top_k": 20},
    "min_p and top_p": {"min_p": 0.01, "top_p": 0.8},
    "top_k and top_p": {"top_k": 30, "top_p": 0.7},
    "top_n_sigma 1": {"top_n_sigma": 1.0},
    "top_n_sigma and others": {"temperature": 3.0, "top_n_sigma": 0.7, "min_p": 0.01, "top_k": 7},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "xtc at times": {"temperature": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "xtc of anything": {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 6},
    "xtc that never cuts": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "xtc after top_p": {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_p": 0.8},
    "all of these": {"xtc_probability": 0.9, "top_n_sigma": 2.0, "top_k": 40, "typical_p": 0.9},
    "all": {"temperature": 0.9, "min_p": 0.02, "typical_p": 0.9, "top_k": 40, "top_p": 0.9},
    "all and penalties": {"temperature": 1.2, "min_p": 0.01, "top_k": 9, "top_p": 0.9, **PENALTIES},
    "constraints": CONSTRAINTS,
    "all and constraints": {"min_p": 0.01, "top_k": 9, "top_p": 0.9, **CONSTRAINTS, **PENALTIES},
}


def compare(native, vocab_sizes: Sequence[int], settings: dict, rows_of_each: int) -> None:
    rng = np.random.default_rng(sum(vocab_sizes))
    num_rows = num_wrong = 0
    for vocab_size in vocab_sizes:
        for shape, values in distributions(rng, vocab_size).items():
            rows, names = [], []
            for name, params in settings.items():
                for _ in range(rows_of_each):
                    seed, index = int(rng.integers(2**63)), int(rng.integers(4))
                    # Some of these ids are unknown.
                    prompt = rng.integers(-2, vocab_size + 3, size=rng.integers(30)).tolist()
                    output = rng.integers(0, vocab_size, size=rng.integers(30)).tolist()
                    rows.append(make_row(seed, index, prompt, output, **params))
                    names.append(name)
            logits = np.tile(values, (len(rows), 1))
            expected = sample(torch.from_numpy(logits), rows)
            token_ids, errors = native_sample(native, logits, rows)
            # Of logits that are mostly -inf, a mask may have left none.
            assert errors == expected.errors
            assert shape == "masked" or not errors
            wrong = [i for i, t in enumerate(token_ids) if t != expected.token_ids[i]]
            greedy = [names[i] for i in wrong if rows[i].is_greedy]
            assert not greedy, f"{shape} logits, vocabulary of {vocab_size}: {greedy}"
            num_rows += len(rows)
            num_wrong += len(wrong)
    assert num_wrong <= MISMATCHES * num_rows, f"{num_wrong} of {num_rows} differ"


@pytest.mark.thinned_on_scalar(3)
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 65, 1000])
def test_tokens_are_those_of_the_oracle(native, vocab_size):
    compare(native, [vocab_size], GREEDY | DRAWS, rows_of_each=6 if vocab_size > 100 else 12)


def test_tokens_of_a_real_vocabulary(native):
    slow = native.isa == "scalar"
    compare(native, [49152 // 4 if slow else 49152], GREEDY | DRAWS, rows_of_each=1)


def test_tokens_of_a_huge_vocabulary(native):
    rng = np.random.default_rng(3)
    settings = ["greedy", "plain", "top_k 500", "all and penalties", "top_p 0.9", "typical_p 0.9"]
    rows = [make_row(9, output=[5, 5], **(GREEDY | DRAWS)[name]) for name in settings]
    logits = rng.normal(size=(len(rows), 262144)).astype(np.float32) * 3
    token_ids, errors = native_sample(native, logits, rows)
    assert (token_ids, errors) == (sample(torch.from_numpy(logits), rows).token_ids, {})


def test_equals_go_by_id(native):
    # All equal, and the uniform number of a row known: rank and id are the same order.
    logits = np.zeros((200, 1000), dtype=np.float32)
    rows = [make_row(seed, top_k=300) for seed in range(200)]
    token_ids, _ = native_sample(native, logits, rows)
    assert token_ids == [int(uniform(seed, 0, 0) * 300) for seed in range(200)]
    rows = [make_row(seed, top_p=0.25) for seed in range(200)]
    token_ids, _ = native_sample(native, logits, rows)
    assert token_ids == [int(uniform(seed, 0, 0) * 250) for seed in range(200)]


@pytest.mark.parametrize(
    ("seed", "sample_index", "position"),
    [
        (0, 0, 0),
        (2**64 - 1, 2**32 - 1, 7),
        (2**63 + 12345, 3, 2**31),
        (-1, 0, 1),
        (2**70 + 5, 1, 2),
    ],
)
def test_the_random_number_is_that_of_the_oracle(native, seed, sample_index, position):
    # Of 2^16 equal tokens, the one that is drawn says 16 bits of the number.
    row = make_row(seed, sample_index, output=range(position))
    token_ids, _ = native_sample(native, np.zeros((1, 2**16), dtype=np.float32), [row])
    assert token_ids == [int(uniform(seed, sample_index, position) * 2**16)]


def test_random_numbers_over_many_coordinates(native):
    rows = [make_row(s * 0x9E3779B97F4A7C15, s % 5, output=range(s % 7)) for s in range(300)]
    token_ids, _ = native_sample(native, np.zeros((300, 512), dtype=np.float32), rows)
    expected = [int(uniform(r.seed, r.sample_index, len(r.output_token_ids)) * 512) for r in rows]
    assert token_ids == expected


# ---- What is drawn


TEN = [1.3, -0.7, 2.1, 0.4, -2.2, 3.0, 0.9, -1.1, 1.9, 0.0]


def exact(
    logits: list[float], temperature=1.0, min_p=0.0, typical_p=1.0, top_k=0, top_p=1.0
) -> np.ndarray:
    """Probability of each token, in float64, by the definitions."""
    p = np.exp((np.array(logits) - max(logits)) / temperature)
    p[p < min_p] = 0.0
    p /= p.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        information = -np.log(p)
        entropy = np.nansum(p * information)
    order = np.argsort(np.abs(information - entropy), kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= typical_p]] = 0.0
    order = np.argsort(-p, kind="stable")
    p[order[top_k or len(p) :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0.0
    return p / p.sum()


@pytest.mark.thinned_on_scalar(2)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 3.0, "min_p": 0.4},
        {"top_k": 6, "top_p": 0.8},
        {"top_p": 0.93, "temperature": 1.4},
        {"typical_p": 0.6},
        {"typical_p": 0.8, "min_p": 0.05, "top_k": 3, "temperature": 1.3},
    ],
)
def test_draws_have_the_exact_distribution(native, params):
    num = 15_000
    rows = [make_row(seed, **params) for seed in range(num)]
    token_ids, _ = native_sample(native, np.tile(np.float32(TEN), (num, 1)), rows)
    counts, p = np.bincount(token_ids, minlength=10), exact(TEN, **params)
    assert counts[p == 0].sum() == 0
    observed, expected = counts[p > 0], p[p > 0] * num
    statistic = 2 * (observed * np.log(np.maximum(observed, 1) / expected)).sum()
    assert stats.chi2.sf(statistic, len(observed) - 1) > 1e-5


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 65, 1000, 5000])
def test_probabilities_are_those_of_the_oracle_and_of_the_draw(native, vocab_size):
    rng = np.random.default_rng(vocab_size)
    rows = [
        make_row(int(rng.integers(2**63)), output=[0, 5, 5], prompt=[3], **params)
        for params in DRAWS.values()
    ]
    num_rows = num_off = 0
    for values in distributions(rng, vocab_size).values():
        logits = np.tile(values, (len(rows), 1))
        found = np.full(logits.shape, -1.0, dtype=np.float32)
        token_ids, errors = native_sample(native, logits, rows, probabilities=found)
        assert (token_ids, errors) == native_sample(native, logits, rows)
        expected = probabilities(torch.from_numpy(logits), rows).numpy()
        for i in range(len(rows)):
            if i in errors:
                assert (found[i] == -1.0).all(), "a row without a token was written"
                continue
            assert found[i].min() >= 0.0 and found[i].sum(dtype=np.float64) == pytest.approx(1.0)
            assert found[i, token_ids[i]] > 0.0
            num_rows += 1
            num_off += np.abs(found[i] - expected[i]).sum() > 1e-4
    # A cut that falls between two neighbours may take one more, or one less.
    assert num_off <= 0.01 * num_rows, f"{num_off} of {num_rows} differ"


def test_a_greedy_row_has_no_probabilities(native):
    found = np.full((2, 8), -1.0, dtype=np.float32)
    rows = [make_row(temperature=0.0), make_row()]
    native_sample(native, np.zeros((2, 8), np.float32), rows, probabilities=found)
    assert (found[0] == -1.0).all() and (found[1] == 0.125).all()


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 6, "top_p": 0.8}, {"typical_p": 0.8, "min_p": 0.05, "top_k": 3}]
)
def test_probabilities_are_exact(native, params):
    logits = np.float32([TEN])
    expected = exact(TEN, **params)
    found = np.zeros((1, 10), dtype=np.float32)
    native_sample(native, logits, [make_row(**params)], probabilities=found)
    assert found[0] == pytest.approx(expected, abs=1e-6)
    assert probabilities(torch.from_numpy(logits), [make_row(**params)])[0].numpy() == (
        pytest.approx(expected, abs=1e-6)
    )


# ---- Errors


@pytest.mark.parametrize("vocab_size", [1, 16, 17, 100, 5000])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, PENALTIES])
def test_unusable_logits(native, vocab_size, params):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, vocab_size)).astype(np.float32)
    logits[0, 0] = np.nan
    logits[1, -1] = np.nan
    logits[2, vocab_size // 2] = INF
    logits[3] = -INF
    if vocab_size > 1:
        logits[5, 0] = -INF
    rows = [make_row(i, prompt=[0], output=[vocab_size - 1], **params) for i in range(6)]
    token_ids, errors = native_sample(native, logits, rows)
    expected = sample(torch.from_numpy(logits), rows)
    assert errors == expected.errors
    assert sorted(errors) == [0, 1, 2, 3]
    assert token_ids[4:] == expected.token_ids[4:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_that_overflow(native, temperature):
    logits = np.array([[3e38, 1.0, -3e38]] * 4 + [[1.0, 0.0, -1.0]] * 2, dtype=np.float32)
    settings = [
        ({"repetition_penalty": 0.1}, [0]),  # 3e39
        ({"repetition_penalty": 10.0}, [2]),  # -inf, of a token that nobody misses
        ({"repetition_penalty": 1e-300}, [1]),  # 0 in float32
        ({"repetition_penalty": 10.0}, [0]),
        ({"repetition_penalty": 1e300}, [1]),  # inf * 0
        ({"repetition_penalty": 1e300}, [0]),  # 1 / inf
    ]
    rows = [make_row(3, prompt=p, temperature=temperature, **kw) for kw, p in settings]
    token_ids, errors = native_sample(native, logits, rows)
    expected = sample(torch.from_numpy(logits), rows)
    assert errors == expected.errors
    assert sorted(errors) == [0, 2, 4]
    for i in (1, 3, 5):
        assert token_ids[i] == expected.token_ids[i]


def test_arguments_that_make_no_sense(native):
    one = np.zeros(4, dtype=np.float32)
    address = np.array([one.ctypes.data], dtype=np.uintp)
    out = np.zeros(2, dtype=np.int32)

    def call(vocab_size=4, **fields) -> int:
        params = abi.Sample(repetition_penalty=1.0, top_p=1.0, typical_p=1.0, **fields)
        return native.lib.oct_sample_rows(
            native.pool,
            1,
            vocab_size,
            address.ctypes.data,
            ctypes.byref(params),
            out.ctypes.data,
            out.ctypes.data + 4,
            0,
        )

    assert call() == abi.OCT_OK
    for arguments, word in [
        ({"vocab_size": 0}, "vocabulary"),
        ({"vocab_size": 2**19}, "vocabulary"),
        ({"num_output_ids": 1}, "history"),
        ({"num_prompt_ids": -1}, "history"),
        ({"num_biases": 1}, "biases"),
        ({"mask_turn": 1}, "still being made"),
    ]:
        assert call(**arguments) == abi.OCT_ERR_ARGUMENT
        assert word in native.library.last_error()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 65, 1000])
def test_constraints_that_leave_nothing(native, vocab_size, temperature):
    logits = np.random.default_rng(5).normal(size=(6, vocab_size)).astype(np.float32)
    logits[4, 0] = -INF
    logits[5, -1] = np.nan
    everything = [(t,) for t in range(vocab_size)]
    settings = [
        {"bad_words": everything},
        {"allowed_token_ids": [vocab_size + 7]},
        {"allowed_token_ids": [0], "min_tokens": 1, "stop": [0]},
        {"bad_words": everything[:-1], "logit_bias": {0: 100.0}},
        {"allowed_token_ids": [0], "logit_bias": {0: 100.0}},
        {"bad_words": everything},
    ]
    rows = [make_row(i, temperature=temperature, **kw) for i, kw in enumerate(settings)]
    token_ids, errors = native_sample(native, logits, rows)
    expected = sample(torch.from_numpy(logits), rows)
    assert errors == expected.errors
    assert sorted(errors) == [0, 1, 2, 4, 5]
    assert {errors[i] for i in (0, 1, 2)} == {NO_TOKEN_LEFT}
    assert token_ids[3] == expected.token_ids[3] == vocab_size - 1


# ---- Rows are alone


def test_rows_and_threads_change_nothing(native, make_pool):
    rng = np.random.default_rng(8)
    names = list(DRAWS) * 3
    rows = [make_row(i, prompt=[1, 2], output=[2, 900], **DRAWS[n]) for i, n in enumerate(names)]
    logits = rng.normal(size=(len(rows), 1001)).astype(np.float32) * 3
    together, _ = native_sample(native, logits, rows)
    one_by_one = [native_sample(native, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert [[t] for t in together] == one_by_one
    for num_threads in (1, 3):
        assert native_sample(native, logits, rows, make_pool(num_threads))[0] == together


def test_no_rows(native):
    assert native_sample(native, np.zeros((0, 5), dtype=np.float32), []) == ([], {})


# ---- How it is told of rows


def test_a_sample_array_is_written_anew_at_each_step(native):
    """Histories of the last step are gone, prompts are kept, whatever kind of sequence they are."""
    samples = SampleArray(3)
    prompt = [1, 2]
    struct = ctypes.cast(samples.address, ctypes.POINTER(abi.Sample))

    def ids(address: int, count: int) -> list[int]:
        return list((ctypes.c_int32 * count).from_address(address)) if count else []

    samples.write([make_row(prompt=prompt, output=[7], **PENALTIES)])
    first = struct[0].prompt_ids
    for output in ([7, 8], (7, 8, 9), range(5), np.arange(4)):
        samples.write([make_row(), make_row(prompt=prompt, output=output, **PENALTIES)])
        assert (struct[0].num_prompt_ids, struct[0].num_output_ids) == (0, 0)
        assert (struct[0].prompt_ids, struct[0].output_ids) == (None, None)
        assert struct[1].prompt_ids == first
        assert ids(struct[1].prompt_ids, struct[1].num_prompt_ids) == prompt
        assert ids(struct[1].output_ids, struct[1].num_output_ids) == list(output)
        assert struct[1].position == len(output)
    samples.write([make_row(prompt=prompt, frequency_penalty=1.0)])
    assert struct[0].num_prompt_ids == 0  # of the prompt, only the repetition penalty knows


def test_a_request_is_as_good_as_a_row():
    prompt, output = (3, 1, 4), [1, 5]
    biased = {"logit_bias": {3: 0.5, 1: -1.5}}
    for settings in ({}, GREEDY["greedy"], DRAWS["all and penalties"], biased, {"min_tokens": 3}):
        params = SamplingParams(**settings)
        request = Request("r", prompt, params, 0.0, seed=77, sample_index=2)
        request.mask = create_mask(params, 2**16, [2])
        request.token_ids += output
        row = make_row(77, 2, prompt, output, [2], **settings)
        samples = SampleArray(2)
        samples.write([request, row])
        of_request, of_row = samples.array
        for name, _ in abi.Sample._fields_:
            if name not in ("output_ids", "mask", "bias_ids", "biases"):
                assert getattr(of_request, name) == getattr(of_row, name), name
        for name, size in (("mask", 2**16 // 8), ("bias_ids", 8), ("biases", 8)):
            first, second = getattr(of_request, name), getattr(of_row, name)
            assert (first is None) == (second is None)
            assert first is None or ctypes.string_at(first, size) == ctypes.string_at(second, size)
        if of_row.num_output_ids:
            size = 4 * len(output)
            assert ctypes.string_at(of_request.output_ids, size) == (
                ctypes.string_at(of_row.output_ids, size)
            )
