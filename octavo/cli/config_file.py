"""Settings in a file, in place of flags: ``octavo serve --config FILE``.

The names are those of the flags, with hyphens or underscores, and ``model`` is MODEL::

    model: smollm2-135m
    max-num-seqs: 32
    speculative-config: {method: auto}
    enable_prefix_caching: false

What is given on the command line, too, counts there. ``octavo serve`` takes several models as
``models``, each with settings of its own (`octavo.cli.served_models`).
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from octavo.cli import UsageError
from octavo.cli.flags import add_value, as_command_line
from octavo.cli.parser import CommandParser

_MODEL, _MODELS = "model", "models"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser,
        "--config FILE",
        "settings in YAML, TOML or JSON, by the names of the flags here, and model; what is "
        "given as a flag, too, counts",
    )


def with_config(
    args: argparse.Namespace, add_flags: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Return the arguments, completed by those of the file that ``--config`` names; what it says of
    ``models`` is left as it is.

    Args:
        args: of a parser whose flags are left out where they are not given, MODEL too.
        add_flags: declares those that may be in the file.

    Raises:
        UsageError: the file cannot be read, or says what no flag does.
    """
    if args.config is None:
        return args
    settings = _read(Path(args.config).expanduser())
    model, models = settings.pop(_MODEL, None), settings.pop(_MODELS, None)
    found = vars(parse_settings(settings, args.config, add_flags))
    if model is not None:
        found[_MODEL] = [str(each) for each in model] if isinstance(model, list) else str(model)
    if models is not None:
        found[_MODELS] = models
    return argparse.Namespace(**{**found, **vars(args)})


def parse_settings(
    settings: Mapping[str, Any], where: str, add_flags: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Return settings of a file as the arguments that flags of these names would give.

    Args:
        where: they are, for errors.

    Raises:
        UsageError: there is no such flag, or its value is wrong.
    """
    parser = _FileParser(prog=where, add_help=False, allow_abbrev=False)
    add_flags(parser)
    return parser.parse_args(as_command_line(settings))


class _FileParser(CommandParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        settings = _parse(text, path.suffix)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {path}: {reason}") from None
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise UsageError(f"--config {path} has no settings by name")
    return {name.replace("-", "_"): value for name, value in settings.items()}


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
