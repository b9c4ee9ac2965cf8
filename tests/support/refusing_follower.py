"""A rank of a stage that cannot be started: see test_remote_stages.py."""

from __future__ import annotations

from octavo.base.errors import ConfigError


def serve(membership, settings, home):
    raise ConfigError("there is no room for this rank")
