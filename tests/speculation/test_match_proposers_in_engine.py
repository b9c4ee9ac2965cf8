"""Proposers in an engine that is short of blocks: nobody's answer changes, nothing is kept."""

from __future__ import annotations

import pytest
from hash_model import HashExecutor, expected_tokens

from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.speculation.ngram import NgramProposer
from octavo.speculation.suffix import SuffixProposer

VOCAB = 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_preempted_requests_go_on(make, depth):
    proposer = make()
    config = SchedulerConfig(max_model_len=64, runs_ahead=depth > 1, max_num_batched_tokens=32)
    scheduler = Scheduler(config, BlockManager(20, 4, RadixPrefixCache(4)), proposer=proposer)
    engine = Engine(scheduler, HashExecutor(20, 4, vocab_size=VOCAB, depth=depth))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(str(i), [i % 3, 1, 2, i % 2], params, 0.0) for i in range(8)]
    for request in requests:
        engine.add(request)
    engine.abort("5")
    while engine.step() is not None:
        engine.check_integrity()
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, 40, VOCAB)
        assert request.output_token_ids == ([] if request.request_id == "5" else expected)
    assert scheduler.num_preemptions > 0 and scheduler.drafts.num_accepted > 0
    assert not proposer._tracked and not proposer._prompts
    assert proposer.seconds > 0
