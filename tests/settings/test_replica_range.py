"""``data_parallel_size``, a number or a range."""

from __future__ import annotations

import pytest

from octavo.base.errors import ConfigError
from octavo.settings.engine import EngineArgs
from octavo.settings.replica_range import ReplicaRange, parse_replicas


@pytest.mark.parametrize(
    ("value", "range_"),
    [(3, (3, 3)), ("3", (3, 3)), ("1..8", (1, 8)), ("2..2", (2, 2))],
)
def test_numbers_and_ranges(value, range_):
    assert parse_replicas(value) == ReplicaRange(*range_)
    assert parse_replicas(value).is_elastic == (range_[0] < range_[1])


@pytest.mark.parametrize("value", [0, -1, "0..3", "..3", "1..", "1-3", 1.5, True, None, "1..2..3"])
def test_others_are_refused(value):
    with pytest.raises(ConfigError, match="data_parallel_size must be an integer of at least 1"):
        parse_replicas(value)


def test_the_lower_one_comes_first():
    with pytest.raises(ConfigError, match="write the lower number first"):
        EngineArgs("m", data_parallel_size="8..1")


def test_engines_alone_have_no_replicas():
    for settings in ({"data_parallel_size": "1..2"}, {"distributed": "ray"}):
        args = EngineArgs("m", **settings)
        assert args.has_replicas
        with pytest.raises(ConfigError, match="only a server"):
            args.refuse_replicas()
    assert not EngineArgs("m").has_replicas


def test_an_address_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="ray_address is of distributed ray"):
        EngineArgs("m", ray_address="127.0.0.1:6379")
