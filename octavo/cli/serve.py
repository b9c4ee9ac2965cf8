"""``octavo serve``: the HTTP server and its chat page, of one model or of several."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from octavo.cli.config_file import add_config_flag, with_config
from octavo.cli.engine_flags import (
    add_engine_flags,
    add_flags,
    engine_kwargs,
    given_settings,
)
from octavo.cli.served_models import served_models
from octavo.hub import DEFAULT_MODEL
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.calibration.store import CalibrationProfile

EXAMPLES = """\
examples:
  octavo serve
  octavo serve smollm2-135m --port 9000 --max-num-seqs 32
  octavo serve ./model --host 0.0.0.0 --api-key-file keys.txt
  octavo serve --config server.yaml --port 9000
  octavo serve smollm2-135m qwen2.5-coder-0.5b --model-memory 4GiB --idle-unload 600
  octavo serve --model-dir ~/models          # each is loaded when a request names it

then, from anywhere on this machine:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
"""


# Settings of a server that are in the short help.
_OFTEN = (
    *("host", "port", "api_key_file", "served_model_name", "allowed_origin"),
    *("max_concurrent_per_key", "chat_template", "log_format", "model_dir", "model_memory"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="*",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="alias, folder, .gguf file or hub id; of several, requests say which one "
        f"(default: {DEFAULT_MODEL})",
    )
    add_config_flag(parser)
    _add_flags(parser)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "server", ServerSettings, often=_OFTEN)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    said = engine_kwargs(args)
    args = with_config(args, _add_flags)
    settings = ServerSettings(**given_settings(args, ServerSettings))
    found = served_models(args, said)
    if not settings.has_registry and found.is_one:
        from octavo.server.run import serve  # FastAPI is imported when there is something to serve

        model = found.models[0].args
        return serve(model, settings, partial(_calibration, model.model))
    from octavo.server.run import serve_several

    has_only_a_folder = settings.model_dir is not None and not found.are_named
    models = [] if has_only_a_folder else found.models
    return serve_several(models, found.args_of, settings, _calibration)


def _calibration(model: str) -> CalibrationProfile | None:
    from octavo.calibration.known_profiles import profile_here

    return profile_here(model)
