"""Whatever a manifest says, it is a model that runs within its bounds, or an OctavoError.

A folder that is let through is run; and its structs, which are all that the kernels see, are walked
by what csrc/octavo.h says of them, without asking the code that has read the manifest.
"""

from __future__ import annotations

import copy
import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import OctavoError
from octavo.base.model_files import ENGINE_MANIFEST
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.layout import packed_bytes
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder.folder import EngineFolder

MAX_TOKENS = 7
EXTREMES = [
    *(None, True, False, "", "x", [], {}, 0, 1, 2, 3, -1, 15, 16, 17, 48, 64, 80, 96, 260),
    *(1 << 16, 1 << 24, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 63, 10**400),
    *(0.0, 1e-320, 1e308, -1.0, float("inf"), float("nan")),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every entry, and of every list and table."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            found += places(value[key], (*path, key))
    return found


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@pytest.fixture(scope="module")
def sound(tiny_engine) -> dict[str, Any]:
    return json.loads((tiny_engine / ENGINE_MANIFEST).read_text())


@pytest.fixture(scope="module")
def target(tiny_engine, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "engine"
    shutil.copytree(tiny_engine, folder)
    return folder


def run(folder: Path, notes: Path) -> None:
    """Start a folder as ``load_engine`` does, hold its structs against their memory, and take a
    step of some tokens. OctavoError if it is refused."""
    engine = EngineFolder(folder, notes)
    args = engine.settings(EngineArgs(model=str(folder)))
    config = engine.config()
    spec = RankSpec(folder, threads=1, kv_cache_dtype=args.kv_cache_dtype)
    rank = engine.load_rank(spec)
    limits = RankLimits(
        num_blocks=4, max_num_seqs=2, max_model_len=32, max_num_batched_tokens=MAX_TOKENS
    )
    rank.start(limits)
    program = rank.runner.forward.program
    walk(program, config)
    step(program, [0, config.vocab_size - 1, 1])


def step(program: Any, token_ids: list[int]) -> None:
    count = len(token_ids)
    int32s = ctypes.c_int32 * 8
    arrays = {
        "q_start": int32s(0, count),
        "kv_len": int32s(count),
        "block_table": int32s(1, 2),
        "token_ids": int32s(*token_ids),
        "out_rows": int32s(count - 1),
        "logits": (ctypes.c_uint64 * 8)(),
        "tokens": int32s(),
        "status": int32s(),
        "row_finite": (ctypes.c_uint8 * 8)(),
    }
    addresses = {name: ctypes.addressof(array) for name, array in arrays.items()}
    sequences = abi.Sequences(
        num_seqs=1,
        num_tokens=count,
        table_stride=2,
        block_size=16,
        **{name: addresses.pop(name) for name in ("q_start", "kv_len", "block_table")},
    )
    samples = (abi.Sample * 1)()
    batch = abi.Batch(seqs=sequences, num_multi_steps=1, num_out=1, samples=samples, **addresses)
    program.step(batch, count)


# -- what the kernels touch -----------------------------------------------------------------------


def walk(program: Any, config: Any) -> None:
    """Every address of a program's structs is in memory of the program's, and all that is read or
    written from there on."""
    buffers = program._buffers
    begin = buffers._memory[False].ctypes.data
    end = begin + len(buffers._memory[False])
    kept = {array.ctypes.data: array.nbytes for array in program._kept if hasattr(array, "ctypes")}
    program._extend_tables(MAX_TOKENS)

    def activations(address: int, width: int, stride: int | None = None) -> None:
        rows = (MAX_TOKENS - 1) * (stride or width) + width
        assert begin <= address and address + 4 * rows <= end

    def constant(address: int | None, count: int) -> None:
        assert address is None or kept[address] >= 4 * count

    def weight(struct: abi.Weight) -> None:
        size = packed_bytes(struct.format, struct.n, struct.k, struct.group)
        assert struct.data % 64 == 0
        size += 4 * struct.k if struct.columns else 0
        assert any(b <= struct.data and struct.data + size <= b + n for b, n in mapped_weights())
        if struct.columns:
            assert struct.columns == struct.data + size - 4 * struct.k
            columns = (ctypes.c_int32 * struct.k).from_address(struct.columns)
            assert sorted(columns) == list(range(struct.k))

    struct = program._struct
    assert struct.vocab == config.vocab_size and struct.num_head_nodes == 1
    for index in range(struct.num_nodes):
        node = struct.nodes[index]
        match node.op:
            case abi.OCT_OP_EMBED:
                args = abi.EmbedArgs.from_address(node.args)
                weight(args.table)
                assert args.table.n >= struct.vocab
                if args.positions.data:
                    weight(args.positions)
                    assert args.positions.k == args.table.k
                activations(args.out, args.table.k)
            case abi.OCT_OP_LINEAR | abi.OCT_OP_HEAD:
                args = abi.LinearArgs.from_address(node.args)
                is_head = node.op == abi.OCT_OP_HEAD
                activations(getattr(args, "in"), args.k, args.ldin)
                for address in filter(None, (args.add, args.x_out)):
                    activations(address, args.k, args.ldin)
                constant(args.norm, args.k)
                constant(args.add_norm, args.k)
                for number in range(args.num_segments):
                    segment = args.segments[number]
                    weight(segment.weight)
                    assert segment.weight.k == args.k
                    constant(segment.bias, segment.weight.n)
                    if segment.y and not is_head:
                        activations(segment.y, segment.weight.n, segment.ldy)
                if args.residual:
                    activations(args.residual, args.segments[0].weight.n, args.segments[0].ldy)
                assert not is_head or args.segments[0].weight.n == struct.vocab
            case abi.OCT_OP_ATTENTION:
                args = abi.AttentionArgs.from_address(node.args)
                queries, keys = (n * args.head_dim for n in (args.num_heads, args.num_kv_heads))
                activations(args.q, queries, args.ldq)
                activations(args.k, keys, args.ldk)
                activations(args.v, keys, args.ldv)
                activations(args.out, queries)
                constant(args.q_norm, args.head_dim)
                constant(args.k_norm, args.head_dim)
                constant(args.sinks, args.num_heads)
                assert (args.num_kv_heads, args.head_dim) == (config.num_kv_heads, config.head_dim)
                assert args.kv in program.kv.layers
                assert args.kv_block_bytes == program.kv.block_bytes
                tables = [t for t in program._cos_sin if t.ctypes.data == args.cos_sin]
                assert all(t.shape[0] >= MAX_TOKENS for t in tables)
                assert not args.rotary_dim or tables[0].shape[1] == args.rotary_dim
            case abi.OCT_OP_ROWS:
                args = abi.RowsArgs.from_address(node.args)
                width = args.width * args.per_token
                activations(args.a, width)
                activations(args.out, width)
                if args.kind in (abi.OCT_ROWS_NORM, abi.OCT_ROWS_LAYERNORM):
                    constant(args.b, args.width)
                    constant(args.bias, args.width)
                elif args.kind < abi.OCT_ROWS_LAYERNORM:
                    activations(args.b, width)
            case abi.OCT_OP_CHECK:
                args = abi.CheckArgs.from_address(node.args)
                activations(args.x, args.width)
            case _:
                raise AssertionError(node.op)


def mapped_weights() -> list[tuple[int, int]]:
    """Where this process has mapped files of weights."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("weights.packed"):
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            found.append((begin, end - begin))
    return found


# -- folders --------------------------------------------------------------------------------------


def attempt(target: Path, document: dict[str, Any]) -> bool:
    """Whether a folder with this manifest is let through."""
    (target / ENGINE_MANIFEST).write_text(json.dumps(document))
    try:
        run(target, target.parent / "notes")
    except OctavoError:
        return False
    return True


def test_the_manifest_that_is_changed_is_sound(target, sound):
    assert attempt(target, sound)


@given(data=st.data())
@settings(max_examples=160, deadline=None)
def test_changed_values(target, sound, data):
    """Values that are replaced by extremes, by their neighbours, and by each other."""
    document = copy.deepcopy(sound)
    sections = [(name,) for name in sound] + [("program", "phases")] * 6
    sections += [("weights",), ("constants",), ("model",)] * 3
    for _ in range(data.draw(st.integers(1, 2))):
        section = data.draw(st.sampled_from(sections))
        path = data.draw(st.sampled_from([section, *places(at(document, section), section)]))
        old = at(document, path)
        choices = [*EXTREMES]
        if isinstance(old, int) and not isinstance(old, bool):
            choices += [old + 1, old - 1, old * 2, old // 2, old + 64] * 3
        others = [p for p in places(at(document, section), section) if p[-1] == path[-1]]
        new = data.draw(
            st.sampled_from(choices)
            | (st.sampled_from(others).map(lambda p: at(document, p)) if others else st.nothing())
        )
        at(document, path[:-1])[path[-1]] = copy.deepcopy(new)
    attempt(target, document)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_phases_out_of_order(target, sound, data):
    """Taken out, doubled, and moved: what reads what was not written is refused."""
    document = copy.deepcopy(sound)
    phases = document["program"]["phases"]
    where = data.draw(st.integers(0, len(phases) - 1))
    match data.draw(st.sampled_from(["out", "doubled", "moved"])):
        case "out":
            del phases[where]
        case "doubled":
            phases.insert(data.draw(st.integers(0, len(phases))), copy.deepcopy(phases[where]))
        case "moved":
            phases.insert(data.draw(st.integers(0, len(phases) - 1)), phases.pop(where))
    is_same = phases == sound["program"]["phases"]
    assert attempt(target, document) == is_same


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_values_of_another_size(target, sound, data):
    """All who name a value agree on its size, which is not that of what writes it."""
    document = copy.deepcopy(sound)
    widths, phases = document["program"]["values"], document["program"]["phases"]
    number = data.draw(st.integers(0, len(widths) - 1))
    old, new = widths[number], data.draw(st.sampled_from([1, 16, 32, 64, 80, 128, 1 << 20]))
    widths[number] = new
    for path in places(phases):
        value = at(phases, path)
        if isinstance(value, list) and value[:1] == [number] and len(value) in (2, 3):
            value[1:] = [-(-new // value[2]), value[2]] if len(value) == 3 else [new]
    assert attempt(target, document) == (new == old)


def test_summands_are_of_one_size(target, sound):
    """x + y goes to a place of its own, and from there through the weights."""
    for added, sum_width in (([2, 32], 48), ([1, 96], 48), ([0, 48], 32)):
        document = copy.deepcopy(sound)
        program = document["program"]
        program["values"] += [sum_width, 96]
        number = len(program["values"]) - 2
        segment = {"weight": "model.layers.0.self_attn.q_proj.weight", "out": [number + 1, 96]}
        linear = {"kind": "linear", "source": [0, 48], "added": added}
        linear |= {"sum_out": [number, sum_width], "segments": [segment]}
        program["phases"].insert(2, linear)
        assert not attempt(target, document)
        del linear["added"], linear["sum_out"]
        assert attempt(target, document)


def test_operands_of_rows_are_of_one_size(target, sound):
    for other, is_sound in (([0, 48], True), ([1, 96], False)):
        document = copy.deepcopy(sound)
        program = document["program"]
        program["values"].append(48)
        out = [len(program["values"]) - 1, 48]
        add = {"kind": "rows", "op": "add", "a": [0, 48], "b": other, "out": out}
        program["phases"].insert(2, add)
        assert attempt(target, document) == is_sound


def test_every_layer_attends(target, sound):
    """Of one that does not, the KV would be whatever memory was before."""
    document = copy.deepcopy(sound)
    document["model"]["num_layers"] += 1
    document["model"]["layer_windows"].append(None)
    (target / ENGINE_MANIFEST).write_text(json.dumps(document))
    with pytest.raises(OctavoError, match="attend in 2 of 3 layers"):
        run(target, target.parent / "notes")


def test_a_phase_writes_no_more_than_there_is_room_for(target, sound):
    """A value that nobody else speaks of."""
    for width, is_sound in ((48, True), (47, False), (1, False), (64, False)):
        document = copy.deepcopy(sound)
        program = document["program"]
        number = len(program["values"])
        program["values"].append(width)
        weight = "model.layers.0.self_attn.q_proj.weight"  # [96, 48]
        norm = {"kind": "rows", "op": "norm", "a": [0, 48], "out": [number, width]}
        norm["norm"] = program["phases"][1]["norm"]
        program["phases"].insert(1, norm)
        assert attempt(target, document) == is_sound, width
        assert document["weights"][weight][1:3] == [96, 48]
        program["values"][number] = 2 * width
        linear = {"kind": "linear", "source": [0, 48]}
        linear["segments"] = [{"weight": weight, "out": [number, 2 * width]}]
        program["phases"][1] = linear
        assert attempt(target, document) == is_sound, width


@given(
    text=st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)
)
@settings(max_examples=60, deadline=None)
def test_any_text(target, text):
    (target / ENGINE_MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(OctavoError):
        run(target, target.parent / "notes")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("weights", "model.embed_tokens.weight", 1), 4096, "are not in a file of"),
        (("weights", "model.embed_tokens.weight", 4), 1 << 40, "are not in a file of"),
        (("weights", "model.embed_tokens.weight", 4), 8, "are not in a file of"),
        (("weights", "model.embed_tokens.weight", 5), 1, "are not those of 48 inputs"),
        (("weights", "model.embed_tokens.weight", 0), 99, "model.embed_tokens.weight"),
        (("weights", "model.embed_tokens.weight", 0), abi.OCT_STORED, "none of packed weights"),
        (("constants", 0, 0), 1 << 30, r"constants\[0\]"),
        (("constants", 0, 1), 47, "has the shape"),
        (("program", "phases", 0, "kind"), "run", r"phases\[0\].kind"),
        (("program", "phases", 0, "weight"), "other", r"phases\[0\].weight.*no weight 'other'"),
        (("program", "phases", 1, "remainder_above"), -2, r"phases\[1\].remainder_above"),
        (("program", "phases", 1, "source"), [1, 96], "read before an op writes it"),
        (("program", "phases", 1, "source"), [0, 47], "cannot be seen as"),
        (("program", "phases", 1, "source"), [10**6, 48], "there are [0-9]+ values"),
        (("program", "phases", 2, "layer"), 2, r"phases\[2\].layer"),
        (("program", "phases", 2, "q"), [1, 3, 32], "has the shape"),
        (("program", "phases", 2, "rope"), 1, "ropes"),
        (("program", "phases", 2, "window"), 1 << 31, "window"),
        (("program", "phases", 3, "residual"), [1, 96], "residual.*not of the size"),
        (("program", "phases", -1, "source"), [1, 96], "source.*has the shape"),
        (("program", "phases", -2, "source"), [1, 6, 16], "source.*has the shape"),
        (("program", "phases", 4, "activation"), "tanh", "activation"),
        (("program", "phases", 4, "segments"), [], "segments"),
        (("program", "phases", 1, "segments"), [], "segments"),
        (("program", "ropes", 0, "config"), "name", "the model has no"),
        (("model", "num_kv_heads"), 6, "has the shape"),
        (("model", "num_layers"), 1, "layer_windows"),
        (("model", "head_dim"), 24, "has the shape"),
        (("model", "vocab_size"), 10**6, "rows for a vocabulary"),
        (("model", "rope", "rotary_dim"), 18, "rotated"),
        (("model", "rope", "scaling"), "longrope", "angles"),
        (("model", "architecture"), "Other", "Other"),
    ],
)
def test_what_is_wrong_is_named(target, sound, path, value, words):
    document = copy.deepcopy(sound)
    entry = at(document, path[:-1])
    assert path[-1] == "window" or entry[path[-1]] != value
    entry[path[-1]] = value
    (target / ENGINE_MANIFEST).write_text(json.dumps(document))
    with pytest.raises(OctavoError, match=words) as caught:
        run(target, target.parent / "notes")
    assert ENGINE_MANIFEST in str(caught.value) or "heads of 24" in str(caught.value)
