"""``octavo show``: what is in a model's files, without loading it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import hub
from octavo.base.errors import ConfigError, ModelError, OctavoError
from octavo.base.model_files import ModelFolder
from octavo.cli import terminal
from octavo.cli.engine_flags import add_model_argument
from octavo.cli.flags import add_json_flag, add_switch
from octavo.hub.store import tree_bytes

if TYPE_CHECKING:
    from octavo.models.checkpoint import Checkpoint
    from octavo.text.tokenizer import Tokenizer

EXAMPLES = """\
examples:
  octavo show smollm2-135m
  octavo show ./model --json
  octavo show model.gguf --template        # the chat template alone, as it is
"""

_MOST_STOPS = 16


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_switch(parser, "--template", "print the chat template, and nothing else")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    path = terminal.resolve(args.model)
    if args.template:
        return _print_template(args.model, path)
    document = describe(args.model, path)
    if args.json:
        terminal.print_json(document)
    else:
        _print(document)
    return 0


def describe(name: str, path: Path) -> dict[str, Any]:
    """Return what the files of a model say of it, as JSON. What they do not say is null.

    Raises:
        ModelError, ConfigError: they are damaged, or of a kind that is not known.
    """
    from octavo.cost.open_spec import open_spec
    from octavo.cost.precision import precision_of
    from octavo.cost.weights import num_parameters
    from octavo.models.checkpoint import GGUFFiles, open_checkpoint

    spec = open_spec(path)
    checkpoint = open_checkpoint(path)
    metadata = checkpoint.metadata if isinstance(checkpoint, GGUFFiles) else None
    return {
        "model": name,
        "path": str(path),
        "format": "safetensors" if path.is_dir() else "gguf",
        "bytes": tree_bytes(path) if path.is_dir() else _bytes_of(checkpoint, path),
        "architecture": _architecture(path, metadata),
        "parameters": num_parameters(spec),
        "active_parameters": num_parameters(spec, active=True),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_position,
        "quantization": _quantization(checkpoint, metadata) or precision_of(spec).name,
        "weights": _weights(checkpoint),
        "chat": _chat(path),
        "license": _license(name, path, metadata),
        "why_not_run": spec.why_not_run,
    }


def _bytes_of(checkpoint: Checkpoint, path: Path) -> int:
    from octavo.base.model_files import split_parts

    return sum(path.with_name(part).stat().st_size for part in split_parts(path.name))


def _architecture(path: Path, metadata: Mapping[str, Any] | None) -> str | None:
    if metadata is not None:
        return str(metadata["general.architecture"]) if "general.architecture" in metadata else None
    config = ModelFolder(path).read_json("config.json") or {}
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else config.get("model_type")


def _quantization(checkpoint: Checkpoint, metadata: Mapping[str, Any] | None) -> str | None:
    """Return what the files call their quantization; None if they do not."""
    from octavo.quantization.gguf_mixes import MIXES

    if metadata is None:
        return checkpoint.quantization
    number = metadata.get("general.file_type")
    return next((name for name, mix in MIXES.items() if mix.file_type == number), None)


def _weights(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Return tensors and bytes of each type, the most bytes first."""
    found: dict[str, dict[str, int]] = {}
    for entry in checkpoint.tensors.values():
        name = (checkpoint.quantization or "?") if entry.type is None else entry.type.name
        count = found.setdefault(name, {"tensors": 0, "bytes": 0})
        count["tensors"] += 1
        count["bytes"] += entry.num_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def _chat(path: Path) -> dict[str, Any] | None:
    """Return what the chat template can do; None without a tokenizer that can be read."""
    from octavo.chat_formats.registry import format_of
    from octavo.sources.open import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except (ModelError, ConfigError):
        return None
    source = tokenizer.chat_template or ""
    found = format_of(source, tokenizer.specials.matcher.ids) if source else None
    return {
        "has_template": bool(source),
        "templates": sorted(tokenizer.chat_templates),
        "takes_tools": any("tools" in each for each in tokenizer.chat_templates.values()),
        "tool_format": None if found is None else found.name,
        "thinks": found is not None and found.thoughts is not None,
        "stop_tokens": _stops(tokenizer),
    }


def _stops(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_text(each) for each in sorted(tokenizer.stop_token_ids)[:_MOST_STOPS]]


def _license(name: str, path: Path, metadata: Mapping[str, Any] | None) -> str | None:
    """Return the licence that the files name, or who the model was fetched from."""
    if metadata is not None and isinstance(said := metadata.get("general.license"), str):
        return said
    stored = [model for model in hub.installed() if model.path == path]
    if stored and stored[0].license:
        return stored[0].license
    if (entry := hub.CATALOG.get(name)) is not None:
        return entry.license
    if path.is_dir() and any(path.glob("LICENSE*")):
        return "see " + next(file.name for file in sorted(path.glob("LICENSE*")))
    return None


def _print_template(name: str, path: Path) -> int:
    from octavo.sources.open import load_tokenizer

    template = load_tokenizer(path).chat_template
    if template is None:
        raise OctavoError(f"{name} has no chat template")
    sys.stdout.write(template if template.endswith("\n") else template + "\n")
    return 0


def _print(document: Mapping[str, Any]) -> None:
    weights = ", ".join(
        f"{name} {terminal.format_bytes(each['bytes'])} in {each['tensors']}"
        for name, each in document["weights"].items()
    )
    parameters = f"{document['parameters']:,}"
    if document["active_parameters"] != document["parameters"]:
        parameters += f", of which a token uses {document['active_parameters']:,}"
    rows = [
        ("model", document["model"]),
        ("files", f"{document['path']} ({terminal.format_bytes(document['bytes'])})"),
        ("architecture", document["architecture"] or "?"),
        ("parameters", parameters),
        ("layers", f"{document['num_layers']}, hidden size {document['hidden_size']:,}"),
        ("vocabulary", f"{document['vocab_size']:,} tokens"),
        ("context", f"{document['context_length']:,} tokens"),
        ("quantization", document["quantization"]),
        ("weights", weights),
        ("chat", _chat_in_words(document["chat"])),
        ("licence", document["license"] or "not said"),
    ]
    if document["why_not_run"] is not None:
        rows.append(("does not run", document["why_not_run"]))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        sys.stdout.write(f"{name.ljust(width)}  {text}\n")


def _chat_in_words(chat: Mapping[str, Any] | None) -> str:
    if chat is None or not chat["has_template"]:
        return "no template"
    parts = ["template"]
    if chat["takes_tools"]:
        parts.append(f"tools (calls as {chat['tool_format']})")
    if chat["thinks"]:
        parts.append("thoughts")
    return ", ".join([*parts, f"ends with {' '.join(chat['stop_tokens'])}"])
