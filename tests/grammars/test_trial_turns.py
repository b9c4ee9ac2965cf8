"""Which constraint is tried when, and until when; no clock and no process has a part in it."""

from __future__ import annotations

from octavo.grammars.trial_turns import (
    LONG_CPU_SECONDS,
    PATIENCE,
    SECONDS,
    SHORT_CPU_SECONDS,
    Trial,
    TrialTurns,
)


def trial(number, tenant="", came_at=0.0):
    return Trial(number, {}, tenant, came_at)


def begin_all(turns):
    """The numbers of those that may run at once."""
    begun = []
    while (each := turns.next()) is not None:
        begun.append(each)
    return begun


def test_two_run_at_once_in_the_order_of_coming():
    turns = TrialTurns()
    for number in range(3):
        turns.add(trial(number))
    first, second = begin_all(turns)
    assert (first.number, second.number) == (0, 1)
    turns.end(second)
    assert [each.number for each in begin_all(turns)] == [2]


def test_tenants_take_turns():
    turns = TrialTurns()
    for number in range(6):
        turns.add(trial(number, "many"))
    turns.add(trial(6, "one"))
    order = []
    while begun := begin_all(turns):
        order += [each.number for each in begun]
        for each in begun:
            turns.end(each)
    assert order == [0, 6, 1, 2, 3, 4, 5]


def take_long(turns, count):
    """Have so many trials begin that are not over in a short time."""
    for _ in range(count):
        each = turns.next()
        assert each.cpu_seconds == SHORT_CPU_SECONDS
        turns.end(each)
        assert turns.is_to_go_on(each)


def test_one_that_takes_long_waits_behind_the_others_and_has_more_time_then():
    turns = TrialTurns()
    hostile = [trial(number) for number in range(4)]
    for each in hostile:
        turns.add(each)
    take_long(turns, 4)
    turns.add(good := trial(4))
    assert begin_all(turns) == [good, hostile[0]]
    assert hostile[0].cpu_seconds == LONG_CPU_SECONDS
    turns.end(good)
    assert begin_all(turns) == []  # a place is left for those to come
    turns.add(another := trial(5))
    assert begin_all(turns) == [another]
    turns.end(another)
    turns.end(hostile[0])
    assert not turns.is_to_go_on(hostile[0])
    assert begin_all(turns) == [hostile[1]]


def test_those_that_wait_in_vain_are_told_so():
    turns = TrialTurns()
    for number in range(4):
        turns.add(trial(number))
    take_long(turns, 2)
    for number in range(4, 7):
        turns.add(trial(number))
    assert len(begin_all(turns)) == 2
    assert turns.overdue(SECONDS) == []
    assert [each.number for each in turns.overdue(SECONDS + 0.1)] == [0, 1]
    assert [each.number for each in turns.overdue(PATIENCE + 0.1)] == [4, 5, 6]
    assert begin_all(turns) == []


def test_when_one_that_runs_is_to_end():
    turns, long, short = TrialTurns(), trial(0), trial(1)
    turns.add(long)
    take_long(turns, 1)
    turns.add(short)
    assert begin_all(turns) == [short, long]
    later = SECONDS + 0.1
    assert not turns.is_over(long, 0.3, SECONDS / 2)
    assert turns.is_over(long, 0.3, later)  # it had its time
    assert not turns.is_over(long, 0.1, later)  # others have the processors
    assert turns.is_over(long, 0.1, PATIENCE)
    assert not turns.is_over(short, 0.05, later)
    assert turns.is_over(short, 0.05, PATIENCE)
