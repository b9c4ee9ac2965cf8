"""Stores what links to other machines were measured to take, a file for each, beside calibrations.

$OCTAVO_HOME/calibrations/link-<name>.json
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, ModelFileError
from octavo.base.fields import Fields
from octavo.base.files import replace_file
from octavo.calibration.store import folder

LINK_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """A link as it was measured: over TCP and TLS, one way.

    Args:
        name: that plans know it by: the host at the other end.
        latency_s, latency_p99_s: of a message of 256 bytes.
        bandwidth: bytes a second of long frames, beside the latency.
        measured_at: ISO 8601, UTC.
    """

    name: str
    latency_s: float
    latency_p99_s: float
    bandwidth: float
    measured_at: str

    def as_json(self) -> dict[str, Any]:
        return {"link_schema": LINK_SCHEMA, **asdict(self)}


def keep_link(link: MeasuredLink) -> Path:
    """Write a link in the place of an older one, and return its path. ConfigError if it cannot be
    written."""
    path = _path(link.name)
    try:
        replace_file(path, (json.dumps(link.as_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def measured_link(name: str) -> MeasuredLink:
    """Return the link of a name.

    Raises:
        ConfigError: it was not measured; says which were, and how it would be.
        ModelFileError: its file is damaged.
    """
    path = _path(name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(each.stem.removeprefix("link-") for each in folder().glob("link-*.json"))
        raise ConfigError(
            f"no link to {name!r:.80} was measured"
            + (f", but to {', '.join(known)}" if known else "")
            + ": `octavo calibrate --link` does that"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(path, f"is no measured link: {error}") from None
    if not isinstance(document, dict) or document.get("link_schema") != LINK_SCHEMA:
        raise ModelFileError(path, "is no measured link of this version: measure it again")
    fields = Fields(path, document)
    return MeasuredLink(
        name=fields.text("name"),
        latency_s=fields.number("latency_s"),
        latency_p99_s=fields.number("latency_p99_s"),
        bandwidth=fields.number("bandwidth"),
        measured_at=fields.text("measured_at"),
    )


def _path(name: str) -> Path:
    return folder() / f"link-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:80]}.json"
