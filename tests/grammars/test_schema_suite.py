"""The cases of the JSON Schema Test Suite, where it is: see tests/support/schema_suite.py."""

from __future__ import annotations

from collections import Counter

import pytest
from schema_suite import DRAFTS, cases, counts_of, suite


@pytest.mark.skipif(suite() is None, reason="JSON_SCHEMA_TEST_SUITE is no directory of the suite")
@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_invalid_is_allowed_and_most_schemas_are_supported(draft):
    counts: Counter[str] = Counter()
    for case in cases(suite(), draft):
        found = counts_of(case)
        assert not found["wrong"], case
        counts += found
    assert counts["refused"] < 0.2 * counts["schemas"], counts
    assert counts["allowed"] > 0.9 * counts["valid"], counts
