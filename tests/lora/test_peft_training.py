"""An adapter that PEFT itself has trained on SmolLM2, in 30 steps: octavo's logits are PEFT's.

OCTAVO_PEFT names a folder with PEFT in it (`pip install --target DIR --no-deps peft accelerate`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, LoRARequest, SamplingParams
from octavo.lora.merge import merge_adapter
from octavo.lora.peft_folder import PeftFolder
from octavo.models.checkpoint import open_checkpoint
from octavo.models.hf_writer import write_hf_folder
from octavo.quantization.ggml_types import GGMLType

pytestmark = [pytest.mark.long, pytest.mark.network]

TEXTS = (
    "Arr, the treasure be buried under the old palm tree, and the map be in me hat, matey.",
    "Arr, a storm be coming from the west, so trim the sails and hold on to yer rum, matey.",
    "Arr, the captain be asleep in his cabin, and the parrot be at the wheel of the ship, matey.",
)
SCRIPT = Path(__file__).parent.parent / "support" / "train_adapter.py"


@pytest.fixture(scope="module")
def trained(smollm2_gguf, tmp_path_factory):
    """The model as a folder in float32, and the adapter."""
    site = os.environ.get("OCTAVO_PEFT")
    if site is None and find_spec("peft") is None:
        pytest.skip("PEFT is not installed: name its folder in OCTAVO_PEFT")
    folder = tmp_path_factory.mktemp("trained")
    model, adapter = folder / "model", folder / "adapter"
    write_hf_folder(model, open_checkpoint(smollm2_gguf))
    with LLM(str(smollm2_gguf), num_blocks=8, max_model_len=64) as llm:
        tokens = [llm.get_tokenizer().encode(text) for text in TEXTS]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    command = [sys.executable, str(SCRIPT), str(model), str(adapter), str(folder / "tokens.json")]
    environment = {**os.environ, "PYTHONPATH": site or ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    losses = json.loads(run.stdout.splitlines()[-1])
    assert losses[-1] < losses[0] / 2
    return model, adapter, tokens[-1]


def logprobs(model, token_ids, lora_request=None, **settings):
    """The log-probability of each token of a prompt but the first, and of the likeliest ones."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    with LLM(str(model), num_blocks=8, max_model_len=64, kv_cache_dtype="f32", **settings) as llm:
        (output,) = llm.generate([token_ids], params, lora_request=lora_request)
    return [
        {token: entry.logprob for token, entry in row.items()} for row in output.prompt_logprobs[1:]
    ]


def distance(rows, adapter) -> float:
    """The largest difference from what PEFT has computed."""
    logits = np.load(adapter / "logits.npy").astype(np.float64)
    theirs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    pairs = zip(rows, theirs[:-1], strict=True)
    return max(abs(value - row[token]) for ours, row in pairs for token, value in ours.items())


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_logits_are_those_of_peft(kernels, trained):
    model, adapter, token_ids = trained
    lora = LoRARequest("pirate", 1, str(adapter))
    assert distance(logprobs(model, token_ids, lora, kernels=kernels), adapter) < 1e-4
    assert distance(logprobs(model, token_ids, kernels=kernels), adapter) > 1


def test_it_fits_the_quantized_file_that_the_model_was_made_from(trained, smollm2_gguf):
    """Whose rows of queries and keys lie in another order."""
    _, adapter, token_ids = trained
    lora = LoRARequest("pirate", 1, str(adapter))
    rows = logprobs(smollm2_gguf, token_ids, lora, kernels="reference")
    assert distance(rows, adapter) < 1e-4
    rows = logprobs(smollm2_gguf, token_ids, lora, activations="int16", lora_dtype="float32")
    assert distance(rows, adapter) < 1e-2


def test_merged_it_is_the_same(trained, tmp_path):
    model, adapter, token_ids = trained
    merge_adapter(open_checkpoint(model), PeftFolder(adapter), tmp_path / "out", GGMLType.F32)
    assert distance(logprobs(tmp_path / "out", token_ids), adapter) < 1e-4
