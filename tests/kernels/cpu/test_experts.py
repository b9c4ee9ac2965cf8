"""Native experts: against the reference, and each token the same in any company."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from coded_weights import coded, scattered
from weights import stored

from octavo.base.errors import EngineError
from octavo.kernels import reference
from octavo.kernels.cpu import abi, layout, packing
from octavo.kernels.expert_places import deal_out
from octavo.kernels.parts import Part
from octavo.kernels.routing import CLAMPED_SWIGLU, ExpertWeights, RouterWeights, Routing
from octavo.quantization.levels import E2M1
from octavo.quantization.tensors import to_torch
from tests.kernels.cpu.conftest import LEVELS

HIDDEN, INNER = 64, 96
ROUTINGS = {
    "softmax": Routing(num_experts=9, top_k=4, normalize=False),
    "sigmoid": Routing(num_experts=5, top_k=2, scoring="sigmoid", scale=2.5),
    "groups": Routing(
        num_experts=8, top_k=3, scoring="sigmoid", num_groups=4, top_groups=2, group_top=2
    ),
}
EPILOGUES = {
    "silu": abi.OCT_EPI_SILU_MUL,
    "gelu_tanh": abi.OCT_EPI_GELU_TANH_MUL,
    "gelu": abi.OCT_EPI_GELU_ERF_MUL,
    CLAMPED_SWIGLU: abi.OCT_EPI_CLAMPED_SWIGLU,
}
SCORING = {"softmax": abi.OCT_SCORE_SOFTMAX, "sigmoid": abi.OCT_SCORE_SIGMOID}


class Case:
    """Random experts, as a file has them and packed, and what the reference makes of rows."""

    def __init__(self, native, routing, make=None, activation="silu", biases=False, seed=0):
        self.native, self.routing, self.activation = native, routing, activation
        self.rng = np.random.default_rng(seed)
        make = make or self.floats
        self.experts = [
            ExpertWeights(
                *(make(INNER, HIDDEN), make(INNER, HIDDEN), make(HIDDEN, INNER)),
                *((self.normal(n) if biases else None) for n in (INNER, INNER, HIDDEN)),
            )
            for _ in range(routing.num_experts)
        ]
        self.correction = 0.2 * self.normal(routing.num_experts)
        self.norm = 1 + 0.1 * self.normal(HIDDEN)
        self.packed = [
            [packing.pack(matrix, native.library, native.pool) for matrix in expert.matrices]
            for expert in self.experts
        ]
        self.loads = np.zeros(routing.num_experts, dtype=np.int64)

    def normal(self, *shape):
        return self.rng.normal(size=shape).astype(np.float32)

    def floats(self, n, k):
        return stored(torch.from_numpy(self.normal(n, k) / math.sqrt(k)))

    def inputs(self, rows):
        return self.normal(rows, HIDDEN), self.normal(rows, self.routing.num_experts)

    def arguments(self, x, logits, out, residual=None):
        def at(array):
            return None if array is None else array.ctypes.data

        experts = (abi.Expert * len(self.experts))()
        for target, expert, packed in zip(experts, self.experts, self.packed, strict=True):
            target.gate, target.up, target.down = (weight.as_struct() for weight in packed)
            target.gate_bias, target.up_bias = at(expert.gate_bias), at(expert.up_bias)
            target.down_bias = at(expert.down_bias)
        routing = self.routing
        args = abi.ExpertsArgs(
            hidden=HIDDEN,
            inner=INNER,
            num_hidden=HIDDEN,
            epilogue=EPILOGUES[self.activation],
            eps=1e-5,
            routing=abi.Routing(
                *(routing.num_experts, routing.top_k, SCORING[routing.scoring]),
                *(routing.normalize, routing.num_groups, routing.top_groups, routing.group_top),
                *(routing.scale, at(self.correction)),
            ),
            experts=experts,
            norm=at(self.norm),
            logits=at(logits),
            residual=at(residual),
            out=at(out),
            loads=at(self.loads),
        )
        setattr(args, "in", at(x))
        return args

    def run(self, x, logits, residual=None, pool=None):
        x, logits = np.ascontiguousarray(x), np.ascontiguousarray(logits)
        out = np.full_like(x, -7) if residual is None else residual
        args = self.arguments(x, logits, out, residual)
        pool = pool or self.native.pool
        self.native.check(self.native.lib.oct_experts(pool, ctypes.byref(args), len(x)))
        return out

    def expected(self, x, logits):
        """By the reference, of which the router is told its logits: they are its bias."""

        def tensors(expert):
            biases = (None if each is None else torch.from_numpy(each) for each in expert[3:])
            return ExpertWeights(*map(to_torch, expert.matrices), *biases)

        experts = [tensors(expert) for expert in self.experts]
        normed = reference.rmsnorm(torch.from_numpy(x), torch.from_numpy(self.norm), 1e-5)
        none = torch.zeros(self.routing.num_experts, HIDDEN)
        correction = torch.from_numpy(self.correction)
        rows = [
            reference.moe(
                row[None],
                RouterWeights(none, torch.from_numpy(bias), correction),
                experts,
                self.routing,
                self.activation,
            )
            for row, bias in zip(normed, logits, strict=True)
        ]
        return torch.cat(rows).numpy()


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("activation", EPILOGUES)
def test_near_the_reference(native, name, activation):
    case = Case(native, ROUTINGS[name], activation=activation, biases=True)
    x, logits = case.inputs(33)
    np.testing.assert_allclose(case.run(x, logits), case.expected(x, logits), atol=2e-5)


ORDERS = np.random.default_rng(3)
MXFP4 = {"bits": 4, "group_size": 32, "zeros": 0.0, "levels": E2M1}
FORMATS = {
    "bfloat16": lambda n, k: stored(torch.randn(n, k).bfloat16()),
    "float16": lambda n, k: stored(torch.randn(n, k).half()),
    "mxfp4": lambda n, k: coded(n, k, **MXFP4, seed=n),
    "gptq": lambda n, k: coded(n, k, 4, 32, seed=k),
    # The inputs of each matrix in an order of its own.
    "gptq-ordered": lambda n, k: scattered(coded(n, k, 4, 32, seed=k), ORDERS.permutation(k) // 32),
}


@pytest.mark.parametrize("format", FORMATS)
def test_weights_of_any_format(native, format):
    case = Case(native, ROUTINGS["softmax"], FORMATS[format])
    x, logits = case.inputs(12)
    expected = case.expected(x, logits)
    assert np.abs(case.run(x, logits) - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("format", ["bfloat16", "mxfp4", "gptq-ordered"])
def test_a_token_is_the_same_in_any_company(native, make_pool, format):
    """Steps of more rows than encode by themselves, of fewer, and alone; by one thread and 3."""
    case = Case(native, ROUTINGS["softmax"], FORMATS[format])
    x, logits = case.inputs(70)
    together = case.run(x, logits)
    for pool, rows in ((make_pool(1), 70), (make_pool(3), 9), (native.pool, 1)):
        for start in range(0, 70, max(rows, 7)):
            part = slice(start, start + rows)
            np.testing.assert_array_equal(
                case.run(x[part], logits[part], pool=pool), together[part]
            )


def test_the_residual_is_added_where_it_lies(native):
    case = Case(native, ROUTINGS["sigmoid"])
    x, logits = case.inputs(11)
    made = case.run(x, logits)
    residual = case.normal(11, HIDDEN)
    expected = residual + made
    np.testing.assert_array_equal(case.run(x, logits, residual=residual), expected)


def test_tokens_of_experts_are_counted(native):
    case = Case(native, Routing(num_experts=4, top_k=2))
    case.correction[:] = 0
    x, _ = case.inputs(3)
    logits = np.array([[9, 5, 0, 0], [0, 9, 5, 0], [9, 0, 5, 0]], dtype=np.float32)
    for times in (1, 2):
        case.run(x, logits)
        assert case.loads.tolist() == [2 * times, 2 * times, 2 * times, 0]


def test_what_is_no_number_is_seen_in_its_own_row_only(native):
    case = Case(native, ROUTINGS["groups"])
    x, logits = case.inputs(4)
    whole = case.run(x, logits)
    x[1, 5], logits[2, :] = np.nan, np.nan
    damaged = case.run(x, logits)
    assert np.isnan(damaged[1:3]).all()
    np.testing.assert_array_equal(damaged[[0, 3]], whole[[0, 3]])


@pytest.mark.parametrize("native", LEVELS[-1:], indirect=True)
def test_chunks_of_a_long_step_are_as_one(native):
    """A step of more rows than are kept at once."""
    case = Case(native, Routing(num_experts=2, top_k=2), FORMATS["bfloat16"])
    case.correction[:] = 0
    most = layout.experts_bytes(HIDDEN, INNER, 2, 1 << 30)
    rows = most // layout.experts_bytes(HIDDEN, INNER, 2, 1)
    x, logits = (np.tile(each, (rows // 100 + 2, 1)) for each in case.inputs(100))
    assert layout.experts_bytes(HIDDEN, INNER, 2, len(x)) == most < 33 << 20
    made = case.run(x, logits)
    np.testing.assert_array_equal(made, np.tile(made[:100], (len(x) // 100, 1)))


# -- whole experts on several ranks ---------------------------------------------------------------


class Ranks:
    """The ranks of a group that have whole experts, one after the other, without a group: all run
    twice, so that the second time each finds the rows that the others made the first time."""

    def __init__(self, case: Case, places):
        self.case = case
        begin = np.cumsum([0, *map(len, places)], dtype=np.int32)
        ranks = np.array([rank for each in places for rank in each], dtype=np.int32)
        self.places, self.begin, self.ranks = places, begin, ranks
        self.size = max(ranks) + 1
        self.rows = np.zeros(self.size + 1, dtype=np.int64)  # that rank 0 counts

    def arguments(self, rank, x, logits, out, output_rows):
        args = self.case.arguments(x, logits, out)
        for expert, ranks in enumerate(self.places):
            if rank not in ranks:
                args.experts[expert] = abi.Expert()  # which it must not read
        columns = Part(rank, self.size).of_rows(HIDDEN)
        args.first_hidden, args.num_hidden = columns.start, len(columns)
        args.output_rows = output_rows.ctypes.data
        args.places = abi.ExpertPlaces(
            *(rank, self.size, self.begin.ctypes.data, self.ranks.ctypes.data),
            self.rows.ctypes.data if rank == 0 else None,
        )
        return args

    def run(self, x, logits):
        """The outputs of all together, and how many rows of experts each of them computed."""
        native, num_rows = self.case.native, len(x) * self.case.routing.top_k
        out, rows = np.full_like(x, np.nan), np.full((num_rows, HIDDEN), np.nan, dtype=np.float32)
        computed = []
        for turn in range(2):
            for rank in range(self.size):
                before = int(np.isnan(rows[:, 0]).sum())
                args = self.arguments(rank, x, logits, out, rows)
                native.check(native.lib.oct_experts(native.pool, ctypes.byref(args), len(x)))
                if turn == 0:
                    computed.append(before - int(np.isnan(rows[:, 0]).sum()))
        return out, computed


def spread(num_experts, size):
    """Places of experts among ranks: one after the other, and some of them on several."""
    alone = deal_out(num_experts, size)
    repeated = tuple(
        tuple(sorted({*ranks, *((e + 1) % size for _ in range(e % 3 == 0))}))
        for e, ranks in enumerate(alone)
    )
    return {"alone": alone, "repeated": repeated, "everywhere": (tuple(range(size)),) * num_experts}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("format", ["float32", *FORMATS])
@pytest.mark.parametrize("kind", ["alone", "repeated", "everywhere"])
def test_ranks_with_whole_experts_make_the_bits_of_one(native, size, format, kind):
    """Steps of more rows than encode by themselves, and of fewer; 9 experts come out even on no
    ranks but 3."""
    case = Case(native, ROUTINGS["softmax"], FORMATS.get(format), biases=True)
    ranks = Ranks(case, spread(9, size)[kind])
    for num_rows in (70, 5, 1):
        x, logits = case.inputs(num_rows)
        expected = case.run(x, logits)
        made, computed = ranks.run(x, logits)
        np.testing.assert_array_equal(made, expected)
        assert sum(computed) == num_rows * case.routing.top_k, "each row is computed by one rank"
        turns = 2  # of the same rows
        assert ranks.rows.tolist() == [turns * rows for rows in (*computed, max(computed))]
        ranks.rows[:] = 0


def test_copies_of_an_expert_share_its_rows(native):
    """All tokens go to two experts, of which the ranks have two copies each."""
    case = Case(native, Routing(num_experts=4, top_k=2))
    case.correction[:] = 0
    x = case.normal(80, HIDDEN)
    logits = np.tile(np.array([9, 5, 0, 0], dtype=np.float32), (80, 1))
    _, computed = Ranks(case, ((0, 1), (0, 1), (0,), (1,))).run(x, logits)
    assert computed == [80, 80]
    # So few rows as one product takes at once stay together; the next expert goes to the other.
    _, computed = Ranks(case, ((0, 1), (0, 1), (0,), (1,))).run(x[:6], logits[:6])
    assert computed == [6, 6]


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (((0,), (0, 1), (), (1,), (1,)), "expert 2 is with no ranks"),
        (((0,), (1, 0), (0,), (1,), (1,)), "expert 1 is with"),
        (((0,), (0, 1), (0,), (-1,), (1,)), "expert 3 is with"),
    ],
)
def test_places_that_make_no_sense_are_refused(native, places, said):
    case = Case(native, ROUTINGS["sigmoid"])
    x, logits = case.inputs(2)
    rows = np.zeros((4, HIDDEN), dtype=np.float32)
    args = Ranks(case, places).arguments(0, x, logits, np.zeros_like(x), rows)
    with pytest.raises(EngineError, match=said):
        native.check(native.lib.oct_check_experts(ctypes.byref(args)))


def test_an_expert_of_this_rank_must_be_whole(native):
    case = Case(native, ROUTINGS["sigmoid"])
    x, logits = case.inputs(2)
    ranks = Ranks(case, deal_out(5, 2))
    rows = np.zeros((4, HIDDEN), dtype=np.float32)
    args = ranks.arguments(0, x, logits, np.zeros_like(x), rows)
    args.experts[1].down.n = 32
    with pytest.raises(EngineError, match="expert 1 has 96 and 96 inner values and 32 outputs"):
        native.check(native.lib.oct_check_experts(ctypes.byref(args)))
    args = ranks.arguments(0, x, logits, np.zeros_like(x), rows)
    args.output_rows = None
    with pytest.raises(EngineError, match="share output_rows"):
        native.check(native.lib.oct_check_experts(ctypes.byref(args)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda args: setattr(args.routing, "top_k", 10), "10 of 9 experts"),
        (lambda args: setattr(args.routing, "num_groups", 2), "2 groups"),
        (lambda args: setattr(args.experts[3].up, "n", 80), "expert 3 has "),
        (lambda args: setattr(args, "epilogue", abi.OCT_EPI_RESIDUAL), "the epilogue 1"),
        (lambda args: setattr(args, "out", getattr(args, "in")), "out is the input"),
    ],
)
def test_experts_that_make_no_sense_are_refused(native, change, said):
    case = Case(native, ROUTINGS["softmax"])
    x, logits = case.inputs(2)
    args = case.arguments(x, logits, np.zeros_like(x))
    change(args)
    with pytest.raises(EngineError, match=said):
        native.check(native.lib.oct_check_experts(ctypes.byref(args)))
