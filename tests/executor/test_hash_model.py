"""A checker is worth what it catches: faults of the kinds that paging can have must show."""

from __future__ import annotations

import random

import pytest
from hash_model import FunctionProposer, HashDrafts, HashExecutor, expected_tokens

from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.kv_tables import GONE, ONE_TABLE, Windows
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig


def run_workload(
    cache: RadixPrefixCache,
    manager_type: type[BlockManager] = BlockManager,
    executor_type: type[HashExecutor] = HashExecutor,
    depth: int = 1,
    drafts: bool = False,
    windows: Windows = ONE_TABLE,
) -> bool:
    """Whether all answers of a workload with shared prefixes and preemptions are right."""
    rng = random.Random(7)
    size = cache.block_size
    blocks = manager_type(18 * len(windows), size, cache, windows)
    # A small budget leaves blocks half computed from step to step.
    config = SchedulerConfig(
        max_num_batched_tokens=8 if drafts else 3,
        max_num_seqs=4,
        max_model_len=32,
        runs_ahead=depth > 1,
    )
    proposer = None
    if drafts:
        proposer = FunctionProposer(HashDrafts(random.Random(8), windows=windows), passes=3)
    executor = executor_type(blocks.num_blocks, size, depth=depth, windows=windows)
    engine = Engine(Scheduler(config, blocks, proposer=proposer), executor)
    right = True
    leader = None
    for index in range(150):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
        fork = leader if leader is not None and rng.random() < 0.3 else None
        if fork is not None:
            prompt = list(fork.prompt_token_ids)
        params = SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True)
        request = Request(str(index), prompt, params, 0.0, fork_of=fork)
        engine.add(request)
        leader = request
        for _ in range(rng.randint(0, 4)):
            right &= check(engine.step(), windows)
        if engine.scheduler.running and rng.random() < 0.4:
            engine.abort(engine.scheduler.running[-1].request_id)
    while engine.has_unfinished_requests:
        right &= check(engine.step(), windows)
    return right


def check(step, windows: Windows) -> bool:
    if step is None:
        return True
    return all(
        update.request.output_token_ids
        == expected_tokens(
            update.request.prompt_token_ids, update.request.params.max_tokens, 97, windows
        )
        for update in step.updates
        if update.request.is_finished
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("windows", [ONE_TABLE, (5,), (None, 3), (None, 2, 6)])
def test_the_healthy_engine_is_right(size, depth, drafts, windows):
    cache = RadixPrefixCache(size, windows)
    assert run_workload(cache, depth=depth, drafts=drafts, windows=windows)


class IgnoresParents(RadixPrefixCache):
    """Takes blocks to be equal if their own tokens are, whatever stood before them."""

    def match(self, token_ids, limit, salt):
        by_tokens = {node.tokens: [block] for block, node in self._nodes.items()}
        matched = []
        for start in range(0, min(limit, len(token_ids)) - self.block_size + 1, self.block_size):
            block = by_tokens.get(tuple(token_ids[start : start + self.block_size]))
            if block is None:
                break
            matched.append(block)
        return matched


class MatchesTooMuch(RadixPrefixCache):
    """Compares all tokens of a block but the last."""

    def match(self, token_ids, limit, salt):
        node, matched = self._roots.get(salt), []
        for start in range(0, min(limit, len(token_ids)) - self.block_size + 1, self.block_size):
            wanted = tuple(token_ids[start : start + self.block_size])[:-1]
            children = node.children.items() if node else ()
            node = next((child for key, child in children if key[:-1] == wanted), None)
            if node is None:
                break
            matched.append(node.block_ids)
        return matched


class NeverCopies(BlockManager):
    """Writes into shared blocks."""

    def take_copies(self):
        super().take_copies()
        return ()


class PublishesTooEarly(BlockManager):
    """Publishes the block that is being written next to those that are full."""

    def commit(self, request):
        super().commit(request)
        index, size = request.num_published_blocks, self.block_size
        tokens = tuple(request.token_ids[index * size : (index + 1) * size])
        if len(tokens) == size and index < len(request.block_ids):
            own = request.block_ids[index]
            parent = request.block_ids[index - 1] if index else None
            if own not in self.prefix_cache and self.ref_counts[own] == 1:
                self.prefix_cache.publish(parent, [tokens], [[own]], request.cache_salt)


@pytest.mark.parametrize(
    ("cache", "manager"),
    [
        (IgnoresParents, BlockManager),
        (MatchesTooMuch, BlockManager),
        (RadixPrefixCache, NeverCopies),
        (RadixPrefixCache, PublishesTooEarly),
    ],
)
def test_each_fault_is_noticed(cache, manager):
    def seems_right(block_size: int) -> bool:
        try:
            return run_workload(cache(block_size), manager)
        except (AssertionError, KeyError):
            return False

    assert not (seems_right(2) and seems_right(4))


class ServesWhatWindowsHaveLost(RadixPrefixCache):
    """A hit goes as far as the layers that see all have blocks."""

    def _num_served(self, matched, needs_states):
        return next((i for i, row in enumerate(matched) if row[0] == GONE), len(matched))


class LeavesTooMuchBehind(BlockManager):
    """Gives back blocks one token too early."""

    def _leave_behind(self, request):
        request.num_computed_tokens += 1
        super()._leave_behind(request)
        request.num_computed_tokens -= 1


class CopiesInOneGroup(BlockManager):
    """Leaves the shared block of further groups where it is."""

    def _copy(self, table, index):
        super()._copy(table, index)
        if len(self._copies) % 2 == 0:
            self._copies.pop()


@pytest.mark.parametrize(
    ("cache", "manager"),
    [
        (ServesWhatWindowsHaveLost, BlockManager),
        (RadixPrefixCache, LeavesTooMuchBehind),
        (RadixPrefixCache, CopiesInOneGroup),
    ],
)
def test_each_fault_of_windows_is_noticed(cache, manager):
    def seems_right(block_size: int) -> bool:
        windows = (None, 3)
        try:
            return run_workload(cache(block_size, windows), manager, windows=windows)
        except (AssertionError, KeyError):
            return False

    assert not (seems_right(2) and seems_right(4))


class LeavesThePathWhereItIs(HashExecutor):
    """Does not move the KV of accepted tokens to their positions."""

    def _move(self, tables, path, base):
        pass


class FeedsAnOlderToken(HashExecutor):
    """Goes on from what it sampled one step too early."""

    def _compute(self, work):
        before = self._sampled.get(work.request_id)
        sampled = super()._compute(work)
        if before is not None and sampled and len(work.token_ids) < work.end - work.start:
            sampled = [(sampled[0] + before[1]) % 97]
        return sampled


@pytest.mark.parametrize(
    ("executor", "depth", "drafts"),
    [(LeavesThePathWhereItIs, 1, True), (FeedsAnOlderToken, 2, False)],
)
def test_each_fault_of_what_lies_ahead_is_noticed(executor, depth, drafts):
    cache = RadixPrefixCache(2)
    assert not run_workload(cache, executor_type=executor, depth=depth, drafts=drafts)


def test_the_answer_depends_on_every_token_and_on_their_order():
    base = expected_tokens([1, 2, 3, 4], 8, 10**9)
    assert base != expected_tokens([1, 2, 4, 3], 8, 10**9)
    assert base != expected_tokens([2, 2, 3, 4], 8, 10**9)
    assert base[:4] == expected_tokens([1, 2, 3, 4], 4, 10**9)
