"""What rounding is expected to cost, beside what it costs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from loading import load_model
from safetensors.torch import load_file, save_file
from tiny_transformers import make_model

from octavo.base.errors import ConfigError
from octavo.models.config import EMBEDDING, HEAD
from octavo.quantize.layerwise_model import LayerwiseModel, keep, linear_names
from octavo.quantize.scheme import Scheme
from octavo.quantize.sensitivity import _cost, measure_sensitivity
from tests.conftest import write_tiny_model

WINDOWS = torch.randint(256, (24, 32), generator=torch.Generator().manual_seed(5))
IDS = {"vocab_size": 260, "eos_token_id": 256, "bos_token_id": 257}


@dataclass(frozen=True)
class Noise:
    """Stands for a format: errors of this part of the weights, the same for the same matrix."""

    part: float
    name: str = "noise"

    def fits(self, shape):
        return True

    def num_bits(self, shape):
        return 0

    def values(self, weight, importance):
        generator = torch.Generator().manual_seed(weight.numel())
        # Of a row the same wherever it is: the embedding is asked for some of its rows only.
        error = torch.randn(weight.shape[1], generator=generator)
        sign = (weight[:, :1] * 1e6).round().remainder(2) * 2 - 1
        return weight + self.part * weight.std() * error * sign


@pytest.fixture(scope="module", params=["llama", "untied", "gemma3"])
def model(request, tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("models") / request.param)
    if request.param != "llama":
        changes = {"tie_word_embeddings": False} if request.param == "untied" else {}
        kind = "llama" if request.param == "untied" else request.param
        make_model(kind, **IDS, **changes).save_pretrained(path)
    return load_model(path)


def answers(model, visitor=keep, head=None, embedding=None) -> torch.Tensor:
    """Log probabilities with other weights."""
    running = LayerwiseModel(model, WINDOWS)
    if embedding is not None:
        _, scale = running.embedding()
        running.hidden = embedding[WINDOWS.reshape(-1)] * scale
    for index in range(running.num_layers):
        running.run_layer(index, visitor)
    see_head = keep if head is None else (lambda name, x, weight: head)
    with torch.no_grad():
        return running.answers(running.hidden, see_head).log_softmax(dim=-1)


def divergence(exact, found) -> float:
    return float((exact.exp() * (exact - found)).sum(dim=-1).double().mean())


def changed(model, name, noise, is_tied) -> torch.Tensor:
    weight, _ = LayerwiseModel(model, WINDOWS[:1]).embedding()
    if name == EMBEDDING:
        rounded = noise.values(weight, None)
        return answers(model, head=rounded if is_tied else None, embedding=rounded)
    if name == HEAD:
        running = LayerwiseModel(model, WINDOWS[:1])
        seen = []
        running.answers(running.hidden, lambda name, x, weight: seen.append(weight) or weight)
        return answers(model, head=noise.values(seen[0], None))

    def visitor(seen, x, weight):
        return noise.values(weight, None) if seen == name else weight

    return answers(model, visitor)


def test_costs_are_the_divergence_of_each_matrix_alone(model):
    loaded, config = model
    small, large = Noise(0.02), Noise(0.04)
    names = [*linear_names(loaded)[1], EMBEDDING]
    names += [] if config.tie_embeddings else [HEAD]
    costs = measure_sensitivity(
        loaded, WINDOWS, dict.fromkeys(names, [small, large]), is_tied=config.tie_embeddings
    ).costs
    assert costs.keys() == set(names)
    exact = answers(loaded)
    for name in names:
        assert costs[name][1] == pytest.approx(4 * costs[name][0], rel=0.1), name
        lost = divergence(exact, changed(loaded, name, small, config.tie_embeddings))
        assert costs[name][0] == pytest.approx(lost, rel=0.5), name


def test_what_gptq_leaves_of_a_cost(tmp_path):
    """Of each matrix another part, and the same for all of its candidates."""
    loaded = load_model(write_tiny_model(tmp_path / "model")).model
    candidates = dict.fromkeys(linear_names(loaded)[0], [Noise(0.02), Noise(0.04)])
    plain, left = (
        measure_sensitivity(loaded, WINDOWS, candidates, is_tied=True, gptq_scheme=scheme).costs
        for scheme in (None, Scheme(4, 16))
    )
    parts = [left[name][0] / plain[name][0] for name in candidates]
    assert all(0 < part < 1.2 for part in parts) and len(set(parts)) == len(parts)
    for name, part in zip(candidates, parts, strict=True):
        assert left[name][1] == pytest.approx(part * plain[name][1])


def test_an_error_that_stays_the_same_adds_up_over_tokens():
    gradient, error = torch.ones(8, 3), torch.ones(8, 3)
    alternating = error * torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    assert _cost(gradient, error, 4) == 3 * 2 * 4**2 / (2 * 8)
    assert _cost(gradient, alternating, 4) == 0


def test_a_damaged_model_is_said_to_be_damaged(tmp_path):
    folder = write_tiny_model(tmp_path / "damaged")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="not finite"):
        measure_sensitivity(load_model(folder).model, WINDOWS, {}, is_tied=True)
