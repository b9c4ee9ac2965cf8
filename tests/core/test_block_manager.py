from __future__ import annotations

from octavo.base.errors import EngineError
from octavo.core.block_manager import BlockManager, SharedPrefix
from octavo.core.kv_tables import GONE
from octavo.core.prefix_cache import RadixPrefixCache

NOTHING = SharedPrefix(0, [[]])


def make_manager(num_blocks: int = 8, block_size: int = 2) -> BlockManager:
    return BlockManager(num_blocks, block_size, RadixPrefixCache(block_size))


def computed(manager: BlockManager, request, num_tokens: int) -> None:
    request.num_computed_tokens = num_tokens
    manager.commit(request)


def test_a_table_grows_by_whole_blocks(make_request):
    manager = make_manager()
    request = make_request("a", [1, 2, 3])
    assert manager.admit(request, NOTHING, 3)
    assert len(request.block_ids) == 2
    request.num_computed_tokens = 3
    assert manager.allocate(request, 4) and len(request.block_ids) == 2
    request.num_computed_tokens = 4
    assert manager.allocate(request, 5) and len(request.block_ids) == 3
    manager.check_integrity([request])


def test_a_refused_allocation_changes_nothing(make_request):
    manager = make_manager(num_blocks=2)
    request = make_request("a", [1, 2, 3, 4, 5])
    assert not manager.admit(request, NOTHING, 5)
    assert request.block_ids == [] and manager.num_free_blocks == 2


def test_headroom_must_stay_free(make_request):
    manager = make_manager(num_blocks=4)
    assert not manager.admit(make_request("a", [1] * 6), NOTHING, 6, headroom=2)
    assert manager.admit(make_request("b", [1] * 6), NOTHING, 6, headroom=1)


def test_freed_blocks_are_cached_if_published_and_free_if_not(make_request):
    manager = make_manager()
    request = make_request("a", [1, 2, 3])
    manager.admit(request, NOTHING, 3)
    computed(manager, request, 3)
    manager.free(request)
    assert (manager.num_free_blocks, manager.num_cached_blocks, manager.num_used_blocks) == (
        7,
        1,
        0,
    )
    manager.check_integrity([])


def test_worthless_blocks_are_reused_before_cached_ones(make_request):
    manager = make_manager(num_blocks=4)
    request = make_request("a", [1, 2, 3])
    manager.admit(request, NOTHING, 3)
    kept, worthless = request.block_ids
    computed(manager, request, 3)
    manager.free(request)
    other = make_request("b", [9] * 6)
    manager.admit(other, NOTHING, 6)
    assert kept not in other.block_ids and worthless in other.block_ids
    assert manager.match(make_request("c", [1, 2, 3]), 2)[:2] == (2, [[kept]])


def test_the_least_recently_used_leaf_is_evicted_first(make_request):
    manager = make_manager(num_blocks=4)
    first, second = make_request("a", [1, 2, 3, 4]), make_request("b", [5, 6, 7, 8])
    for request in (first, second):
        manager.admit(request, NOTHING, 4)
        computed(manager, request, 4)
        manager.free(request)
    newcomer = make_request("c", [9])
    manager.admit(newcomer, NOTHING, 1)
    assert manager.match(make_request("d", [1, 2, 3, 4]), 4).num_tokens == 2  # its tail went
    assert manager.match(make_request("e", [5, 6, 7, 8]), 4).num_tokens == 4


def test_a_match_makes_a_prefix_recent_again(make_request):
    manager = make_manager(num_blocks=4)
    first, second = make_request("a", [1, 2, 3, 4]), make_request("b", [5, 6, 7, 8])
    for request in (first, second):
        manager.admit(request, NOTHING, 4)
        computed(manager, request, 4)
        manager.free(request)
    again = make_request("c", [1, 2, 3, 4])
    manager.admit(again, manager.match(again, 4), 4)
    manager.free(again)
    manager.admit(make_request("d", [9, 9, 9, 9]), NOTHING, 4)
    assert manager.match(make_request("e", [1, 2, 3, 4]), 4).num_tokens == 4
    assert manager.match(make_request("f", [5, 6, 7, 8]), 4) == NOTHING


def test_a_duplicate_block_is_adopted_and_its_twin_released(make_request):
    manager = make_manager()
    first, second = make_request("a", [1, 2, 3]), make_request("b", [1, 2, 4])
    manager.admit(first, NOTHING, 3)
    manager.admit(second, NOTHING, 3)
    computed(manager, first, 3)
    own = second.block_ids[0]
    computed(manager, second, 3)
    assert second.block_ids[0] == first.block_ids[0] != own
    assert manager.ref_counts[own] == 0 and manager.ref_counts[first.block_ids[0]] == 2
    manager.check_integrity([first, second])


def test_a_shared_partial_block_is_copied_before_it_is_written(make_request):
    manager = make_manager(block_size=4)
    source = make_request("a", [1, 2, 3])
    manager.admit(source, NOTHING, 3)
    source.num_computed_tokens = 3
    fork = make_request("b", [1, 2, 3])
    assert manager.admit(fork, manager.fork(source, 2), 3)
    assert fork.block_ids != source.block_ids and fork.num_computed_tokens == 2
    assert manager.take_copies() == ((source.block_ids[0], fork.block_ids[0]),)
    assert manager.take_copies() == ()
    manager.check_integrity([source, fork])


def test_full_shared_blocks_are_shared_and_not_copied(make_request):
    manager = make_manager(block_size=2)
    source = make_request("a", [1, 2, 3])
    manager.admit(source, NOTHING, 3)
    source.num_computed_tokens = 3
    fork = make_request("b", [1, 2, 3])
    assert manager.admit(fork, manager.fork(source, 2), 3)
    assert fork.block_ids[0] == source.block_ids[0] and manager.take_copies() == ()
    assert fork.block_ids[1] != source.block_ids[1]


def test_the_last_holder_of_a_block_writes_in_place(make_request):
    manager = make_manager(block_size=4)
    source = make_request("a", [1, 2, 3])
    manager.admit(source, NOTHING, 3)
    source.num_computed_tokens = 3
    fork = make_request("b", [1, 2, 3])
    manager.admit(fork, manager.fork(source, 2), 3)
    manager.take_copies()
    block = source.block_ids[0]
    assert manager.allocate(source, 4) and source.block_ids == [block]
    assert manager.take_copies() == ()


def test_waste_counts_slots_without_tokens(make_request):
    manager = make_manager(block_size=4)
    request = make_request("a", [1, 2, 3, 4, 5])
    manager.admit(request, NOTHING, 5)
    request.num_computed_tokens = 5
    assert manager.waste([request]) == 3 / 8
    assert manager.waste([]) == 0.0


def test_the_audit_notices_each_kind_of_damage(make_request):
    def damaged(damage) -> bool:
        manager = make_manager()
        request = make_request("a", [1, 2, 3, 4])
        manager.admit(request, NOTHING, 4)
        computed(manager, request, 4)
        manager.check_integrity([request])
        damage(manager, request)
        try:
            manager.check_integrity([request])
        except EngineError:
            return True
        return False

    def free_a_held_block(manager, request):
        manager.free_blocks[request.block_ids[0]] = None

    def lose_a_block(manager, request):
        manager.free_blocks.popitem()

    def forget_a_reference(manager, request):
        manager.ref_counts[request.block_ids[0]] = 2

    def point_elsewhere(manager, request):
        request.block_ids[0] = next(iter(manager.free_blocks))

    def miscount(manager, request):
        manager.num_cached_blocks += 1

    for damage in (free_a_held_block, lose_a_block, forget_a_reference, point_elsewhere, miscount):
        assert damaged(damage), damage.__name__


# -- groups of layers with tables of their own -----------------------------------------------------

WINDOWS = (None, 3)


def make_grouped(num_blocks: int = 16, windows=WINDOWS) -> BlockManager:
    return BlockManager(num_blocks, 2, RadixPrefixCache(2, windows), windows)


def grown(manager: BlockManager, request, num_tokens: int) -> None:
    assert manager.allocate(request, num_tokens)
    computed(manager, request, num_tokens)
    manager.check_integrity([request])


def test_blocks_that_left_their_window_are_given_back(make_request):
    manager = make_grouped()
    request = make_request("a", [*range(10)])
    manager.admit(request, manager.nothing_shared, 10)
    assert manager.num_used_blocks == 10
    computed(manager, request, 10)  # the next query is at 10, and sees 8 and 9
    (of_window,) = request.further_tables
    assert of_window[:4] == [GONE] * 4 and of_window[4] != GONE
    assert GONE not in request.block_ids
    assert (manager.num_used_blocks, manager.num_cached_blocks) == (6, 4)
    manager.check_integrity([request])


def test_a_window_gets_blocks_for_one_step_at_a_time(make_request):
    manager = make_grouped()
    request = make_request("a", [*range(12)])
    manager.admit(request, manager.nothing_shared, 12, step_tokens=4)
    assert [len(table) for table in request.block_tables] == [6, 2]
    computed(manager, request, 4)
    grown(manager, request, 8)
    assert [len(table) for table in request.block_tables] == [6, 4]
    assert manager.num_used_blocks == 6 + 1


def test_a_window_alone_holds_any_number_of_tokens_in_few_blocks(make_request):
    manager = make_grouped(num_blocks=4, windows=(4,))
    request = make_request("a", [0])
    manager.admit(request, manager.nothing_shared, 1)
    for num_tokens in range(2, 500):
        request.token_ids.append(num_tokens)
        grown(manager, request, num_tokens)
        assert manager.num_used_blocks <= 4


def test_a_hit_needs_no_more_of_a_window_than_is_seen(make_request):
    manager = make_grouped()
    first = make_request("a", [*range(9)])
    manager.admit(first, manager.nothing_shared, 9)
    computed(manager, first, 9)
    last = first.further_tables[0][3]
    manager.free(first)
    shared = manager.match(make_request("b", [*range(9)]), 8)
    assert shared.num_tokens == 8
    assert shared.tables[1] == [GONE, GONE, GONE, last]
    again = make_request("b", [*range(9)])
    assert manager.admit(again, shared, 9)
    assert again.num_published_blocks == 4
    computed(manager, again, 9)
    manager.check_integrity([again])


def test_a_hit_ends_where_a_window_has_lost_what_it_sees(make_request):
    manager = make_grouped()
    request = make_request("a", [*range(8)])
    manager.admit(request, manager.nothing_shared, 8)
    of_window = request.further_tables[0].copy()
    computed(manager, request, 8)
    manager.free(request)
    manager.prefix_cache.forget(of_window[3])
    manager.num_cached_blocks -= 1  # as if it had been taken
    # 8 tokens need the window's block of 6 and 7; 6 tokens that of 4 and 5, which is there.
    assert manager.match(make_request("b", [*range(9)]), 8).num_tokens == 6


def test_a_fork_shares_what_its_source_still_has_and_copies_in_every_group(make_request):
    manager = make_grouped()
    source = make_request("a", [1, 2, 3])
    manager.admit(source, manager.nothing_shared, 3)
    computed(manager, source, 3)
    fork = make_request("b", [1, 2, 3], fork_of=source)
    assert manager.admit(fork, manager.fork(source, 3), 4)
    assert len(manager.take_copies()) == 2
    assert fork.block_ids[1] != source.block_ids[1]
    assert fork.further_tables[0][1] != source.further_tables[0][1]
    manager.check_integrity([source, fork])


def test_a_source_that_left_blocks_behind_has_nothing_to_share(make_request):
    manager = make_grouped()
    source = make_request("a", [*range(4)])
    manager.admit(source, manager.nothing_shared, 4)
    computed(manager, source, 4)
    source.token_ids += range(4, 12)
    grown(manager, source, 12)
    assert manager.fork(source, 4) == manager.nothing_shared
