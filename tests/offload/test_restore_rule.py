from __future__ import annotations

from octavo.base.errors import ConfigError
from octavo.core.executor import NoModel
from octavo.core.host_kv_cache import AlwaysRestore
from octavo.core.scheduler import SchedulerConfig
from octavo.cost.first_token import LearnedRates
from octavo.models.config import KVSpec
from octavo.offload import restore_rule
from octavo.offload.restore_rule import RestoreIfFaster, predicted_rule


def test_reading_is_worth_what_computing_takes():
    """A millisecond for each token, and one for each pair of a token and one that it sees."""
    rule = RestoreIfFaster(LearnedRates(0.0, prompt_token=1e-3, prompt_pair=1e-3))
    seconds = 1e-3 * (2 + 11 + 12)  # tokens 10 and 11
    assert rule.is_worth(10, 2, seconds - 1e-6) and not rule.is_worth(10, 2, seconds + 1e-6)


class Shape:
    num_layers, num_heads, head_dim, hidden_size, vocab_size = 1, 1, 16, 16, 32
    kv_layers = (KVSpec("full", 1, 16, 16),)


def test_where_nothing_is_foreseen_it_is_always_read(monkeypatch, caplog):
    def nothing():
        raise ConfigError("this machine cannot be measured")

    monkeypatch.setattr(restore_rule, "this_machine", nothing)
    with caplog.at_level("INFO", "octavo"):
        rule = predicted_rule(Shape(), NoModel(), SchedulerConfig())
    assert isinstance(rule, AlwaysRestore) and "cannot be measured" in caplog.text
    assert rule.is_worth(0, 1, 1e9)
