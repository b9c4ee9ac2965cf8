"""Native log-probabilities against ``compute_logprobs`` of ``runtime/sampler.py``, their oracle.

Ids and ranks are equal; values may differ by the last bit of ``exp``.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.batch import TokenLogprobs
from octavo.kernels.cpu import abi
from octavo.runtime.native_sampling import LogprobArray
from octavo.runtime.sampler import compute_logprobs

INF = math.inf


def native_logprobs(
    native, logits: np.ndarray, token_ids, counts, pool=None
) -> list[TokenLogprobs | None]:
    """One entry for each row of ``logits`` [R, V] that asks; None asks for nothing."""
    num_rows, vocab_size = logits.shape
    # Each row with the greatest of logits around it: what reads past a row finds them.
    padded = np.full((num_rows, vocab_size + 64), 3e38, dtype=np.float32)
    padded[:, 32:-32] = logits
    kept = padded.copy()
    first = padded.ctypes.data + 32 * 4
    addresses = array("Q", [first + r * padded.strides[0] for r in range(num_rows)])
    targets = array("i", token_ids)
    entries = LogprobArray(num_rows, vocab_size)
    address = entries.ask(counts)
    native.check(
        native.lib.oct_logprob_rows(
            pool or native.pool,
            num_rows,
            vocab_size,
            addresses.buffer_info()[0],
            targets.buffer_info()[0],
            address,
        )
    )
    assert padded.tobytes() == kept.tobytes()
    return [
        None if count is None else entries.entry(row, token_id)
        for row, (token_id, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


def is_close(ours: float, theirs: float) -> bool:
    return ours == theirs or (ours != ours and theirs != theirs) or abs(ours - theirs) < 1e-6


def assert_same(ours: list[TokenLogprobs | None], theirs: list[TokenLogprobs]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine is not None
        assert (mine.token_id, mine.rank) == (other.token_id, other.rank)
        assert [i for i, _ in mine.top] == [i for i, _ in other.top]
        values = zip([v for _, v in mine.top], [v for _, v in other.top], strict=True)
        assert all(is_close(a, b) for a, b in [(mine.logprob, other.logprob), *values])


def rows_of_all_kinds(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    normal = rng.normal(size=vocab_size)
    rows = [normal * scale for scale in (0.0, 1e-4, 1.0, 8.0, 1e4)]
    rows += [np.sort(normal), np.sort(normal)[::-1]]  # each beats all before it; none does
    rows += [np.round(normal), np.full(vocab_size, -7.5), rng.choice([0.0, -0.0], vocab_size)]
    for value, part in [(-INF, 0.5), (-INF, 0.98), (-INF, 1.1), (INF, 0.1), (np.nan, 0.1),
                        (-np.nan, 0.9), (np.nan, 1.1), (3e38, 0.3), (-3e38, 0.3)]:  # fmt: skip
        changed = normal.copy()
        changed[rng.random(vocab_size) < part] = value
        rows.append(changed)
    return np.stack(rows).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 33, 1000, 49152, 262144])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 300])
def test_entries_are_those_of_the_oracle(native, vocab_size, num_top):
    """With ties, infinities and NaN; and where more are asked for than there are."""
    rng = np.random.default_rng(vocab_size + num_top)
    logits = rows_of_all_kinds(rng, vocab_size)
    if vocab_size > 40000 and native.isa == "scalar":
        logits = logits[::4]
    token_ids = rng.integers(vocab_size, size=len(logits)).tolist()
    theirs = compute_logprobs(torch.from_numpy(logits), token_ids, num_top)
    assert_same(native_logprobs(native, logits, token_ids, [num_top] * len(logits)), theirs)


LOGITS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, math.nan, 3.4e38, 1e-45]),
)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(LOGITS, min_size=1, max_size=70), data=st.data())
def test_any_row_is_as_the_oracle_has_it(native, values, data):
    logits = np.array([values], dtype=np.float32)
    token_id = data.draw(st.integers(0, len(values) - 1))
    num_top = data.draw(st.integers(0, len(values) + 2))
    theirs = compute_logprobs(torch.from_numpy(logits), [token_id], num_top)
    assert_same(native_logprobs(native, logits, [token_id], [num_top]), theirs)


def test_probabilities_sum_to_one(native):
    logits = np.random.default_rng(1).normal(size=(3, 500)).astype(np.float32) * 5
    for entry in native_logprobs(native, logits, [0, 1, 2], [500] * 3):
        assert abs(sum(math.exp(value) for _, value in entry.top) - 1) < 1e-6
        values = dict(entry.top)
        assert entry.logprob == values[entry.token_id]
        assert [i for i, _ in entry.top][entry.rank - 1] == entry.token_id


def test_a_row_has_the_same_bits_in_any_company(native, make_pool):
    rng = np.random.default_rng(2)
    logits = rows_of_all_kinds(rng, 1001)
    token_ids = rng.integers(1001, size=len(logits)).tolist()
    counts = [None if i % 5 == 4 else i for i in range(len(logits))]
    together = native_logprobs(native, logits, token_ids, counts)
    assert [entry is None for entry in together] == [count is None for count in counts]
    alone = [
        native_logprobs(native, logits[i : i + 1], token_ids[i : i + 1], [count])[0]
        for i, count in enumerate(counts)
        if count is not None
    ]
    asked = [entry for entry in together if entry is not None]
    assert repr(asked) == repr(alone)  # of NaN too
    for threads in (1, 3):
        again = native_logprobs(native, logits, token_ids, counts, make_pool(threads))
        assert repr(again) == repr(together)


def test_nobody_asks(native):
    assert LogprobArray(2, 10).ask([None, None]) == 0


def test_arguments_that_make_no_sense(native):
    row = np.zeros(4, dtype=np.float32)
    logits = array("Q", [row.ctypes.data])

    def call(vocab_size: int = 4, token_id: int = 0, **fields: int) -> int:
        tokens, struct = array("i", [token_id]), abi.Logprobs(**fields)
        return native.lib.oct_logprob_rows(
            native.pool,
            1,
            vocab_size,
            logits.buffer_info()[0],
            tokens.buffer_info()[0],
            abi.ctypes.addressof(struct),
        )

    assert call() == abi.OCT_OK
    for arguments, word in [
        ({"vocab_size": 0}, "vocabulary"),
        ({"vocab_size": 2**19}, "vocabulary"),
        ({"token_id": 4}, "token 4"),
        ({"token_id": -1}, "token -1"),
        ({"num_top": 5, "top_ids": 1, "top": 1}, "first 5 of 4"),
        ({"num_top": 1}, "no room"),
    ]:
        assert call(**arguments) == abi.OCT_ERR_ARGUMENT
        assert word in native.library.last_error()
