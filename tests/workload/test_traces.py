"""Formats are read as they are published, and what one can hold survives being written."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.base.errors import BenchmarkError, ConfigError
from octavo.workload.trace_formats import FORMATS
from octavo.workload.traces import (
    KINDS,
    ServiceLevel,
    TraceEntry,
    WorkloadFileError,
    detect_trace,
    lost_fields,
    read_trace,
    statistics,
    to_requests,
    with_block_size,
    write_trace,
)

MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 13]}
{"timestamp": 27482, "input_length": 600, "output_length": 7, "hash_ids": [0, 14]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00.0000001,879,55
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURSTGPT_OLD = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118,ChatGPT,417,276,693,API log
"""
BURSTGPT_NEW = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,17,1.25,ChatGPT,472,18,490,Conversation log
45,,,GPT-4,1087,230,1317,API log
"""
VIDUR = """\
arrived_at,num_prefill_tokens,num_decode_tokens
0.1234567890123,100,10
2,200.0,20
"""
SPLITWISE = """\
request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,0.25,1,1155,211
1,2,0,0.5,1,20,7
"""
BAILIAN = """\
{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 35, \
"output_length": 132, "type": "text", "turn": 1, "hash_ids": [4, 5, 6]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 70, "input_length": 60, \
"output_length": 9, "type": "text", "turn": 2, "hash_ids": [4, 5, 7, 8]}
{"chat_id": 161, "parent_chat_id": 160, "timestamp": 80, "input_length": 70, \
"output_length": 9, "type": "search", "turn": 3, "hash_ids": []}
"""
OCTAVO = """\
{"timestamp": 1.5, "input_length": 3, "output_length": 2, "session_id": "a", "turn": 1, \
"think_ms": 20, "priority": -1, "slo": {"ttft_ms": 200, "e2e_ms": 1000.5}, "prompt": "Hi \\u2028", \
"seed": 4}

{"timestamp": 1.5, "input_length": 3, "output_length": 2, "hash_ids": [1], "block_size": 4}
"""

EXAMPLES = {
    "mooncake": MOONCAKE,
    "azure": AZURE,
    "burstgpt": BURSTGPT_NEW,
    "vidur": VIDUR,
    "splitwise": SPLITWISE,
    "bailian": BAILIAN,
    "octavo": OCTAVO,
}


@pytest.fixture
def trace(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# -- reading --------------------------------------------------------------------------------------


def test_mooncake(trace) -> None:
    first, second = read_trace(trace(MOONCAKE))
    assert first == TraceEntry(0.0, 6758, 500, (0, 1, 2, 13))
    assert second == TraceEntry(27.482, 600, 7, (0, 14))


def test_azure_counts_from_its_first_row_in_100_ns(trace) -> None:
    assert read_trace(trace(AZURE)) == [
        TraceEntry(0.0, 374, 44),
        TraceEntry(4.314579, 396, 109),
        TraceEntry(20653.3194101, 879, 55),
    ]
    first, second = read_trace(trace(AZURE_2024))
    assert second.arrival_s - first.arrival_s == 0.99007


def test_azure_with_an_earlier_row_later(trace) -> None:
    head, *rows = AZURE.splitlines()
    shuffled = "\n".join([head, rows[1], rows[0], rows[2]])
    assert read_trace(trace(shuffled)) == read_trace(trace(AZURE))


def test_burstgpt_by_the_names_of_its_columns(trace) -> None:
    assert read_trace(trace(BURSTGPT_OLD)) == [
        TraceEntry(5.0, 472, 18, model="ChatGPT", log_type="Conversation log"),
        TraceEntry(118.0, 417, 276, model="ChatGPT", log_type="API log"),
    ]
    first, second = read_trace(trace(BURSTGPT_NEW))
    assert (first.session_id, first.elapsed_s, first.input_len) == ("17", 1.25, 472)
    assert (second.session_id, second.elapsed_s, second.input_len) == (None, None, 1087)


def test_burstgpt_failures_are_kept_if_asked(trace) -> None:
    kept = read_trace(trace(BURSTGPT_OLD), keep_failures=True)
    assert [entry.output_len for entry in kept] == [18, 0, 276]
    assert len(read_trace(trace(BURSTGPT_OLD), limit=2)) == 2  # of those that count


def test_vidur_splitwise_and_bailian(trace) -> None:
    assert read_trace(trace(VIDUR)) == [
        TraceEntry(0.1234567890123, 100, 10),
        TraceEntry(2.0, 200, 20),
    ]
    assert read_trace(trace(SPLITWISE)) == [TraceEntry(0.25, 1155, 211), TraceEntry(0.5, 20, 7)]
    entries = read_trace(trace(BAILIAN))
    assert [entry.arrival_s for entry in entries] == [61.114, 70.0, 80.0]
    assert [entry.session_id for entry in entries] == ["159"] * 3
    assert [entry.turn for entry in entries] == [1, 2, 3]
    assert {entry.block_size for entry in entries} == {16}


def test_octavo_has_more_fields_than_mooncake(trace) -> None:
    first, second = read_trace(trace(OCTAVO))
    assert first == TraceEntry(
        0.0015,
        3,
        2,
        session_id="a",
        turn=1,
        think_ms=20,
        priority=-1,
        slo=ServiceLevel(ttft_ms=200, e2e_ms=1000.5),
        prompt="Hi \u2028",
        seed=4,
    )
    assert second.block_size == 4


@pytest.mark.parametrize("kind", KINDS)
def test_formats_are_recognised(trace, kind: str) -> None:
    path = trace("\n" + EXAMPLES[kind] if kind != "vidur" else "\ufeff" + EXAMPLES[kind])
    assert detect_trace(path) == kind
    assert read_trace(path, "auto") == read_trace(path, kind)


def test_a_format_may_be_said(trace) -> None:
    """vLLM's timed traces have Mooncake's fields with seconds in them, or any others."""
    chats = [{"chat_id": i, **json.loads(line)} for i, line in enumerate(MOONCAKE.splitlines())]
    path = trace("".join(json.dumps(chat) + "\n" for chat in chats))
    assert read_trace(path)[1].arrival_s == 27482.0
    assert read_trace(path, "mooncake")[1].arrival_s == 27.482
    with pytest.raises(ConfigError, match="'weka' is no kind of trace: choose from octavo"):
        read_trace(path, "weka")


def test_rows_are_sorted_and_ties_stay(trace) -> None:
    rows = [(3, 1), (1, 2), (3, 3), (1, 4), (2, 5)]
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    text += "".join(f"{at},{length},1\n" for at, length in rows)
    entries = read_trace(trace(text))
    assert [(e.arrival_s, e.input_len) for e in entries] == sorted(rows, key=lambda row: row[0])
    assert [e.input_len for e in read_trace(trace(text), limit=3)] == [2, 1, 3]


def test_no_more_is_read_than_is_needed(trace) -> None:
    path = trace(MOONCAKE + "this is no JSON\n")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(WorkloadFileError, match="trace:3: not a JSON object"):
        read_trace(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["sh", "-c", 'printf "%s" "$1" > "$2"', "sh", MOONCAKE, str(pipe)])
    assert len(read_trace(pipe)) == 2
    assert writer.wait(timeout=10) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace:1: no trace format has this first line. Expected octavo: timestamp"),
        ("a,b,c\n1,2,3\n", r"trace:1: no trace format has this first line"),
        ("[1]\n", r"trace:1: no trace format"),
        ('{"timestamp": 1}\n', r"trace:1: no trace format"),
        ("{broken\n", r"trace:1: not a JSON object"),
        (MOONCAKE + "[]\n", r"trace:3: a JSON list, where an object"),
        (MOONCAKE + "[" * 100_000, r"trace:3: "),
        (MOONCAKE.replace("27482", "NaN"), r"trace:2: .*NaN is no JSON"),
        (MOONCAKE.replace("27482", "-1"), r"trace:2: timestamp is -1, not a number from 0 on"),
        (MOONCAKE.replace("27482", "1e999"), r"trace:2: timestamp is inf"),
        (MOONCAKE.replace("27482", "9" * 400), r"trace:2: timestamp is 99"),
        (MOONCAKE.replace("27482", "true"), r"trace:2: timestamp is True"),
        (MOONCAKE.replace('"input_length": 600,', ""), r"trace:2: input_length is None"),
        (MOONCAKE.replace("600", "6.5"), r"trace:2: input_length is 6.5, not a whole number"),
        (MOONCAKE.replace("600", "9999999999"), r"trace:2: input_length is 9999999999, not"),
        (MOONCAKE.replace("[0, 14]", '"x"'), r"trace:2: hash_ids is not a list of whole numbers"),
        (OCTAVO.replace("ttft_ms", "fast"), r"trace:1: slo is .* not an object with ttft_ms"),
        (OCTAVO.replace('"block_size": 4', '"block_size": 0'), r"trace:3: block_size is 0, not"),
        (AZURE.replace("2023-11-17", "2023-13-17"), r"trace:4: TIMESTAMP is '2023-13-17 00"),
        (AZURE.replace("2023-11-17 00:", "noon "), r"trace:4: TIMESTAMP .* such as 2023-11-16 18:"),
        (AZURE.replace(",55", ""), r"trace:4: 2 columns, where the first line has 3"),
        (AZURE.replace(",55", ","), r"trace:4: GeneratedTokens is None, not a whole number"),
        (VIDUR.replace("2,200.0", "2,many"), r"trace:3: num_prefill_tokens is 'many'"),
        (VIDUR + '"1\n', r"trace:4: not CSV: "),
        (SPLITWISE.replace("0.5,1", "0.5,8"), r"trace:3: batch_size is 8; only rows of one"),
        (AZURE.splitlines()[0] + "\n", r"trace: there is no request in this trace"),
    ],
)
def test_damage_is_named_with_its_line(trace, text: str, message: str) -> None:
    with pytest.raises(WorkloadFileError, match=message):
        read_trace(trace(text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WorkloadFileError, match="nowhere: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(WorkloadFileError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b'{"timestamp\xff')
    with pytest.raises(WorkloadFileError, match="is not text in UTF-8"):
        read_trace(tmp_path / "binary")
    path = tmp_path / "short"
    path.write_text("Timestamp,Model\n1,2\n")
    with pytest.raises(WorkloadFileError, match="short:1: the first line has no column Request"):
        read_trace(path, "burstgpt")


# -- writing --------------------------------------------------------------------------------------

lengths = st.integers(0, 2**31 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ticks = st.integers(0, 10**14).map(lambda n: n / 10**7)  # 100 ns, up to four months
amounts = st.floats(0, 1e9)


ALL_FIELDS = frozenset(field.name for field in dataclasses.fields(TraceEntry))


def maybe(values):
    return st.none() | values


def entries_of(kind: str) -> st.SearchStrategy[TraceEntry]:
    """Entries as ``kind`` can hold them: the rest is left at its default."""
    size = FORMATS[kind].block_size
    values = {
        "arrival_s": amounts if kind in ("vidur", "splitwise", "burstgpt") else ticks,
        "input_len": lengths,
        "output_len": lengths,
        "hash_ids": st.lists(st.integers(0, 2**63), max_size=4).map(tuple),
        "block_size": st.integers(1, 4096) if size is None else st.just(size),
        "prompt": maybe(st.just("") | names),
        "session_id": maybe(names),
        "turn": maybe(st.integers(0, 2**31 - 1)),
        "think_ms": maybe(amounts),
        "priority": maybe(st.integers(-(2**63), 2**63)),
        "slo": maybe(st.builds(ServiceLevel, maybe(amounts), maybe(amounts), maybe(amounts))),
        "seed": maybe(st.integers()),
        "model": maybe(names),
        "log_type": maybe(names),
        "elapsed_s": maybe(amounts),
    }
    held = FORMATS[kind].holds
    return st.builds(TraceEntry, **{name: values[name] for name in values if name in held})


def traces_of(kind: str) -> st.SearchStrategy[list[TraceEntry]]:
    traces = st.lists(entries_of(kind), min_size=1, max_size=5)
    if kind == "azure":  # which knows no time zero
        return traces.map(lambda t: [dataclasses.replace(t[0], arrival_s=0.0), *t[1:]])
    return traces


def held(entry: TraceEntry, kind: str) -> TraceEntry:
    """With what only this format adds put away: Bailian names every chat."""
    other = ALL_FIELDS - FORMATS[kind].holds - {"block_size"}
    defaults = {f.name: f.default for f in dataclasses.fields(TraceEntry) if f.name in other}
    return dataclasses.replace(entry, **defaults)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_format_holds_survives(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(traces_of(kind))
    def check(entries: list[TraceEntry]) -> None:
        assert lost_fields(entries, kind) == []
        write_trace(path, kind, entries)
        read = read_trace(path, kind, keep_failures=True)
        wanted = sorted(entries, key=lambda entry: entry.arrival_s)
        assert [held(entry, kind) for entry in read] == wanted

    check()


@given(traces_of("mooncake"))
@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_mooncake_to_octavo_and_back(tmp_path: Path, entries: list[TraceEntry]) -> None:
    first, own, again = tmp_path / "first", tmp_path / "own", tmp_path / "again"
    write_trace(first, "mooncake", sorted(entries, key=lambda entry: entry.arrival_s))
    write_trace(own, "octavo", read_trace(first, "mooncake"))
    write_trace(again, "mooncake", read_trace(own, "octavo"))
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mooncake", MOONCAKE),
        ("burstgpt", BURSTGPT_OLD.replace("45,GPT-4,1087,0,1087,API log\n", "")),
        ("splitwise", SPLITWISE),
    ],
)
def test_files_are_written_as_published(trace, tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "out"
    write_trace(path, kind, read_trace(trace(text)))
    assert path.read_text() == text


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_any_format_becomes_any_other(trace, tmp_path: Path, source: str, target: str) -> None:
    entries = read_trace(trace(EXAMPLES[source]))
    if source == "octavo":
        entries = [dataclasses.replace(entry, block_size=512) for entry in entries]
    write_trace(tmp_path / "out", target, entries)
    again = read_trace(tmp_path / "out")
    start = entries[0].arrival_s if target == "azure" else 0.0
    digits = 9 if target in ("vidur", "splitwise", "burstgpt") else 7
    assert [(e.arrival_s, e.input_len, e.output_len) for e in again] == [
        (pytest.approx(e.arrival_s - start, abs=10**-digits), e.input_len, e.output_len)
        for e in entries
    ]


def test_sessions_of_bailian_stay_together(tmp_path: Path) -> None:
    sessions = ["x", "y", "x", None, "y", "x"]
    entries = [TraceEntry(float(i), 10, 5, session_id=s) for i, s in enumerate(sessions)]
    write_trace(tmp_path / "out", "bailian", entries)
    read = [entry.session_id for entry in read_trace(tmp_path / "out")]
    assert read == ["0", "1", "0", "3", "1", "0"]
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["parent_chat_id"] for row in rows] == [-1, -1, 0, -1, 1, 2]
    assert lost_fields(entries, "bailian") == ["session_id"]  # the names


def test_what_is_lost_is_said() -> None:
    entries = [TraceEntry(0, 1, 1), TraceEntry(0, 1, 1, (5,), block_size=16, model="m", turn=2)]
    assert lost_fields(entries, "azure") == ["hash_ids", "model", "turn"]
    assert lost_fields(entries, "mooncake") == ["model", "turn"]
    assert lost_fields(entries, "octavo") == []


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("before")
    with pytest.raises(ConfigError, match="tokens cannot be restated for blocks of 512"):
        write_trace(path, "mooncake", [TraceEntry(0, 90, 1, (1, 2), block_size=48)])
    assert path.read_text() == "before"
    with pytest.raises(BenchmarkError):
        write_trace(path / "below", "vidur", [TraceEntry(0, 1, 1)])
    write_trace(path, "vidur", [])
    assert path.read_text() == "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    assert list(tmp_path.iterdir()) == [path]


# -- blocks ---------------------------------------------------------------------------------------


def test_blocks_are_split() -> None:
    (entry,) = with_block_size([TraceEntry(0, 1100, 1, (7, 8, 9), block_size=512)], 256)
    assert entry.hash_ids == (14, 15, 16, 17, 18)  # 1100 tokens are five blocks of 256
    assert entry.block_size == 256


def test_blocks_are_joined_by_all_that_is_before_them() -> None:
    prompts = [(1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 9, 9), (8, 8, 3, 4), (1, 2)]
    entries = [TraceEntry(0, 16 * len(p), 1, p, block_size=16) for p in prompts]
    joined = [entry.hash_ids for entry in with_block_size(entries, 32)]
    assert joined == [(0, 1), (0, 1, 2), (0, 3), (4, 5), (0,)]


# -- requests -------------------------------------------------------------------------------------


def test_equal_hash_ids_are_equal_tokens() -> None:
    entries = [
        TraceEntry(10.0, 1100, 5, (1, 2, 3)),
        TraceEntry(12.0, 1500, 6, (1, 2, 4)),
        TraceEntry(13.0, 600, 7, (5, 2)),
        TraceEntry(14.0, 1100, 0),
    ]
    first, second, third, fourth = to_requests(entries, 32000, seed=1, speedup=2.0)
    a, b, c = (r.prompt_token_ids for r in (first, second, third))
    assert a and b and c
    assert [len(a), len(b), len(c)] == [1100, 1500, 600]
    assert a[:1024] == b[:1024] and a[1024:] != b[1024:1100]
    assert a[:512] != c[:512] and a[512:600] == c[512:600]
    assert [r.arrival_s for r in (first, second, third, fourth)] == [0.0, 1.0, 1.5, 2.0]
    assert [r.output_len for r in (first, second, third, fourth)] == [5, 6, 7, 1]
    assert fourth.input_len == 1100 == len(fourth.prompt_token_ids or ())
    assert min(a + b + c) >= 1000 and max(a + b + c) < 32000
    assert len({r.request_id for r in (first, second, third, fourth)}) == 4


def test_tokens_depend_on_seed_and_id_alone() -> None:
    entry = TraceEntry(0, 512, 1, (77,))
    other = TraceEntry(0, 40, 1, (3,))
    alone = to_requests([entry], 5000, seed=0)[0].prompt_token_ids
    assert to_requests([other, entry], 5000, seed=0)[1].prompt_token_ids == alone
    assert to_requests([entry], 5000, seed=1)[0].prompt_token_ids != alone
    without_ids = [TraceEntry(0, 40, 1), TraceEntry(0, 40, 1)]
    one, two = to_requests(without_ids, 5000)
    assert one.prompt_token_ids != two.prompt_token_ids


def test_prompts_are_cut_kept_and_never_empty() -> None:
    entries = [TraceEntry(0, 0, 1), TraceEntry(0, 900, 1, (1, 2)), TraceEntry(0, 5, 1, prompt="Hi")]
    empty, long, text = to_requests(entries, 300, max_input_len=700, avoid={200, 201})
    assert (empty.input_len, long.input_len, len(long.prompt_token_ids or ())) == (1, 700, 700)
    assert (text.prompt, text.prompt_token_ids, text.input_len) == ("Hi", None, 5)
    tokens = set(long.prompt_token_ids or ())
    assert min(tokens) >= 150 and not tokens & {200, 201}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speedup": 0}, "positive speed, not 0"),
        ({"max_input_len": 0}, "cut to 0 tokens"),
        ({"vocab_size": 0}, "vocabulary of 0 tokens"),
        ({"vocab_size": 4, "avoid": range(4)}, "no token is left"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_requests([TraceEntry(0, 1, 1)], **{"vocab_size": 100, **arguments})


def test_the_same_in_every_process(trace) -> None:
    path = trace(MOONCAKE)
    program = (
        "import sys, json; from octavo.workload.traces import *; "
        "r = to_requests(read_trace(sys.argv[1]), 9000, seed=3); "
        "print(json.dumps([q.prompt_token_ids for q in r]))"
    )
    here = [list(q.prompt_token_ids or ()) for q in to_requests(read_trace(path), 9000, seed=3)]
    for hash_seed in ("0", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == here


# -- statistics -----------------------------------------------------------------------------------


def test_statistics_of_a_trace_made_by_hand() -> None:
    entries = [
        TraceEntry(1.0, 1024, 10, (1, 2), session_id="a"),
        TraceEntry(2.0, 1100, 20, (1, 2, 3), session_id="a"),
        TraceEntry(4.0, 700, 30, (1, 4), session_id="b"),
        TraceEntry(5.0, 200, 40, (1,)),
    ]
    found = statistics(entries)
    assert (found.count, found.span_s, found.num_sessions) == (4, 4.0, 2)
    assert found.requests_per_s == 0.75  # three gaps in four seconds
    assert found.gap_cv == pytest.approx((2 / 9) ** 0.5 / (4 / 3))
    assert found.input_len.mean == 756 and found.input_len.max == 1100
    assert (found.output_len.p50, found.output_len.min) == (25, 10)
    # Seen before: nothing; 1 and 2; 1; 1, of which the prompt has only 200 tokens.
    assert found.shared_prefix_share == pytest.approx((1024 + 512 + 200) / 3024)
    json.dumps(found.as_json(), allow_nan=False)


def test_statistics_where_there_is_little_to_say() -> None:
    one = statistics([TraceEntry(3.0, 5, 6)])
    assert (one.span_s, one.requests_per_s, one.gap_cv) == (0.0, None, None)
    assert one.shared_prefix_share is None
    with pytest.raises(ValueError, match="of nothing"):
        statistics([])


def test_only_leading_blocks_are_shared() -> None:
    entries = [TraceEntry(0, 1024, 1, (1, 2)), TraceEntry(1, 1536, 1, (1, 3, 2))]
    assert statistics(entries).shared_prefix_share == 512 / 2560


def test_the_shared_share_is_that_of_the_tokens() -> None:
    """What the statistics say is what the prompts made from the trace have in common."""
    prompts = [(1, 2, 3), (1, 2), (1, 5, 6), (7,), (1, 5)]
    entries = [TraceEntry(i, 4 * len(p), 1, p, block_size=4) for i, p in enumerate(prompts)]
    seen: set[tuple[int, ...]] = set()
    shared = 0
    for request in to_requests(entries, 50_000):
        tokens = request.prompt_token_ids or ()
        beginnings = [tokens[:end] for end in range(4, len(tokens) + 1, 4)]
        shared += 4 * sum(beginning in seen for beginning in beginnings)
        seen.update(beginnings)
    total = sum(entry.input_len for entry in entries)
    assert statistics(entries).shared_prefix_share == shared / total > 0


@pytest.mark.parametrize(
    ("first", "row"),
    [
        ("arrived_at,num_prefill_tokens,num_decode_tokens,tenant", "0.5,10,2,7"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,tenant", "2023-11-16 18:15:46,10,2,7"),
        ('{"timestamp": 500, "input_length": 10, "output_length": 2, "tenant": 7}', None),
    ],
)
def test_any_trace_may_say_whose_a_request_is(tmp_path, first, row):
    path = tmp_path / "trace"
    path.write_text(first if row is None else f"{first}\n{row}\n")
    (entry,) = read_trace(path)
    assert (entry.input_len, entry.tenant) == (10, "7")
