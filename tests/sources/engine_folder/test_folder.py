"""An engine folder answers as its model does, to the bit, and starts only if it is whole."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import quantized
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError, ModelError, ModelFileError, UnsupportedModelError
from octavo.base.model_files import ENGINE_MANIFEST
from octavo.runtime.capacity import RankSpec
from octavo.serving.load import load_engine
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder import folder as folder_module
from octavo.sources.engine_folder.folder import EngineFolder
from octavo.sources.engine_folder.manifest import CONSTANTS_FILE, WEIGHTS_FILE
from octavo.sources.engine_folder.writer import build_engine_folder

PROMPTS = ["Hello, this is", "The sea", "x" * 70]
WAYS = (
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
)


@pytest.fixture
def copy(tiny_engine, tmp_path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(tiny_engine, tmp_path / "copy")
    return tmp_path / "copy"


def change_manifest(folder: Path, **changes) -> None:
    path = folder / ENGINE_MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def answers(model: Path, **settings):
    with LLM(str(model), num_blocks=64, max_num_seqs=4, **settings) as llm:
        assert llm.engine_info()["kernels"] == "native"
        found = []
        for way in WAYS:
            params = SamplingParams(max_tokens=12, ignore_eos=True, **way)
            for output in llm.generate(PROMPTS, params):
                best = output.outputs[0]
                found.append((best.token_ids, best.text, best.logprobs, output.prompt_logprobs))
        chat = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=8, seed=1))
        return found, chat[0].prompt_token_ids, chat[0].outputs[0].token_ids


def test_answers_are_those_of_the_model(tiny_model, tiny_engine):
    assert answers(tiny_engine) == answers(tiny_model)


def test_answers_where_columns_are_in_another_order(tiny_model, tmp_path):
    """A matrix of GPTQ whose groups are scattered over its inputs: their order is in the folder."""
    model, out, name = tmp_path / "model", tmp_path / "engine", "model.layers.1.mlp.down_proj"
    shutil.copytree(tiny_model, model)
    tensors = load_file(model / "model.safetensors")
    n, k = tensors.pop(f"{name}.weight").shape
    rng = np.random.default_rng(0)
    parts = quantized.gptq(rng, n, k, group=32, order=rng.permutation(k) // 32).tensors
    tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (model / "config.json").write_text(json.dumps(config))
    build_engine_folder(EngineArgs.from_kwargs(str(model)), out)
    assert answers(out) == answers(model)

    manifest = json.loads((out / ENGINE_MANIFEST).read_text())
    is_reordered = {name: entry[5] for name, entry in manifest["weights"].items()}
    assert is_reordered.pop(f"{name}.weight") and not any(is_reordered.values())


@pytest.mark.slow
def test_answers_of_a_real_model(smollm2_gguf, tmp_path):
    out = tmp_path / "smollm2"
    built = build_engine_folder(EngineArgs.from_kwargs(str(smollm2_gguf)), out)
    assert built.sources.keys() == {smollm2_gguf.name}
    assert built.num_bytes == sum(file.stat().st_size for file in out.iterdir())
    assert answers(out) == answers(smollm2_gguf)


def test_what_it_says_of_itself_is_what_the_model_says(tiny_model, tiny_engine):
    ours, theirs = (load_engine(EngineArgs(model=str(p))) for p in (tiny_engine, tiny_model))
    assert ours.model_config == theirs.model_config
    assert ours.config.scheduler == theirs.config.scheduler
    for name in ("weights_bytes", "kernels", "isa", "block_size", "dtype", "device"):
        assert ours.info[name] == theirs.info[name]
    assert ours.text_engine.eos_token_ids == theirs.text_engine.eos_token_ids


def test_a_file_is_read_through_once(copy, tmp_path, monkeypatch):
    notes, read = tmp_path / "notes", []
    digest = folder_module.digest
    monkeypatch.setattr(folder_module, "digest", lambda *a: read.append(1) or digest(*a))
    spec = RankSpec(copy, threads=1)
    EngineFolder(copy, notes).load_rank(spec)
    assert len(read) == 2  # weights and constants
    EngineFolder(copy, notes).load_rank(spec)
    assert len(read) == 2
    os.utime(copy / WEIGHTS_FILE)
    EngineFolder(copy, notes).load_rank(spec)
    assert len(read) == 3
    EngineFolder(copy).load_rank(spec)  # where nothing is noted
    assert len(read) == 5


def test_who_has_built_it_does_not_read_it_through(tiny_model, tmp_path, monkeypatch):
    out, notes = tmp_path / "out", tmp_path / "notes"
    build_engine_folder(EngineArgs.from_kwargs(str(tiny_model)), out, notes)
    monkeypatch.setattr(folder_module, "digest", None)
    EngineFolder(out, notes).load_rank(RankSpec(out, threads=1))
    EngineFolder(out, notes).tokenizer()


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONSTANTS_FILE, "tokenizer.json"])
@pytest.mark.parametrize("damage", ["changed", "cut off", "longer", "missing"])
def test_damage_is_found_and_named(copy, tmp_path, name, damage):
    path = copy / name
    load_engine(EngineArgs(model=str(copy)))  # noted as sound
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[len(content) // 2] ^= 1
    path.unlink()
    if damage != "missing":
        size = {"cut off": len(content) - 1, "longer": len(content) + 1}.get(damage, len(content))
        path.write_bytes(bytes(content[:size]).ljust(size, b"\0"))
    expected = {"changed": "damaged, or changed", "missing": "is missing"}.get(damage, "when built")
    with pytest.raises(ModelFileError, match=expected) as caught:
        load_engine(EngineArgs(model=str(copy)))
    assert name in str(caught.value)


def test_a_byte_that_changes_in_place_is_seen(copy):
    """With its time of change put back, as only somebody who wants to deceive does."""
    load_engine(EngineArgs(model=str(copy)))
    path = copy / WEIGHTS_FILE
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ModelFileError, match="damaged, or changed"):
        load_engine(EngineArgs(model=str(copy)))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"version": 99}, UnsupportedModelError, ["version", "99", "octavo build"]),
        ({"layout": "v0"}, UnsupportedModelError, ["layout", "v0", "octavo build"]),
        ({"format": "other"}, ModelFileError, ["format", "no engine folder"]),
        ({"activations": "int4"}, ModelFileError, ["activations", "int8, mixed, int16"]),
        ({"program": {}}, ModelFileError, ["program.values", "missing"]),
        ({"tokenizer": "x"}, ModelFileError, ["tokenizer", "no kind of tokenizer"]),
        ({"settings": {"speed": 1}}, ModelFileError, ["settings", "speed"]),
        ({"settings": {"threads": 10**6}}, ModelFileError, ["settings", "threads"]),
        ({"settings": {"kernels": "reference"}}, ModelFileError, ["settings", "kernels"]),
        *(
            ({"settings": {name: value}}, ModelFileError, ["settings", name, "may come from any"])
            for name, value in {
                "kv_offload": "/tmp/elsewhere:1GiB",
                "spec_model": "org/model",
                "spec_method": "ngram",
                "speculative_config": {"method": "draft_model", "model": "org/model"},
                "model_impl": "transformers",
                "model": "org/model",
                "swap_space": 64.0,
                "trust": "none",
            }.items()
        ),
        ({"settings": {"max_model_len": "x"}}, ModelFileError, ["settings", "max_model_len"]),
        ({"files": {"../x": {"bytes": 1, "digest": ""}}}, ModelFileError, ["../x"]),
    ],
)
def test_other_folders_are_refused(copy, changes, error, words):
    change_manifest(copy, **changes)
    with pytest.raises(error) as caught:
        load_engine(EngineArgs(model=str(copy)))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_link_that_leads_out_is_not_followed(copy, tmp_path):
    shutil.move(copy / WEIGHTS_FILE, tmp_path / "elsewhere")
    (copy / WEIGHTS_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelFileError, match="leads out of the folder"):
        load_engine(EngineArgs(model=str(copy)))


def test_a_machine_without_native_kernels(tiny_engine, monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "none")
    with pytest.raises(ConfigError, match="an engine folder is for native kernels.*OCTAVO_ISA"):
        load_engine(EngineArgs(model=str(tiny_engine)))


def test_it_runs_at_every_level(tiny_model, tiny_engine, monkeypatch):
    """The same folder: it is of no instruction set."""
    from octavo.kernels.cpu import library

    assert len(library.runnable()) > 1
    monkeypatch.setenv("OCTAVO_ISA", "scalar")
    assert answers(tiny_engine) == answers(tiny_model)


def test_who_wants_a_checkpoint_is_told_what_it_is(tiny_engine):
    from octavo.models.checkpoint import open_checkpoint

    with pytest.raises(ModelError, match="an engine folder"):
        open_checkpoint(tiny_engine)


@pytest.mark.parametrize("source", ["x; rm -rf ~", "$(reboot)", "a\x1b[2Jb", "x" * 5000])
def test_a_command_that_is_proposed_does_only_what_it_says(copy, source):
    change_manifest(copy, version=99, source=source)
    with pytest.raises(UnsupportedModelError) as caught:
        EngineFolder(copy)
    command = str(caught.value).rpartition("again: ")[2]
    expected = source if source.isprintable() and len(source) < 100 else "MODEL"
    assert shlex.split(command) == ["octavo", "build", expected, "OUT"]
    assert str(caught.value).isprintable()


def test_a_file_that_was_not_built_is_not_read(copy):
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ModelFileError, match="chat_template.jinja is not among those"):
        load_engine(EngineArgs(model=str(copy)))
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFileError, match="tokenizer_config.json: the file is missing"):
        load_engine(EngineArgs(model=str(copy)))


def test_nested_templates_are_checked_too(tiny_model, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_model, source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "loud.jinja").write_text("{{ messages[0].content }}!")
    built = build_engine_folder(EngineArgs.from_kwargs(str(source)), out)
    assert "additional_chat_templates/loud.jinja" in built.sources
    load_engine(EngineArgs(model=str(out)))
    (out / "additional_chat_templates" / "loud.jinja").write_text("{{ messages[0].content }}?")
    with pytest.raises(ModelFileError, match="loud.jinja.*damaged, or changed"):
        load_engine(EngineArgs(model=str(out)))
