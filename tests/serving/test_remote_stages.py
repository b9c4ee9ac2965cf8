"""Pipelines whose stages are processes of other machines, which here are commands of this one:
their answers, what is refused, and the end of any of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="connections between machines need certificates")

from tiny_transformers import make_model

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError, EngineError
from octavo.kernels.cpu import library
from tests.conftest import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="no native library was built"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux alone"),
]
SECONDS = 60.0  # of which none is waited for where all is well
PROMPTS = [[5, 9, 13, 21], [7, 8], list(range(20, 90))]
SETTINGS = {"threads": 1, "max_model_len": 128, "kernels": "native"}
OTHER_MACHINE = Path(__file__).resolve().parent.parent / "support" / "other_machine.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("four") / "tiny", num_hidden_layers=4)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The processes find what this one finds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def stages(count: int, *commands: str) -> dict:
    """Settings of a pipeline with its first stages on other machines."""
    return {
        "pipeline_parallel_size": count,
        "stage_command": commands or (sys.executable,) * (count - 1),
    }


def other(what: str) -> str:
    return f"{sys.executable} {OTHER_MACHINE} {what}"


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, logprobs=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


def remote_ranks(parent: int | None = None) -> list[int]:
    listed = subprocess.run(
        ["pgrep", "-P", str(parent or os.getpid()), "-f", "remote_rank"],
        capture_output=True,
        text=True,
    )
    return [int(line) for line in listed.stdout.split()]


def followers_of(pid: int) -> list[int]:
    """The ranks that a first rank of a stage has started on its machine."""
    listed = subprocess.run(
        ["pgrep", "-P", str(pid), "-f", "rank_process"], capture_output=True, text=True
    )
    return [int(line) for line in listed.stdout.split()]


def all_ranks() -> list[int]:
    """Those of all machines, without the home rank."""
    first = remote_ranks()
    return [*first, *(pid for each in (os.getpid(), *first) for pid in followers_of(each))]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + SECONDS
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"some of {pids} are still there"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(model):
    return answers(LLM(str(model), **SETTINGS))


def test_answers_are_those_of_one_rank_and_nothing_is_left(model, alone):
    with LLM(str(model), **stages(2), **SETTINGS) as llm:
        (remote,) = remote_ranks()
        assert answers(llm) == alone
        assert answers(llm) == alone
    wait_until_gone(remote)


def test_hidden_states_go_from_one_machine_to_the_next(model, alone):
    """Of three stages, the first is connected to the second, and that one to the third."""
    with LLM(str(model), **stages(3), **SETTINGS) as llm:
        assert len(remote_ranks()) == 2
        assert answers(llm) == alone


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (2, 3), (3, 2)])
def test_answers_of_stages_of_several_ranks_are_those_of_one_rank(model, alone, tp, pp):
    layout = {**stages(pp), "tensor_parallel_size": tp}
    with LLM(str(model), **layout, **SETTINGS) as llm:
        ranks = all_ranks()
        assert len(ranks) == tp * pp - 1
        assert answers(llm) == alone
        assert answers(llm) == alone
    wait_until_gone(*ranks)


def test_whole_experts_on_ranks_of_several_machines(tmp_path, model):
    """Every rank of a stage has some of the experts."""
    mixture = tmp_path / "mixtral"
    ids = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
    make_model("mixtral", **ids).save_pretrained(mixture)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / file, mixture / file)
    expected = answers(LLM(str(mixture), **SETTINGS))
    layout = {**stages(2), "tensor_parallel_size": 2, "enable_expert_parallel": True}
    with LLM(str(mixture), **layout, **SETTINGS) as llm:
        assert answers(llm) == expected


def test_no_secret_is_on_a_command_line_or_in_an_environment(model, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "a key")
    with LLM(str(model), **stages(2), **SETTINGS):
        (remote,) = remote_ranks()
        line = Path(f"/proc/{remote}/cmdline").read_bytes().split(b"\0")
        environment = Path(f"/proc/{remote}/environ").read_bytes()
    assert line[1:] == [b"-m", b"octavo.runtime.remote_rank", b""]
    assert b"OCTAVO_API_KEY" not in environment and b"OCTAVO_LINK_TICKET" not in environment


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("false", r"rank 1 of 2 on false: it ended with exit status 1, without a word"),
        ("/no/such/python", r"/no/such/python -m .* cannot be run: .*No such file"),
        ("sh -c 'echo no route >&2; exit 255'", r"exit status 255; its last words:\nno route"),
        (other("talks"), r"exit status 7; its last words:\na line for people"),
        (other("version"), r"rank 1 of 2 on .* at 127.*: octavo is 0\.0\.7 there, and .* here"),
        (other("kernels"), r"kernel ABI is \d+ there, and \d+ here"),
        (
            other("model"),
            r"rank 0 \(.*\): digest of the model's weights is [0-9a-f]{32} there, and others here$",
        ),
        (other("no-model"), r"elsewhere is not on this machine: put the model that rank 0 has"),
        (other("processor"), r"rank 0 computes with \w+ instructions, which this machine lacks.*"),
        (
            other("memory=1000"),
            r"max_model_len 128 needs 8 blocks .* has 1; rank 1 of 2 on .* has room for no more",
        ),
    ],
)
def test_a_machine_that_does_not_fit_is_refused_by_what_differs(model, command, why):
    with pytest.raises(ConfigError, match=why):
        LLM(str(model), **stages(2, command), **SETTINGS)
    assert not [pid for pid in remote_ranks() if is_running(pid)]


def test_stages_of_other_layouts_do_not_connect_to_each_other(model):
    with pytest.raises(ConfigError, match="stages is (3 there, and 4|4 there, and 3) here"):
        LLM(str(model), **stages(3, other("stage"), sys.executable), **SETTINGS)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"stage_command": ("python",)}, "pipeline_parallel_size must be 2, not 1"),
        ({"stage_address": "10.0.0.5"}, "stage_command names none"),
        ({**stages(2), "tensor_parallel_size": 64}, "64 ranks cannot share its .* heads"),
        ({**stages(2), "tensor_parallel_size": 3, "threads": None}, "3 ranks need a thread"),
        ({**stages(2), "data_parallel_size": 2}, "start a server for each"),
        ({**stages(2), "stage_address": "a b"}, "is no address"),
        ({**stages(2), "stage_address": "203.0.113.9"}, "cannot be listened on"),
        ({**stages(2, "")}, "is no command"),
        ({**stages(2, "'")}, "is no command: No closing quotation"),
        ({**stages(2), "kernels": "reference"}, "native CPU kernels"),
        (stages(65), "65 stages cannot have its .* layers"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_started(
    model, settings, why, monkeypatch
):
    monkeypatch.setattr("octavo.runtime.hosts.CommandProcess", None)
    with pytest.raises(ConfigError, match=why):
        LLM(str(model), **{**SETTINGS, **settings})


def test_the_end_of_a_rank_is_the_end_of_the_engine_in_words(model):
    with LLM(str(model), **stages(3), **SETTINGS) as llm:
        answers(llm)
        pids = remote_ranks()
        os.kill(pids[-1], signal.SIGKILL)
        wait_until_gone(*pids)
        with pytest.raises(EngineError) as error:
            answers(llm)
        with pytest.raises(EngineError):  # and it stays so
            answers(llm)
    assert re.search(r"rank \d of \d on .*: the connection was cut", str(error.value))


@pytest.mark.parametrize("which", ["follower here", "first rank there", "follower there"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_any_rank_of_any_stage_is_the_end_of_all(model, which, signum):
    with LLM(str(model), **stages(2), tensor_parallel_size=2, **SETTINGS) as llm:
        answers(llm)
        (there,), (here,) = remote_ranks(), followers_of(os.getpid())
        (beside,) = followers_of(there)
        victim = {"follower here": here, "first rank there": there, "follower there": beside}
        os.kill(victim[which], signum)
        wait_until_gone(here, there, beside)
        with pytest.raises(EngineError):
            answers(llm)
        with pytest.raises(EngineError):  # and it stays so
            answers(llm)


def test_a_rank_there_that_cannot_load_is_told_in_its_words(model):
    with pytest.raises(
        ConfigError,
        match=r"rank 2 of 4 on .*: rank 3 of 4 ended with exit status 1; its last words",
    ) as error:
        LLM(str(model), **stages(2, other("follower")), tensor_parallel_size=2, **SETTINGS)
    assert "ConfigError: there is no room for this rank" in str(error.value)
    assert not [pid for pid in all_ranks() if is_running(pid)]


def test_a_rank_here_that_cannot_load_is_told_in_its_words(model, monkeypatch):
    monkeypatch.setattr("octavo.serving.stage_ranks._FOLLOWER", "refusing_follower")
    with pytest.raises(
        ConfigError, match=r"size: rank 1 of 4 ended with .*\n.*no room for this rank"
    ):
        LLM(str(model), **stages(2), tensor_parallel_size=2, **SETTINGS)
    assert not [pid for pid in all_ranks() if is_running(pid)]


def test_the_machine_that_has_room_for_the_fewest_blocks_sizes_the_pool(model):
    """It has a quarter of a MiB, half of which is for KV, of two of the four layers."""
    with LLM(str(model), **stages(2), **SETTINGS) as llm:
        most = llm._loaded.info["kv_blocks"]
    with LLM(str(model), **stages(2, other(f"memory={1 << 18}")), **SETTINGS) as llm:
        info = llm._loaded.info
        choices = llm._loaded.config.choices
        block_bytes = 16 * 2 * (2 * 2 * 16 * 2)  # tokens, layers, and bfloat16 of two heads
        assert info["kv_blocks"] == (1 << 17) // block_bytes < most
        assert any("rank 1 of 2 on" in choice and "no more" in choice for choice in choices)
        assert [(each["stage"], each["layers"]) for each in info["stages"]] == [
            (0, [0, 2]),
            (1, [2, 4]),
        ]
        assert [each["memory_bytes"] == 1 << 30 for each in info["stages"]] == [True, False]
        assert sum("of free memory beside its weights" in choice for choice in choices) == 2
    too_many = {**stages(2, other(f"memory={1 << 18}")), "num_blocks": most}
    with pytest.raises(ConfigError, match=r"rank 1 of 2 on .* has 0\.00 GiB .* lower num_blocks"):
        LLM(str(model), **too_many, **SETTINGS)


@pytest.mark.parametrize("words", [[99], [1, 2, 3], [1, *[-1] * 40], [2, 5], [1 << 30] * 3000])
def test_words_that_are_no_step_end_the_rank_and_the_engine(model, words):
    with LLM(str(model), **stages(2), **SETTINGS) as llm:
        answers(llm)
        (remote,) = remote_ranks()
        llm._loaded.ranks._followers.place.messages.send(array("i", words))
        wait_until_gone(remote)
        with pytest.raises(EngineError):
            answers(llm)


def test_ranks_end_with_the_home_rank_however_that_ends(model):
    code = (
        "import sys; from octavo import LLM; "
        f"llm = LLM({str(model)!r}, pipeline_parallel_size=2, "
        "stage_command=(sys.executable,), threads=1, max_model_len=128); "
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as home:
        assert home.stdout.readline() == b"up\n"
        (remote,) = remote_ranks(home.pid)
        home.kill()
        wait_until_gone(remote)


def test_a_real_model(smollm2_gguf):
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):"]

    def greedy(**settings) -> list[list[int]]:
        with LLM(str(smollm2_gguf), threads=1, max_model_len=256, **settings) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    assert greedy(**stages(2)) == greedy()


# -- two machines, as far as the network knows --------------------------------------------------

TWO_MACHINES = OTHER_MACHINE.with_name("two_machines.py")


def on_two_machines(does: str, model: Path, tp: int) -> dict:
    """Run two_machines.py; skips where the system has no such namespaces for a user."""
    try:
        subprocess.run(
            [
                "unshare",
                "-rnm",
                "ip",
                "link",
                "add",
                "here",
                "type",
                "veth",
                "peer",
                "name",
                "there",
            ],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces for a user here: {error}")
    done = subprocess.run(
        ["unshare", "-rnm", sys.executable, str(TWO_MACHINES), does, str(model), str(tp)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
def test_two_machines_answer_as_one(model, alone, tp):
    said = on_two_machines("answers", model, tp)
    assert said == {"answers": [tokens for tokens, _ in alone], "ranks": tp}


@pytest.mark.long
def test_a_server_on_two_machines(model):
    said = on_two_machines("serves", model, 2)
    assert said["ranks"] == 2
    assert len(set(said["answers"])) == 1 and len(said["answers"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
def test_a_cable_that_is_cut_ends_the_engine_and_leaves_nothing(model, alone, tp):
    """Neither end is told: they hear nothing of each other any more."""
    said = on_two_machines("cut", model, tp)
    assert said["answers"] == [tokens for tokens, _ in alone]
    assert (said["ranks"], said["left"]) == (tp, 0)
    assert len(said["raised"]) == 1
    assert re.search("nothing was heard|took too long|timed out|was cut", said["raised"][0])
