"""Answers of the whole engine to schemas of all keywords are valid."""

from __future__ import annotations

import pytest

from octavo.bench.offline.session import OfflineSession
from octavo.bench.structured.validity_study import ValidityStudy
from octavo.settings.engine import EngineArgs


@pytest.fixture(scope="module")
def session(tiny_model):
    with OfflineSession(EngineArgs(str(tiny_model), max_num_seqs=32, threads=1)) as session:
        yield session


def check(session, numbers, max_tokens):
    for row in ValidityStudy(session, numbers, max_tokens).measure():
        assert row.failures == [] and row.is_sound
        assert row.schemas == len(numbers) == row.finished + row.cut + row.refused.total()
        assert row.finished > 0.3 * row.schemas and row.refused.total() < 0.1 * row.schemas


def test_finished_answers_are_valid_and_cut_ones_can_be_finished(session):
    check(session, range(40), 30)


@pytest.mark.long
def test_finished_answers_to_two_thousand_schemas_are_valid(session):
    check(session, range(2000), 100)
