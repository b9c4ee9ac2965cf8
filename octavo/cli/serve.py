"""``octavo serve``: the HTTP server and its chat page."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from octavo.cli.config_file import add_config_flag, with_config
from octavo.cli.engine_flags import (
    add_engine_flags,
    add_flags,
    add_model_argument,
    engine_kwargs,
    given_settings,
)
from octavo.hub import DEFAULT_MODEL
from octavo.server.settings import ServerSettings
from octavo.settings.engine import EngineArgs

if TYPE_CHECKING:
    from octavo.calibration.store import CalibrationProfile

EXAMPLES = """\
examples:
  octavo serve
  octavo serve smollm2-135m --port 9000 --max-num-seqs 32
  octavo serve ./model --host 0.0.0.0 --api-key-file keys.txt
  octavo serve --config server.yaml --port 9000

then, from anywhere on this machine:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
"""


# Settings of a server that are in the short help.
_OFTEN = (
    *("host", "port", "api_key_file", "served_model_name", "allowed_origin"),
    *("max_concurrent_per_key", "chat_template", "log_format"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, default=argparse.SUPPRESS)
    add_config_flag(parser)
    _add_flags(parser)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "server", ServerSettings, often=_OFTEN)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    args = with_config(args, _add_flags)
    model = getattr(args, "model", DEFAULT_MODEL)
    engine_args = EngineArgs.from_kwargs(model, **engine_kwargs(args))
    settings = ServerSettings(**given_settings(args, ServerSettings))
    from octavo.server.run import serve  # FastAPI is imported when there is something to serve

    return serve(engine_args, settings, partial(_calibration, model))


def _calibration(model: str) -> CalibrationProfile | None:
    from octavo.calibration.known_profiles import profile_here

    return profile_here(model)
