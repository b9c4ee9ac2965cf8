"""The launchers of the replicas of a server, which share one machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.base.errors import ConfigError
from octavo.server.engine.process import ProcessLauncher
from octavo.settings.engine import EngineArgs, is_gpu, parse_folder
from octavo.system import machine, numa

if TYPE_CHECKING:
    from octavo.offload.open_peers import TransferFiles


class ReplicaLaunchers:
    """Makes the launcher of each replica: the same engine, on a device and with files of its own.

    Cores and memory are shared by the most of ``data_parallel_size``, which each engine is told.

    Raises:
        ConfigError: so many replicas cannot run here; names the nearest number that can.
    """

    def __init__(self, args: EngineArgs, log_format: str = "text"):
        self._args = args
        self._log_format = log_format
        self._num_gpus = num_gpus(args.device)
        ranks = args.tensor_parallel_size
        self._gpus_each = ranks if isinstance(ranks, int) else 1  # auto is one on a GPU
        self._ahead: dict[int, ProcessLauncher] = {}
        self._slots = Slots()
        size = args.replicas.most
        self._places = () if self._num_gpus is not None else _places(size, args.threads)
        if self._num_gpus is not None:
            self._check_gpus(self._num_gpus)
        # Of each prefill replica, the memory from which others read its KV, as long as the server.
        self._regions = _create_regions(args.prefill_replicas, args.kv_buffer_bytes)
        self._transfers: dict[int, TransferFiles] = {}  # by replica

    def _check_gpus(self, num_gpus: int) -> None:
        args, size = self._args, self._args.replicas.most
        if args.device not in ("auto", "cuda"):
            raise ConfigError(
                f"device {args.device} is one GPU, and each of {size} replicas needs one of its "
                "own: give cuda, or leave data_parallel_size at 1"
            )
        most = num_gpus // self._gpus_each
        if size > most:
            needs = "a GPU" if self._gpus_each == 1 else f"{self._gpus_each} GPUs"
            raise ConfigError(
                f"data_parallel_size {size}: each replica needs {needs} of its own, and there are "
                f"{num_gpus} here: set it to {max(1, most)}, or device to cpu"
            )

    def launch_ahead(self) -> None:
        """Start all engines: they load while the server is being imported."""
        for number in range(self._args.replicas.least):
            launcher = self._ahead[number] = self._create(number)
            launcher.launch_ahead()

    def create(self, number: int) -> ProcessLauncher:
        """Return the launcher of the replica of this number.

        What is its own, a GPU or a folder, goes to another one when the launcher is closed.

        Raises:
            ConfigError: there is no GPU for it.
        """
        return self._ahead.pop(number, None) or self._create(number)

    def close(self) -> None:
        """End the engines that were started ahead and are not needed, and give back the memory for
        KV on its way."""
        for launcher in self._ahead.values():
            launcher.close()
        for files in self._transfers.values():
            files.close()
        self._transfers.clear()
        for descriptor in self._regions:
            os.close(descriptor)
        self._regions = []

    def describe(self) -> str:
        """Return how the replicas share this machine, for the log."""
        args, size = self._args, self._args.replicas.most
        roles = roles_in_words(args)
        if self._num_gpus is not None:
            each = "a GPU" if self._gpus_each == 1 else f"{self._gpus_each} GPUs"
            return f"{size} replicas, each on {each} of its own{roles}"
        cores = machine.cpu().usable_cores
        threads = args.threads or max(1, cores // size)
        excess = ", more threads than there are cores" if threads * size > cores else ""
        memory = "" if args.kv_cache_memory or args.num_blocks else " of the free memory for KV"
        share = f" and 1/{size}{memory}" if memory else ""
        shared = f"each has {threads} threads{share}{excess}"
        return f"{size} replicas share {cores} cores: {shared}{roles}"

    def _create(self, number: int) -> ProcessLauncher:
        slot = self._slots.take()
        changes: dict[str, Any] = {}
        if self._num_gpus is not None:
            first = slot * self._gpus_each
            if first + self._gpus_each > self._num_gpus:
                self._slots.give_back(slot)
                raise ConfigError(f"there is no GPU for one more replica: all {first} are in use")
            changes["device"] = f"cuda:{first}"
        changes |= offload_of_replica(self._args, slot)
        cpus: Sequence[int] = ()
        if self._places:
            place = self._places[slot % len(self._places)]
            changes["threads"], cpus = place.num_threads, place.cpus
        args = dataclasses.replace(self._args, **changes, given=self._args.given_settings())
        return ProcessLauncher(
            args,
            self._log_format,
            cpus,
            self._transfer_of(number),
            when_closed=partial(self._slots.give_back, slot),
        )

    def _transfer_of(self, number: int) -> TransferFiles | None:
        """Return the files of a replica: a prefill replica writes what the others read."""
        if not self._regions:
            return None
        from octavo.offload.open_peers import TransferFiles
        from octavo.offload.shared_blocks import read_only

        if number not in self._transfers:
            if number < len(self._regions):
                files = TransferFiles(os.dup(self._regions[number]))
            else:
                files = TransferFiles(peers=dict(enumerate(map(read_only, self._regions))))
            self._transfers[number] = files
        return self._transfers[number]


def _create_regions(count: int, num_bytes: int) -> list[int]:
    """Return the descriptors of so many regions of ``offload/shared_blocks.py``.

    Raises:
        ConfigError: this system cannot share memory so.
    """
    if not count:
        return []
    if sys.platform != "linux":
        raise ConfigError(
            "prefill_replicas: only Linux lets processes share memory as KV on its way needs it: "
            "leave it at 0"
        )
    from octavo.offload.shared_blocks import create_region

    return [create_region(num_bytes) for _ in range(count)]


class Slots:
    """Numbers from 0 on, each of one replica at a time: of its GPU, its cores and its files.

    The numbers of replicas themselves are never used again.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self) -> int:
        """Return the lowest number that is free."""
        slot = next(number for number in itertools.count() if number not in self._taken)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        self._taken.discard(slot)


def roles_in_words(args: EngineArgs) -> str:
    """Return how many replicas compute prompts for the others, as the end of a sentence."""
    return f"; {args.prefill_replicas} of them compute prompts" if args.prefill_replicas else ""


def offload_of_replica(args: EngineArgs, slot: int) -> dict[str, str]:
    """Return the setting of a replica's own part of the folder for evicted KV, if there is one."""
    if args.kv_offload is None:
        return {}
    folder, num_bytes = parse_folder(args.kv_offload)
    return {"kv_offload": f"{folder / f'replica-{slot}'}:{num_bytes // args.replicas.most}"}


def _places(size: int, threads: int | None) -> Sequence[numa.RankPlace]:
    """Return the place of each replica on a machine of several NUMA nodes, so that each has cores
    that are near to each other; none for a machine of one node, or of too few cores.

    ``threads``: of each replica; None is its share of all.
    """
    nodes = numa.nodes()
    if numa.auto_ranks(nodes) == 1:
        return ()
    try:
        return numa.places(size, nodes, None if threads is None else size * threads)
    except ConfigError:
        return ()


def num_gpus(device: str) -> int | None:
    """Return the number of GPUs; None where the replicas run on the CPU."""
    if is_gpu(device):
        return machine.num_gpus()
    has_torch = importlib.util.find_spec("torch") is not None
    if device == "auto" and machine.has_gpu_driver() and has_torch:
        return machine.num_gpus()
    return None
