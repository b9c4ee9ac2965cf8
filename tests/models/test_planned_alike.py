"""Families that run can be planned, with the tensors that they run with."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest
import tiny_hybrids
import torch
from checkpoint_sizes import checkpoint_bytes
from fused_models import step_of
from safetensors.numpy import save_file
from sum_ranks import in_ranks, rank_program
from tiny_transformers import EXPERT_CASES, FAMILIES, LATENT_CASES

from octavo.base.errors import UnsupportedModelError
from octavo.cli import main
from octavo.cost import hf_families
from octavo.cost.communication import exchange_of, link_between, link_of, transfers
from octavo.cost.find_device import find_device
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import precision_of, weights_bytes
from octavo.cost.rank import rank_model
from octavo.cost.shares import shares
from octavo.cost.spec_hf import spec_from_hf
from octavo.cost.weights import num_parameters, weights
from octavo.cost.work import RowCounts, Span, passes
from octavo.kernels.cuda.device_group import NcclGroup
from octavo.kernels.division import Division
from octavo.kernels.expert_places import ExpertPlaces, deal_out
from octavo.kernels.fused_ops import CannotFuse, FusedExperts
from octavo.kernels.parts import Part, Stage
from octavo.layers.module import named_parameters
from octavo.models import registry
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config_hf import config_from_hf
from octavo.models.gguf_export import export_gguf
from octavo.models.loader import load_checkpoint
from octavo.models.tensor_split import cut_of
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.op_program import plan_step

# One of each family, and those of which a switch changes tensors.
NAMES = [
    *("llama", "llama-biases", "llama-tied", "llama-wide-heads", "mistral", "mistral-window"),
    *("qwen2", "qwen3", "qwen3-bias-tied", "gemma3"),
    *EXPERT_CASES,
    *LATENT_CASES,
    *FAMILIES,
    *(f"hybrid:{name}" for name in tiny_hybrids.CASES),
]
RUNNING = [listed for listed in registry.FAMILIES if listed.family]
PLANNED = [listed for listed in registry.FAMILIES if not listed.family]


def tensors_of_modules(config) -> Counter[int | None]:
    """Values of all parameters of a model, by layer."""
    found: Counter[int | None] = Counter()
    for name, parameter in named_parameters(registry.model_class(config.architecture)(config)):
        if name == "lm_head.weight" and config.tie_embeddings or ".rotary_emb" in name:
            continue
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        found[layer] += prod(parameter.shape)
    return found


def tensors_of_spec(spec) -> Counter[int | None]:
    found: Counter[int | None] = Counter()
    for weight in weights(spec):
        found[weight.layer] += weight.num_params
    return found


@pytest.fixture(scope="module")
def folder_of(tiny_hf, tiny_model, tmp_path_factory):
    """``folder_of(name)``: a folder of a tiny model; ``hybrid:name`` is one of tiny_hybrids."""

    @cache
    def make(name: str) -> Path:
        kind, _, name = name.rpartition(":")
        if not kind:
            return tiny_hf(name)
        folder: Path = tmp_path_factory.mktemp("hybrids") / name
        more = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}
        more |= tiny_hybrids.GGUF_CASES.get(name, {})
        tiny_hybrids.make_model(name, **more).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            copyfile(tiny_model / file, folder / file)
        return folder

    return make


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_planned_with_the_tensors_of_its_modules(name, folder_of):
    folder = folder_of(name)
    spec, config = open_spec(folder), open_checkpoint(folder).config()
    assert spec.why_not_run is None
    assert tensors_of_spec(spec) == tensors_of_modules(config)
    assert matrices_of_spec(spec) <= matrices_of_modules(config)
    assert spec.tie_embeddings == config.tie_embeddings
    assert weights_bytes(spec, precision_of(spec)) == checkpoint_bytes(folder)


def matrices_of_modules(config) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter(
        (name.removesuffix(".weight").replace(".shared_experts.", "."), parameter.shape)
        for name, parameter in named_parameters(registry.model_class(config.architecture)(config))
    )


def matrices_of_spec(spec) -> Counter[tuple[str, tuple[int, ...]]]:
    """Matrices of attention and MLPs, which have the names of modules; of experts the first."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for weight in weights(spec):
        if not weight.inputs or not weight.name.startswith(("self_attn.", "mlp.")):
            continue
        name = f"model.layers.{weight.layer}.{weight.name}".replace(
            "mlp.experts.", "mlp.experts.0."
        )
        outputs = weight.outputs
        name = name.replace(".shared_expert.", ".")
        if name.endswith("self_attn.q_proj") and any(
            getattr(mixer, "has_output_gate", False) for mixer in spec.layers[weight.layer].mixers
        ):
            outputs //= 2  # the gate is a module of its own
        found[name, (outputs, weight.inputs)] += 1
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ways", [2, 4])
def test_devices_share_the_parameters_as_the_plan_says(name, ways, folder_of):
    """Each layer's. Of values whose keys cannot be shared out evenly, a plan counts more."""
    spec, config = open_spec(folder_of(name)), open_checkpoint(folder_of(name)).config()
    delta = None if config.recurrence is None else config.recurrence.delta
    if delta is not None and delta.key_heads % ways:
        pytest.skip(f"{delta.key_heads} heads of keys on {ways} devices")
    planned: Counter[int | None] = Counter()
    for weight in weights(spec):
        if weight.layer is not None:
            planned[weight.layer] += weight.of_rank(Parallel(tp=ways)).num_params
    shared: Counter[int | None] = Counter()
    for parameter, place in named_parameters(registry.model_class(config.architecture)(config)):
        cut = cut_of(config, parameter, place.shape)
        size = prod(place.shape)
        if cut.axis is not None:
            assert sum(units * each for units, each in cut.blocks) == place.shape[cut.axis]
            share = sum(-(-units // ways) * each for units, each in cut.blocks)
            size = size // place.shape[cut.axis] * share
        if parameter.startswith("model.layers."):
            shared[int(parameter.split(".")[2])] += size
    assert shared == planned


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_exchange_what_is_planned(name, tp, folder_of):
    spec, checkpoint = open_spec(folder_of(name)), open_checkpoint(folder_of(name))
    config = checkpoint.config()
    ops = plan_step(load_checkpoint(checkpoint, config))[0].ops
    exchange = exchange_of(spec, tp)
    planned = exchange.token_values, exchange.row_values
    if tp > config.num_heads:
        with pytest.raises(CannotFuse, match="cannot be divided"):
            Division(ops, Part(0, tp))
        return
    division = Division(ops, Part(0, tp))
    assert division.exchanged(ops) == planned
    # Barriers of all ranks: behind each op that they share, and between the products of experts.
    experts = [op for op in ops if isinstance(op, FusedExperts)]
    between = sum(division.part.divides(op.experts[0].gate.shape[0]) for op in experts)
    assert sum(map(division.meets, ops)) + between == exchange.meetings


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("hybrid:")])
def test_ranks_add_up_what_is_planned(name, folder_of):
    """The bytes of a step of 5 tokens, 3 of which are sampled; as devices with links would."""
    spec, checkpoint = open_spec(folder_of(name)), open_checkpoint(folder_of(name))
    config, (rows,) = checkpoint.config(), passes([Span(0, 3), Span(0, 1), Span(0, 1)])
    if config.state_layers:
        pytest.skip("there are no kernels of GPUs for recurrent layers")
    if config.num_heads % 2:
        pytest.skip("it runs, and plans refuse it")
    precision = replace(precision_of(spec), activation_bytes=4.0)
    link = link_of(find_device("h100 sxm")[0])
    said = transfers(rank_model(spec, precision, Parallel(tp=2)), rows, link)
    planned = {each.name: each.num_bytes for each in said}
    model = load_checkpoint(checkpoint, config)

    def counted(group: NcclGroup) -> dict[str, int]:
        program = rank_program(config, model, group)
        program.run(step_of((0, 0, 3), (1, 0, 1), (2, 0, 1)).padded(5, 3))
        program.logits(
            torch.tensor([2, 3, 4], dtype=torch.int32), torch.empty(3, config.vocab_size)
        )
        return group.num_bytes

    for found in in_ranks(2, counted):
        sums = planned["embedding.all_reduce"] + planned["layers.all_reduce"]
        if name.startswith("olmo"):  # normed over all heads: every rank computes all of them
            sums -= config.num_layers * 5 * config.hidden_size * 4
        assert found["sum"] == sums
        # Each gives as many as the one that has most, in tiles of 16 tokens.
        assert 0 <= 2 * found["gather"] - planned["head.all_gather"] < 2 * 3 * 16 * 4


# The last layer of a stage ends with a norm, or with a sum of experts and shared ones, which the
# next stage adds to the hidden states: it gets both.
TWO_ROWS = {
    *("gemma2", "gemma2-odd", "gemma3", "glm4", "glm4-odd", "olmo2", "olmo2-odd", "olmo3"),
    *("qwen2-moe", "glm4-moe", "deepseek-v2", "deepseek-v2-groups-yarn", "deepseek-v3"),
    *("hybrid:granite-experts", "hybrid:qwen3-next-experts"),
}


@pytest.mark.parametrize("name", NAMES)
def test_stages_send_what_is_planned(name, folder_of):
    """Hidden states of each token, as 32-bit floats, and a second row where one is left to norm or
    to add up."""
    spec, checkpoint = open_spec(folder_of(name)), open_checkpoint(folder_of(name))
    plan = plan_step(load_checkpoint(checkpoint, checkpoint.config()))[0]
    parallel, (device, _) = Parallel(pp=2), find_device("epyc-turin")
    model = rank_model(spec, precision_of(spec), parallel)
    (sent,) = transfers(model, RowCounts(3, 1, [0]), link_between(device, parallel))
    widths = [value.width for value in plan.stage(Stage(0, 2)).outputs]
    assert sum(widths) == spec.hidden_size * (2 if name in TWO_ROWS else 1)
    assert sent.num_bytes == 3 * 4 * sum(widths)


@pytest.mark.parametrize("name", tiny_hybrids.CASES)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_states_of_a_rank_are_planned(name, tp, folder_of):
    """A plan counts the most of each part, which need not be of one rank."""
    folder = folder_of(f"hybrid:{name}")
    spec, config = open_spec(folder), open_checkpoint(folder).config()
    ranks = [
        sum(prod(shape) for layer in config.state_layers_of(part) for shape in layer.shapes)
        for part in Part(size=tp).of_all_ranks()
    ]
    planned, whole = (
        sum(mixer.state_values(said) for layer in spec.layers for mixer in layer.mixers)
        for said in (shares(tp, "gather"), shares(1))
    )
    assert max(ranks) <= planned <= whole
    if tp < 3:
        assert max(ranks) == planned
    assert (planned < whole) == (tp > 1)


@pytest.mark.parametrize("name", [*EXPERT_CASES, *(n for n in LATENT_CASES if "moe" in n)])
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_with_whole_experts_exchange_what_is_planned(name, tp, folder_of):
    spec, checkpoint = open_spec(folder_of(name)), open_checkpoint(folder_of(name))
    config = checkpoint.config()
    if tp > config.num_heads:
        pytest.skip("more ranks than heads")
    ops = plan_step(load_checkpoint(checkpoint, config))[0].ops
    experts = [op for op in ops if isinstance(op, FusedExperts)]
    places = ExpertPlaces(tuple(deal_out(op.routing.num_experts, tp) for op in experts))
    exchange = exchange_of(spec, tp, has_whole_experts=True)
    division = Division(ops, Part(0, tp, places))
    assert division.exchanged(ops) == (exchange.token_values, exchange.row_values)
    assert sum(map(division.meets, ops)) + len(experts) == exchange.meetings
    # The plan's ranks have as many experts, of the one that has most.
    held = [sum(rank in ranks for ranks in places.layers[0]) for rank in range(tp)]
    planned = {
        weight.of_rank(Parallel(tp=tp, ep=tp, scheme="gather")).experts
        for weight in weights(spec)
        if weight.has_experts
    }
    assert planned == {max(held)}


# Those that GGUF files can say, one of each architecture.
IN_GGUF = [
    *("llama", "llama-biases", "mistral-window", "qwen2", "qwen3", "gemma3", "mixtral"),
    *("qwen2-moe", "qwen3-moe", "glm4-moe", "olmoe", "granite-moe", "gpt-oss"),
    *("deepseek-v2", "deepseek-v3", "phi3", "glm4", "olmo2", "cohere2", "starcoder2", "gpt2"),
    *("granite", "smollm3"),
    *(f"hybrid:{name}" for name in tiny_hybrids.GGUF_CASES),
]


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_is_planned_as_its_folder(name, folder_of, tmp_path):
    folder, path = folder_of(name), tmp_path / "model.gguf"
    export_gguf(path, open_checkpoint(folder), lambda matrix: GGMLType.F32)
    spec, config = open_spec(path), open_checkpoint(path).config()
    assert spec.why_not_run is None
    expected = tensors_of_modules(config)
    if "output.weight" in open_checkpoint(path).tensors and config.tie_embeddings:
        expected[None] += config.vocab_size * config.hidden_size
    assert tensors_of_spec(spec) == expected
    here, there = (
        [(layer.mixers, layer.mlp) for layer in each.layers] for each in (spec, open_spec(folder))
    )
    assert here == there


@pytest.mark.parametrize("listed", RUNNING, ids=lambda listed: listed.model_type)
def test_a_family_is_known_by_each_of_its_names(listed):
    family = registry.declared_in(listed)
    assert family.architecture == listed.names[0]
    assert family.model_type == listed.model_type
    for name in listed.names:
        assert registry.listed_of({"architectures": [name]}) is listed
        assert registry.why_not_run({"architectures": [name]}) is None
    for kind in listed.model_types:
        assert registry.listed_of({"model_type": kind}) is listed
        assert registry.why_not_run({"model_type": kind}) is None
        assert registry.architecture_of({"model_type": kind}) == listed.names[0]
    for kind in listed.alike:  # planned as the family, and not run as it
        assert registry.listed_of({"model_type": kind}) is listed
        config = {"architectures": [listed.names[0]], "model_type": kind}
        assert kind in (registry.why_not_run(config) or "")


def test_a_family_is_either_run_or_planned_by_what_is_said_of_it():
    assert {listed.model_type for listed in PLANNED} == set(hf_families.FAMILIES)
    kinds = [kind for each in registry.FAMILIES for kind in (*each.model_types, *each.alike)]
    names = [name for each in registry.FAMILIES for name in each.names]
    assert len(set(kinds)) == len(kinds)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("listed", PLANNED, ids=lambda listed: listed.model_type)
def test_a_family_that_is_only_planned_says_so(listed, tmp_path):
    name, kind = listed.names[0], listed.model_type
    for config in ({"architectures": [name]}, {"model_type": kind}):
        reason = registry.why_not_run(config)
        assert reason is not None
        assert listed.lacks in reason
    with pytest.raises(UnsupportedModelError, match="can be planned"):
        config_from_hf({"architectures": [name], "model_type": kind}, path=tmp_path / "config.json")


LLAMA = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def test_a_config_is_known_by_either_key():
    by_type = spec_from_hf({**LLAMA, "model_type": "llama"})
    by_name = spec_from_hf({**LLAMA, "architectures": ["LlamaForCausalLM"]})
    assert by_type == by_name
    read = [
        config_from_hf({**LLAMA, **key})
        for key in ({"model_type": "llama"}, {"architectures": ["LlamaForCausalLM"]})
    ]
    assert read[0] == read[1]
    with pytest.raises(UnsupportedModelError, match="llamo.*cannot be planned"):
        spec_from_hf({**LLAMA, "model_type": "llamo"})


def planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    main(["plan", str(folder), "--hardware", "l4", "--json"])
    document: dict = json.loads(capsys.readouterr().out)
    return document


def test_a_folder_that_runs_is_planned_whatever_else_its_config_says(tiny_hf, tmp_path, capsys):
    """A size that no family reads, and that the tensors do not have."""
    config = json.loads((tiny_hf("llama") / "config.json").read_text())
    config |= {"num_local_experts": 8, "moe_intermediate_size": 32}
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    copyfile(tiny_hf("llama") / "model.safetensors", tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config().num_layers == 3
    document = planned(tmp_path, capsys)
    assert document["runs"] is True
    assert document["why_not_run"] is None
    with pytest.raises(UnsupportedModelError, match="num_local_experts"):
        spec_from_hf(config)


def test_plan_says_that_a_model_cannot_be_run_and_generate_that_it_can_be_planned(tmp_path, capsys):
    config = {**LLAMA, "architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    document = planned(tmp_path, capsys)
    assert document["runs"] is False
    assert "GemmaForCausalLM" in document["why_not_run"]
    assert any("no code to run it" in warning for warning in document["warnings"])
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert main(["generate", str(tmp_path), "--prompt", "x", "--model-impl", "octavo"]) == 1
    assert "`octavo plan`" in capsys.readouterr().err


def test_parameters_of_a_rope_that_octavo_does_not_have_can_be_planned():
    config = {**LLAMA, "model_type": "llama", "rope_scaling": {"rope_type": "spiral"}}
    with pytest.raises(UnsupportedModelError, match="spiral"):
        config_from_hf(config)
    plain = spec_from_hf({**LLAMA, "model_type": "llama"})
    assert num_parameters(spec_from_hf(config)) == num_parameters(plain)
