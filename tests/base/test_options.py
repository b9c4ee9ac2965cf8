from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.base.options import parse_duration
from octavo.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("said", "seconds"),
    [(500, 0.5), ("500", 0.5), ("500ms", 0.5), ("0.5s", 0.5), (" 2 S ", 2.0), (".5", 0.0005)],
)
def test_durations(said, seconds):
    assert parse_duration(said) == pytest.approx(seconds)
    assert ServerSettings(max_predicted_ttft=said).max_predicted_ttft_seconds == parse_duration(
        said
    )


@pytest.mark.parametrize("said", ["", "fast", 0, "0s", -1, "1m", "nan", "1e400"])
def test_what_is_no_duration(said):
    with pytest.raises(ConfigError, match="max_predicted_ttft: .* write 500, 500ms or 0.5s"):
        ServerSettings(max_predicted_ttft=said)
