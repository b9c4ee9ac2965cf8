"""A smaller model drafts, and the answers stay what they are."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from faults import FaultyScheduler, every
from loading import load_model
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.assembly.engine import build_engine
from octavo.base.errors import ConfigError, ModelError
from octavo.core.request import Request
from octavo.core.scheduler import SchedulerConfig
from octavo.kernels.cpu import library
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.rank import Rank
from octavo.settings.engine import CacheConfig, EngineConfig
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.drafter import TargetModel
from octavo.speculation.drafters import open_drafter

BACKENDS = ["reference", "fused"]
if library.runnable():
    BACKENDS.append("native")


def changed(folder: Path, out: Path, noise: float = 0.0, value: float = 0.0, **config) -> Path:
    """A copy of a model with noise in its matrices, or all values of its last norm replaced."""
    shutil.copytree(folder, out)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensor += noise * torch.randn(tensor.shape, generator=generator) * (tensor.dim() == 2)
        if value and name == "model.norm.weight":
            tensor.fill_(value)
    save_file(tensors, out / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, **config}))
    return out


@pytest.fixture(scope="module")
def draft(tiny_model, tmp_path_factory) -> Path:
    """Right now and then."""
    return changed(tiny_model, tmp_path_factory.mktemp("drafts") / "noisy", noise=0.02)


def make_requests() -> list[Request]:
    """Of all kinds, with shared prefixes and samples of one prompt."""
    shared = [17 * i % 250 for i in range(40)]
    kinds = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=20, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=30, max_tokens=22, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.7, frequency_penalty=0.5, logprobs=0, max_tokens=18),
        SamplingParams(temperature=0, logit_bias={7: 3.0}, prompt_logprobs=1, max_tokens=15),
        SamplingParams(temperature=0, max_tokens=15, speculative={"enabled": False}),
    ]
    requests = [
        Request(f"r{i}", shared[: 10 * i % 41] + [i, 3, 5], params, 0.0, seed=i)
        for i, params in enumerate(kinds)
    ]
    for index in (1, 2):
        leader = requests[index]
        fork = Request(
            f"fork{index}",
            leader.prompt_token_ids,
            leader.params,
            0.0,
            seed=leader.seed,
            sample_index=1,
            fork_of=leader,
        )
        requests.append(fork)
    return requests


class Bench:
    """Engines over a tiny model, with and without a draft."""

    def __init__(self, path: Path, tokenizer, kernels: str):
        self._path, self._tokenizer, self._kernels = path, tokenizer, kernels
        self._model, self.config = load_model(path)

    def engine(self, draft: Path | None, num_blocks: int = 64, speculative=None, **limits):
        limits = {"max_model_len": 96, "max_num_seqs": 16, **limits}
        scheduler = SchedulerConfig(**limits)
        spec = RankSpec(self._path, kernels=self._kernels, threads=1)
        rank = Rank.of_model(spec, self._model, self.config)
        drafter = None
        if draft is not None:
            said = {"method": "draft_model", "model": str(draft), **(speculative or {})}
            config = SpeculativeConfig(**said)
            drafter = open_drafter(config, TargetModel(rank, spec, self.config, self._tokenizer))
            assert drafter.kv_bytes_per_token == rank.capacity.kv_bytes_per_token
        sizes = RankLimits(
            num_blocks,
            scheduler.max_num_seqs,
            scheduler.max_model_len,
            scheduler.max_num_batched_tokens,
        )
        rank.start(sizes)
        proposer = drafter.start(sizes) if drafter is not None else None
        cache = CacheConfig(spec.block_size, num_blocks, "auto", True)
        config = EngineConfig("tiny", "cpu", "float32", 0, "continuous", cache, scheduler)
        return build_engine(config, rank, proposer=proposer)


def run_all(engine, requests, abort: str | None = None):
    """(tokens, logprobs) of each request; one is aborted after some steps."""
    answers = {request.request_id: ([], []) for request in requests}
    for request in requests:
        engine.add(request)
    steps = 0
    while (step := engine.step()) is not None:
        for update in step.updates:
            tokens, logprobs = answers[update.request.request_id]
            tokens += update.new_token_ids
            logprobs += [*update.prompt_logprobs, *update.logprobs]
        steps += 1
        if steps == 6 and abort is not None:
            engine.abort(abort)
    engine.scheduler.block_manager.check_integrity([])
    return answers


@pytest.fixture(scope="module", params=BACKENDS)
def bench(request, tiny_model, byte_tokenizer) -> Bench:
    return Bench(tiny_model, byte_tokenizer, request.param)


@pytest.fixture(scope="module")
def plain(bench):
    return run_all(bench.engine(None), make_requests())


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 12}, {"max_num_batched_tokens": 17}, {"max_num_seqs": 2}],
    ids=["roomy", "tiny pool", "small steps", "two slots"],
)
def test_answers_stay_what_they_are(bench, plain, draft, settings):
    engine = bench.engine(draft, **settings)
    assert run_all(engine, make_requests()) == plain
    drafts = engine.scheduler.drafts
    assert 0 < drafts.num_accepted < drafts.num_tokens
    if "num_blocks" in settings:
        assert engine.scheduler.num_preemptions > 0


def test_preemption_and_aborts_change_no_answer(bench, plain, draft):
    engine = bench.engine(draft)
    engine.scheduler = FaultyScheduler.in_place_of(engine.scheduler, preempts=every(3))
    answers = run_all(engine, make_requests(), abort="r2")
    for request_id, (tokens, logprobs) in answers.items():
        if request_id != "r2":
            assert (tokens, logprobs) == plain[request_id]
    proposer = engine.scheduler.proposer.proposer
    assert not proposer._followers and not proposer._kv._sequences


def test_a_model_is_its_own_best_draft(bench, tiny_model, plain):
    """Every draft token is accepted, sampled ones too: both draw with the same random numbers."""
    engine = bench.engine(tiny_model)
    assert run_all(engine, make_requests()) == plain
    drafts = engine.scheduler.drafts
    assert drafts.num_accepted == drafts.num_tokens > 50


def test_prefix_hits_are_caught_up_with(bench, draft):
    """Whatever the target need not compute, and the draft has not seen."""
    requests = [make_requests()[3], make_requests()[3]]
    requests[1].request_id = "again"
    answers = []
    for model in (None, draft):
        engine = bench.engine(model)
        answers.append([run_all(engine, [request])[request.request_id] for request in requests])
        requests = [make_requests()[3], make_requests()[3]]
        requests[1].request_id = "again"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_draft_of_nan_costs_speed_only(bench, plain, tiny_model, tmp_path, caplog, value):
    engine = bench.engine(changed(tiny_model, tmp_path / "nan", value=value))
    assert run_all(engine, make_requests()) == plain
    assert engine.scheduler.drafts.num_accepted == 0
    assert caplog.text.count("gets no more drafts") == 1


def test_a_draft_that_raises_costs_speed_only(bench, plain, draft, monkeypatch):
    engine = bench.engine(draft)

    def fall(batch):
        raise RuntimeError("broken")

    monkeypatch.setattr(engine.scheduler.proposer.proposer, "_run_batch", fall)
    assert run_all(engine, make_requests()) == plain
    assert engine.scheduler.drafts.num_drafts == 0


def test_a_draft_of_fewer_positions_helps_as_far_as_it_goes(bench, plain, tiny_model, tmp_path):
    short = changed(tiny_model, tmp_path / "short", max_position_embeddings=30)
    engine = bench.engine(short)
    assert run_all(engine, make_requests()) == plain
    assert engine.scheduler.drafts.num_accepted > 0


def test_the_public_way(tiny_model, draft):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    answers = []
    for settings in ({}, {"spec_method": "draft_model", "spec_model": str(draft)}):
        with LLM(str(tiny_model), max_model_len=80, threads=1, **settings) as llm:
            answers.append(llm.generate(["some prompt"], params)[0].outputs[0].token_ids)
            blocks = llm.engine_info()["kv_blocks"]
    assert answers[0] == answers[1]
    assert blocks > 0


def test_a_draft_that_is_not_there_is_said(bench):
    with pytest.raises(ModelError):
        bench.engine(Path("/nowhere/at/all"))


def test_another_vocabulary_is_refused_with_its_first_difference(bench, tiny_model, tmp_path):
    other = changed(tiny_model, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = {token_id: token for token, token_id in vocab.items()}
    vocab[names[70]], vocab[names[71]] = 71, 70
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"id 70 is '.' in the target and '.' in the draft \(260"):
        bench.engine(other)


def test_another_end_of_text_is_refused(bench, tiny_model, tmp_path):
    other = changed(tiny_model, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<bos>"}))
    with pytest.raises(ConfigError, match="eos_token_id of .* is 257 .*, and 256"):
        bench.engine(other)


def test_padding_is_no_difference(bench, plain, tiny_model, tmp_path):
    """Ids that no tokenizer knows are never drafted."""
    padded = changed(tiny_model, tmp_path / "padded", vocab_size=288)
    tensors = load_file(padded / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([rows, 0.9 * rows[:28]])
    save_file(tensors, padded / "model.safetensors")
    engine = bench.engine(padded)
    assert run_all(engine, make_requests()) == plain
    assert engine.scheduler.drafts.num_accepted > 0


def test_a_draft_may_call_tokens_by_other_ids(bench, plain, tiny_model, tmp_path):
    """The same model, with its vocabulary shuffled: greedy draft tokens are all accepted."""
    other = changed(tiny_model, tmp_path / "shuffled")
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    tensors = load_file(other / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = rows.clone()
    tensors["model.embed_tokens.weight"][order] = rows[:256]
    save_file(tensors, other / "model.safetensors")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    shuffled = {token: int(order[i]) if i < 256 else i for token, i in vocab.items()}
    tokenizer["model"]["vocab"] = dict(sorted(shuffled.items(), key=lambda item: item[1]))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab"):
        bench.engine(other)
    engine = bench.engine(other, speculative={"use_heterogeneous_vocab": True})
    assert run_all(engine, make_requests()) == plain
    engine = bench.engine(other, speculative={"use_heterogeneous_vocab": True})
    greedy = [request for request in make_requests() if request.params.temperature == 0][:2]
    assert len(run_all(engine, greedy)) == 2
    drafts = engine.scheduler.drafts
    assert drafts.num_tokens > 10 and drafts.acceptance_rate > 0.95
