from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo import cli
from octavo.base.errors import ModelNotFoundError
from octavo.core.structured_outputs import StructuredOutputs


def test_one_prompt_streams_text_then_figures(fake_llm, capsys) -> None:
    assert cli.main(["generate", "--prompt", "Why?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The sky is blue.\n"
    assert captured.err == (
        "2 prompt tokens (1 cached), 5 output tokens (stop), TTFT 250 ms, 20.0 tokens/s\n"
    )
    (llm,) = fake_llm.made
    name, messages, params = llm.calls[0]
    assert (name, messages) == ("stream_chat", [{"role": "user", "content": "Why?"}])
    assert (params.max_tokens, params.temperature, params.n) == (256, 0.7, 1)
    assert llm.model == "smollm2-135m" and llm.kwargs == {} and llm.closed


def test_chunks_reach_stdout_one_by_one(fake_llm, monkeypatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(pipe)))
    seen: list[bytes] = []
    fake_llm.on_chunk = lambda self, i: seen.append(pipe.getvalue())
    cli.main(["generate", "--prompt", "Why?"])
    assert seen == [b"", b"The ", b"The sky ", b"The sky is ", b"The sky is blue"]


def test_json_is_the_contracts(fake_llm, capsys) -> None:
    argv = ["generate", "tiny", "--prompt", "A", "--prompt", "B", "--n", "2", "--json"]
    assert cli.main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["model", "outputs", "engine"]
    assert document["model"] == "tiny"
    assert document["engine"] == {
        "device": "cpu",
        "dtype": "float32",
        "kernels": "reference",
        "isa": None,
        "weights_bytes": 10,
        "kv_blocks": 4,
        "block_size": 16,
    }
    assert [output["prompt"] for output in document["outputs"]] == ["A", "B"]
    assert document["outputs"][0] == {
        "prompt": "A",
        "prompt_token_ids": [100, 101],
        "outputs": [
            {
                "index": index,
                "text": "The sky is blue.",
                "token_ids": [0, 1, 2, 3, 4],
                "finish_reason": "stop",
                "stop_reason": None,
                "cumulative_logprob": None,
                "logprobs": None,
            }
            for index in range(2)
        ],
        "metrics": {
            "ttft_ms": 250.0,
            "tpot_ms": 50.0,
            "e2e_ms": 450.0,
            "prefill_tps": 12.0,
            "decode_tps": 20.0,
            "num_cached_tokens": 1,
            "miss_reason": "",
            "speculation": None,
        },
    }


def test_json_of_logprobs(fake_llm, capsys) -> None:
    argv = ["generate", "--prompt", "A", "--logprobs", "1", "--prompt-logprobs", "0", "--json"]
    assert cli.main(argv) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["outputs"][0]["cumulative_logprob"] == -1.5
    assert output["outputs"][0]["logprobs"][1] == {
        "token_id": 1,
        "token": "sky ",
        "logprob": -2.0,
        "rank": 2,
        "top": [{"token_id": 7, "token": "x", "logprob": -0.5}],
    }
    # The first prompt token has no predecessor, and JSON has no infinity.
    assert output["prompt_logprobs"][0] is None
    assert output["prompt_logprobs"][1]["logprob"] is None
    assert output["prompt_logprobs"][1]["top"] == []


def test_raw_goes_without_the_template(fake_llm, capsys) -> None:
    cli.main(["generate", "--raw", "--prompt", "The sea is"])
    assert fake_llm.made[0].calls[0][:2] == ("stream", "The sea is")


def test_a_model_without_template_is_given_the_text(fake_llm, capsys) -> None:
    fake_llm.has_chat_template = False
    cli.main(["generate", "--prompt", "The sea is"])
    assert fake_llm.made[0].calls[0][:2] == ("stream", "The sea is")


def test_system_message(fake_llm, capsys) -> None:
    cli.main(["generate", "--prompt", "Hi", "--system", "Be brief."])
    assert fake_llm.made[0].calls[0][1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_several_answers_are_labelled(fake_llm, capsys) -> None:
    cli.main(["generate", "--prompt", "One\nline", "--prompt", "Two", "--n", "2"])
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if line.startswith("==>")]
    assert heads == [
        "==> One line, answer 1",
        "==> One line, answer 2",
        "==> Two, answer 1",
        "==> Two, answer 2",
    ]
    assert out.count("The sky is blue.") == 4


@pytest.mark.parametrize("argv", [["-"], ["tiny", "-"], ["--prompt-file", "-"]])
def test_prompt_from_stdin(fake_llm, capsys, monkeypatch, argv: list[str]) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO("two\nlines é".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["generate", "--raw", *argv]) == 0
    assert fake_llm.made[0].calls[0][1] == "two\nlines é"
    assert fake_llm.made[0].model == ("tiny" if "tiny" in argv else "smollm2-135m")


def test_prompt_file_is_one_prompt(fake_llm, capsys, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("a\nb\n")
    cli.main(["generate", "--raw", "--prompt-file", str(tmp_path / "prompt.txt")])
    assert fake_llm.made[0].calls[0][1] == "a\nb\n"


def test_every_sampling_flag_arrives(fake_llm, capsys) -> None:
    argv = (
        "generate --prompt x --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 5 "
        "--min-p 0.1 --typical-p 0.8 --seed 3 --n 2 --best-of 4 --stop a --stop b "
        "--stop-token-id 11 --include-stop --ignore-eos --presence-penalty 0.1 "
        "--frequency-penalty 0.2 --repetition-penalty 1.1 --bad-word w --logit-bias 5=-1.5 "
        "--logit-bias 6=2 --allowed-token-id 5 --logprobs 2 --prompt-logprobs 1 --json"
    )
    assert cli.main(argv.split()) == 0
    params = fake_llm.made[0].calls[0][2]
    assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 2, 0.5)
    assert (params.top_p, params.top_k, params.min_p, params.typical_p) == (0.9, 5, 0.1, 0.8)
    assert (params.seed, params.n, params.best_of) == (3, 2, 4)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (11,))
    assert params.include_stop_str_in_output and params.ignore_eos
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.repetition_penalty, params.bad_words) == (1.1, ("w",))
    assert (params.logit_bias, params.allowed_token_ids) == ({5: -1.5, 6: 2.0}, (5,))
    assert (params.logprobs, params.prompt_logprobs) == (2, 1)


SCHEMA = '{"type": "object"}'
GBNF = 'root ::= "a" | "b"'


@pytest.mark.parametrize(
    ("flag", "value", "asked"),
    [
        ("--json-schema", SCHEMA, {"json": SCHEMA}),
        ("--json-schema", f" {SCHEMA}", {"json": f" {SCHEMA}"}),
        ("--json-schema", "schema.json", {"json": SCHEMA}),
        ("--regex", "[a-z]{3}", {"regex": "[a-z]{3}"}),
        ("--choice", "yes, no,Oh no", {"choice": ("yes", "no", "Oh no")}),
        ("--grammar", GBNF, {"grammar": GBNF}),
        ("--grammar", 'start: "a"', {"grammar": 'start: "a"'}),
        ("--grammar", "a.gbnf", {"grammar": GBNF}),
    ],
)
def test_a_constraint_arrives(fake_llm, capsys, tmp_path, monkeypatch, flag, value, asked) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(SCHEMA)
    (tmp_path / "a.gbnf").write_text(GBNF)
    assert cli.main(["generate", "--prompt", "x", flag, value]) == 0
    params = fake_llm.made[0].calls[0][2]
    assert params.structured_outputs == StructuredOutputs(**asked)


def test_what_the_models_authors_recommend_is_the_default(fake_llm, capsys) -> None:
    fake_llm.recommended = {"temperature": 0.6, "top_k": 20}
    cli.main(["generate", "--prompt", "x", "--top-k", "5"])
    params = fake_llm.made[0].calls[0][2]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 256)


def test_only_given_engine_flags_arrive(fake_llm, capsys) -> None:
    argv = "generate --prompt x --no-enable-prefix-caching --kv-cache-memory 2MiB --threads 2"
    assert cli.main(argv.split()) == 0
    assert fake_llm.made[0].kwargs == {
        "enable_prefix_caching": False,
        "kv_cache_memory": 2 * 2**20,
        "threads": 2,
    }


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "no prompt"),
        ("--prompt x --temperature -1", "temperature"),
        ("--prompt x --max-tokens 0", "max_tokens"),
        ("--prompt x --max-tokens ten", "--max-tokens"),
        ("--prompt x --chat --raw", "not allowed with"),
        ("--prompt x --raw --system y", "--system needs a chat template"),
        ("--prompt x --logit-bias 5", "ID=X"),
        ("--prompt x --logit-bias five=5", "ID=X"),
        ("--prompt-file /no/such/file", "No such file"),
        ("--prompt-file - --prompt-file -", "only once"),
        ("--prompt x --dtype int3", "--dtype"),
        ("--prompt x --block-size 0", "block_size"),
        ("--prompt x --kv-cache-memory much", "no size in bytes"),
        ("--prompt x --pipeline-parallel-size 0", "at least 1"),
        ("--prompt x --json-schema none.json", "--json-schema none.json: No such file"),
        ("--prompt x --json-schema -", "not stdin"),
        ("--prompt x --choice a,,b", "--choice: must hold texts that are not empty"),
        ("--prompt x --regex a --choice a", "not allowed with argument"),
        ("--prompt x --tensor-parallel-size two", "at least 1, or auto, not 'two'"),
    ],
)
def test_wrong_usage_exits_2_before_loading(fake_llm, capsys, argv: str, words: str) -> None:
    assert cli.main(["generate", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
    assert fake_llm.made == []


def test_prompt_file_must_be_text(fake_llm, capsys, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    assert cli.main(["generate", "--prompt-file", str(tmp_path / "x")]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_unknown_model_exits_1(fake_llm, capsys, monkeypatch) -> None:
    def fail(model: str, **kwargs: object) -> None:
        raise ModelNotFoundError("no model 'x'")

    monkeypatch.setattr("octavo.cli.terminal.hub.resolve", fail)
    assert cli.main(["generate", "x", "--prompt", "y"]) == 1
    assert capsys.readouterr().err == "octavo: error: no model 'x'\n"


@pytest.mark.parametrize("flags", [[], ["--json"], ["--prompt", "y"]])
def test_failed_request_exits_1_and_still_reports(fake_llm, capsys, flags: list[str]) -> None:
    fake_llm.request_error = "the logits are NaN"
    assert cli.main(["generate", "--prompt", "x", *flags]) == 1
    captured = capsys.readouterr()
    assert "octavo: error: the logits are NaN" in captured.err
    assert "The sky is blue." in captured.out


def test_interrupt_closes_the_engine(fake_llm, capsys) -> None:
    def interrupt(self: object, i: int) -> None:
        if i == 2:
            raise KeyboardInterrupt

    fake_llm.on_chunk = interrupt
    assert cli.main(["generate", "--prompt", "x"]) == 130
    assert capsys.readouterr() == ("The sky ", "")
    assert fake_llm.made[0].closed and fake_llm.made[0].stream_closed
