from __future__ import annotations

import enum

import pytest

from octavo.base.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from octavo.core.limits import (
    QueueLimits,
    RequestWork,
    WorkBudget,
    check_vocabulary,
    checked_token_ids,
    context_tokens,
    total_tokens_of,
)
from octavo.core.sampling_params import SamplingParams


class Token(enum.IntEnum):
    A = 3


def test_token_ids_are_integers_of_the_vocabulary():
    assert checked_token_ids(range(5), 5) == [0, 1, 2, 3, 4]
    assert checked_token_ids([], 5) == []
    assert checked_token_ids([Token.A], 5) == [3]
    for ids, words in (
        ([1, True], r"prompt: must be integers; position 1 holds True"),
        ([1, 2.0], "position 1 holds 2.0"),
        ([0, "1"], "position 1 holds '1'"),
        ([0, 5], "5 at position 1 is outside the vocabulary of 5 tokens"),
        ([-1], "-1 at position 0"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            checked_token_ids(ids, 5, "prompt")


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids", "logit_bias"])
def test_parameters_name_tokens_that_there_are(name):
    def params(token_id):
        value = {token_id: 1.0} if name == "logit_bias" else [token_id]
        return SamplingParams(**{name: value})

    check_vocabulary(params(4), 5)
    with pytest.raises(InvalidRequestError, match=f"{name}: 5 is outside"):
        check_vocabulary(params(5), 5)


def test_the_length_of_a_request_is_that_of_context_and_pool():
    assert context_tokens(64, 100) == 64
    assert context_tokens(64, 40) == 41  # the last token needs no slot
    assert total_tokens_of(10, 5, 64, 40) == 15
    assert total_tokens_of(10, None, 64, 40) == 41
    for limits, words in (((64, 100), "context holds 64"), ((64, 40), "KV pool holds 41")):
        with pytest.raises(PromptTooLongError, match=words):
            total_tokens_of(64, None, *limits)
    with pytest.raises(PromptTooLongError, match="lower max_tokens to 31") as error:
        total_tokens_of(10, 32, 64, 40)
    assert (error.value.num_prompt_tokens, error.value.limit) == (10, 41)
    with pytest.raises(InvalidRequestError, match="empty"):
        total_tokens_of(0, 1, 64, 40)


def test_work_is_samples_times_the_tokens_that_each_may_have():
    params = SamplingParams(n=2, best_of=3, max_tokens=10)
    assert RequestWork.of(5, params) == RequestWork(samples=3, tokens=45)
    assert RequestWork.of(5, SamplingParams(max_tokens=1)) == RequestWork(1, 6)


def test_a_queue_is_full_or_too_small():
    limits = QueueLimits(max_requests=3, max_tokens=10)
    limits.check(RequestWork(3, 10))
    with pytest.raises(InvalidRequestError, match="4 completions"):
        limits.check(RequestWork(4, 1))
    with pytest.raises(InvalidRequestError, match="11 tokens"):
        limits.check(RequestWork(1, 11))
    QueueLimits().check(RequestWork(10**9, 10**9))


def test_a_budget_counts_what_is_there():
    budget = WorkBudget(QueueLimits(max_requests=3, max_tokens=10))
    budget.take("a", RequestWork(2, 4))
    budget.check("a", RequestWork(1, 6))
    with pytest.raises(QueueFullError, match="2 requests"):
        budget.check("a", RequestWork(2, 2))
    with pytest.raises(QueueFullError, match="4 tokens"):
        budget.check("a", RequestWork(1, 7))
    budget.give_back("a", RequestWork(1, 2))
    budget.check("a", RequestWork(2, 8))
    budget.give_back("a", RequestWork(1, 2))
    assert budget.total == budget.of("a") == RequestWork(0, 0)
    WorkBudget(QueueLimits()).check("a", RequestWork(10**9, 10**9))


def test_who_fills_a_budget_leaves_their_share_to_others():
    budget = WorkBudget(QueueLimits(max_requests=8, max_tokens=80))
    budget.take("flood", RequestWork(8, 80))
    for _ in range(4):  # half of it, as there are two
        budget.check("other", RequestWork(1, 10))
        budget.take("other", RequestWork(1, 10))
    with pytest.raises(QueueFullError):
        budget.check("other", RequestWork(1, 0))
    with pytest.raises(QueueFullError):
        budget.check_tokens("other", 1)
    with pytest.raises(QueueFullError):
        budget.check("flood", RequestWork(1, 0))
    budget.check("third", RequestWork(2, 26))
    with pytest.raises(QueueFullError):
        budget.check("third", RequestWork(3, 0))
