"""Engines of the hash model, one after the other on one folder, which is damaged meanwhile."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hash_model import HashExecutor, expected_tokens

from octavo.core.block_manager import BlockManager
from octavo.core.engine import Engine
from octavo.core.host_kv_cache import HostKVCache
from octavo.core.kv_tables import ONE_TABLE
from octavo.core.prefix_cache import RadixPrefixCache
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler, SchedulerConfig
from octavo.offload.block_folder import BlockFolder
from octavo.offload.disk_storage import DiskStorage
from octavo.offload.open_store import open_store
from octavo.settings.kv_offload import OffloadConfig

BLOCK, PLACES, POOL = 4, 12, 14
VOCAB = 97


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Every fault would be written down."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class FullFolder(BlockFolder):
    """A folder on a disk that is full now and then."""

    def __init__(self, path: Path, max_bytes: int, rng: random.Random):
        super().__init__(path, max_bytes)
        self._rng = rng

    def write(self, name: str, content: memoryview, before: str | None = None) -> None:
        if self._rng.random() < 0.02:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(name, content, before)


def create_engine(path: Path, rng: random.Random, *, depth: int = 1) -> Engine:
    executor = HashExecutor(POOL, BLOCK, depth=depth, num_host_blocks=PLACES, audit_every=4)
    rows = [memoryview(row) for row in executor.host_blocks]
    storage = DiskStorage(
        FullFolder(path, 60 * 4096, random.Random(rng.random())), rows, b"hash model"
    )
    host_cache = HostKVCache(POOL, PLACES, BLOCK, len(rows[0]), storage)
    blocks = BlockManager(POOL, BLOCK, RadixPrefixCache(BLOCK), store=host_cache)
    config = SchedulerConfig(max_num_batched_tokens=24, max_model_len=48, runs_ahead=depth > 1)
    return Engine(Scheduler(config, blocks), executor)


def damage(path: Path, rng: random.Random) -> None:
    """Flip bits in some blocks, cut others off, and remove some."""
    for file in sorted(path.glob("??/*")):
        data, kind = bytearray(file.read_bytes()), rng.choice(["none", "flip", "cut", "gone"])
        if not data:
            continue  # cut off before, and not read since
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[rng.randrange(len(data)) :]
        if kind == "gone":
            file.unlink()
        else:
            file.write_bytes(data)


def serve(engine: Engine, prompts: list[list[int]], rng: random.Random, count: int) -> None:
    """Answer some prompts, and check each answer."""
    storage = engine.scheduler.block_manager.store._storage
    for index in range(count):
        prompt = rng.choice(prompts) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        params = SamplingParams(max_tokens=rng.randint(1, 8), ignore_eos=True)
        engine.add(Request(f"r{index}", prompt, params, 0.0))
        storage._work._paused_until = 0.0  # a full disk is tried again at once
        while engine.has_unfinished_requests and (rng.random() < 0.8 or index == count - 1):
            step = engine.step()
            ended = [u.request for u in step.updates if u.request.is_finished] if step else []
            for request in ended:
                assert request.output_token_ids == expected_tokens(
                    request.prompt_token_ids, request.params.max_tokens, VOCAB
                )
        while not engine.has_unfinished_requests and rng.random() < 0.9 and engine.save():
            pass
    engine.check_integrity()


def test_damage_is_computed_again(tmp_path):
    from_disk = num_errors = 0
    for seed in range(6):
        rng, path = random.Random(seed), tmp_path / str(seed)
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(8, 30))] for _ in range(5)]
        for generation in range(4):
            engine = create_engine(path, rng, depth=1 + generation % 2)
            serve(engine, prompts, rng, 12)
            stats = engine.stats()
            from_disk += stats.prefix_tokens_from_disk or 0
            num_errors += stats.kv_store_errors or 0
            engine.close()
            damage(path, rng)
    assert from_disk > 60 and num_errors > 5


def test_a_second_engine_does_not_get_the_folder(tmp_path):
    rows = [memoryview(bytearray(8)) for _ in range(3)]

    def open_one(**fields):
        config = OffloadConfig(3, 8, tmp_path / "kv", 1 << 20, **fields)
        return open_store(config, rows, 10, 4, ONE_TABLE, lambda: b"model", lambda: None)

    first = open_one()
    assert first is not None and first.saves_ahead
    assert open_one() is None
    memory = open_one(keeps_memory=True)
    assert memory is not None and not memory.saves_ahead
    first.close()
    later = open_one()
    assert later is not None
    later.close()
