from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from octavo.base.errors import ConfigError
from octavo.base.options import check_least, option, parse_duration
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


@dataclass(frozen=True)
class Bounded:
    """A count that must be there, and a bound that need not."""

    count: int = option(1, "a count", least=1)
    bound: int | None = option(8, "a bound", least=1)
    share: float = option(0.5, "a share", least=0.0)


def test_values_below_the_least_are_refused_by_name():
    check_least(Bounded(count=1, bound=1, share=0))
    for name, value in [("count", 0), ("count", 1.5), ("bound", 0), ("share", -0.1)]:
        with pytest.raises(ConfigError, match=rf"{name} must be .*at least .*, not {value}"):
            check_least(replace(Bounded(), **{name: value}))


def test_none_is_accepted_where_the_annotation_says_so():
    check_least(Bounded(bound=None))
    with pytest.raises(ConfigError, match="count must be an integer of at least 1, not None"):
        check_least(Bounded(count=None))
