"""Requests with adapters in the scheduler: who waits, who is passed over, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.adapters import Adapters, AdapterState, salt_of
from octavo.core.batch import StepOutput
from octavo.core.block_manager import BlockManager
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True)
class Named:
    digest: str


@dataclass
class FewAdapters(Adapters):
    """Adapters with room for ``most`` beside each other; those in ``absent`` are being loaded."""

    most: int = 1
    absent: set[str] = field(default_factory=set)

    def ask(self, adapter, running):
        others = {each.adapter.digest for each in running if each.adapter} - {adapter.digest}
        if len(others) >= self.most:
            return AdapterState.FULL
        return AdapterState.LOADING if adapter.digest in self.absent else AdapterState.READY


def scheduler_with(adapters, **limits) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_model_len=64, **limits), BlockManager(64, 4), adapters=adapters
    )


def add(scheduler, name, adapter=None, max_tokens=3):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = Request(name, [1, 2, 3], params, 0.0)
    request.adapter = None if adapter is None else Named(adapter)
    scheduler.add(request)


def step(scheduler) -> list[str]:
    batch = scheduler.schedule()
    names = [item.request.request_id for item in batch.items]
    scheduler.update(batch, StepOutput({name: [7] for name in names}))
    return names


def test_one_that_is_loaded_is_passed_over_by_others():
    adapters = FewAdapters(most=2, absent={"a"})
    scheduler = scheduler_with(adapters)
    add(scheduler, "first", "a")
    add(scheduler, "plain")
    add(scheduler, "other", "b")
    assert step(scheduler) == ["plain", "other"]
    adapters.absent.clear()
    assert step(scheduler) == ["plain", "other", "first"]


def test_requests_of_one_adapter_run_together_and_others_wait():
    scheduler = scheduler_with(FewAdapters(most=1))
    for name, adapter in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("plain", None)):
        add(scheduler, name, adapter)
    assert step(scheduler) == ["a1", "a2", "plain"]


def test_none_is_passed_over_for_ever():
    """New requests for an adapter that runs do not keep another one out."""
    scheduler = scheduler_with(FewAdapters(most=1))
    add(scheduler, "a0", "a")
    assert step(scheduler) == ["a0"]
    add(scheduler, "b", "b")
    for number in range(1, 6):
        add(scheduler, f"a{number}", "a")
        if "b" in step(scheduler):
            break
    assert number <= 3  # once a0 had its three tokens


def test_salts_of_adapters_are_no_salts_of_clients():
    salts = [salt_of("", None), salt_of("", "ab"), salt_of("x", "ab"), salt_of("", "cd")]
    forged = [salt_of(salt, None) for salt in salts[1:]]
    assert len({*salts, *forged}) == 7
    assert salt_of("tenant", None) == "tenant"
