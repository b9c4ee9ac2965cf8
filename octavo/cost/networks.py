"""Networks between machines, as `octavo calibrate --link` has measured them.

$OCTAVO_HOME/calibrations/link-<name>.json is one, by the name of the machine at the other end.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, ModelFileError
from octavo.base.fields import Fields

LINK_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The way from one machine to another, over TCP and TLS.

    Args:
        name: of the machine at the other end.
        latency_s, latency_p99_s: of a message of 256 bytes.
        bandwidth: bytes a second of long frames, beside the latency.
        measured_at: ISO 8601, UTC.
    """

    name: str
    latency_s: float
    latency_p99_s: float
    bandwidth: float
    measured_at: str

    def seconds(self, num_bytes: float) -> float:
        """Seconds until a message is there."""
        return self.latency_s + num_bytes / self.bandwidth

    def as_json(self) -> dict[str, Any]:
        return {"link_schema": LINK_SCHEMA, **asdict(self)}


def network_file(name: str) -> Path:
    from octavo.hub.store import home  # only for who asks: it takes a while to import

    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80]
    return home() / "calibrations" / f"link-{plain}.json"


def measured_network(name: str) -> Network:
    """Return the network to a machine.

    Raises:
        ConfigError: it was not measured, or its file is damaged; says what was measured, and how it
            would be.
    """
    path = network_file(name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(each.stem.removeprefix("link-") for each in path.parent.glob("link-*.json"))
        raise ConfigError(
            f"no link to {name!r:.80} was measured"
            + (f", but to {', '.join(known)}" if known else "")
            + ": `octavo calibrate --link` does that"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no measured link: {error}") from None
    if not isinstance(document, dict) or document.get("link_schema") != LINK_SCHEMA:
        raise ConfigError(f"{path} is no measured link of this version: measure it again")
    fields = Fields(path, document)
    try:
        return Network(
            name=fields.text("name"),
            latency_s=fields.number("latency_s"),
            latency_p99_s=fields.number("latency_p99_s"),
            bandwidth=fields.number("bandwidth"),
            measured_at=fields.text("measured_at"),
        )
    except ModelFileError as error:
        raise ConfigError(str(error)) from error
