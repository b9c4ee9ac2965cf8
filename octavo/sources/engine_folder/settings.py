"""The settings of a folder, combined with those of the user who starts it.

The flags of ``octavo build`` are the folder's defaults. A start may set others; limits may only be
lowered; what the folder was built for stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError
from octavo.settings.engine import EngineArgs
from octavo.sources.engine_folder.manifest import Manifest

LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
# The same for all engine folders of a model.
_OF_ALL = ("device", "dtype", "kernels", "quantization")
_FIXED = (*_OF_ALL, "activations")
# Settings that a folder may have: sizes and limits of an engine, and how it schedules and caches.
# It may come from anybody, so no others: no path, no name of another model, which would be fetched,
# and nothing that leads to code, to files or to the network. Threads are a matter of the machine.
STORED = {
    *LIMITS,
    "attention_sinks",
    "batching",
    "block_size",
    "context_shift",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_window_tables",
    "itl_target_ms",
    "kv_cache_dtype",
    "kv_cache_memory",
    "max_queued_requests",
    "max_queued_tokens",
    "n_keep",
    "num_blocks",
    "shared_prefix_decode",
    "window",
}
# Two settings of one thing: a user's choice of one replaces the folder's choice of the other.
_SAME = {"num_blocks": "kv_cache_memory", "kv_cache_memory": "num_blocks"}


def built_for(activations: str, quantization: str | None) -> dict[str, Any]:
    """Return the settings that cannot be changed once a folder is built."""
    return {
        "device": "cpu",
        "dtype": "float32",
        "kernels": "native",
        "activations": activations,
        "quantization": quantization,
    }


def settings_of(manifest: Manifest, args: EngineArgs) -> EngineArgs:
    """Return the settings to start a folder with; ``args`` has those that the user gave.

    Raises:
        ConfigError: they contradict what the folder was built for.
    """
    fixed = built_for(manifest.activations, manifest.quantization)
    given = args.given_settings()
    for name, built in fixed.items():
        asked = given.pop(name, None)
        if asked not in (None, "auto", built):
            raise _contradiction(manifest, name, asked, built)
    folder = _folder_settings(manifest, args.model)
    for name in LIMITS:
        asked = given.get(name)
        if name in folder and isinstance(asked, int) and asked > folder[name]:
            raise _contradiction(manifest, name, asked, f"at most {folder[name]}")
        if name in folder and not isinstance(asked, int):
            given.pop(name, None)
    for name in given:
        folder.pop(_SAME.get(name, name), None)
    chosen: Mapping[str, Any] = {**folder, **given, **fixed}
    return EngineArgs.from_kwargs(args.model, **chosen)


def _folder_settings(manifest: Manifest, model: str) -> dict[str, Any]:
    """Return the manifest's settings, if they are what a folder may set."""
    settings = dict(manifest.settings)
    if not settings.keys() <= STORED:
        others = ", ".join(sorted(settings.keys() - STORED))
        raise manifest.fields.error(
            "settings",
            f"{others:.200}: not for a folder to say, which may come from anybody; give it as a "
            "flag where the folder is started",
        )
    try:
        EngineArgs.from_kwargs(model, **settings)
    except (ConfigError, TypeError, ValueError) as error:
        raise manifest.fields.error("settings", f"{error!s:.300}") from None
    return settings


def _contradiction(manifest: Manifest, name: str, asked: Any, built: Any) -> ConfigError:
    if name in _OF_ALL:
        remedy = f"give the model that it was made from, {manifest.source!r:.200}"
    else:
        remedy = f"another one is made by: {manifest.build_command(**{name: asked})}"
    return ConfigError(
        f"{name} {asked!r:.60}: the engine folder {manifest.path.parent} was built for {built}; "
        f"{remedy}"
    )
