"""The ranks of a tensor-parallel engine, seen from rank 0, which is the engine's own process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError, PeerEndedError
from octavo.kernels.cpu.group import ShmGroup
from octavo.kernels.cpu.library import usable_threads
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.followers import Followers
from octavo.serving.one_rank import OneRank

if TYPE_CHECKING:
    from octavo.runtime.rank import Rank

_FOLLOWER = "octavo.serving.follower"

# What followers are told in another way, or have themselves.
_NOT_SENT = ("path", "packed_folder", "pool", "group")


class RankGroup(OneRank):
    """Rank 0 and its followers, which rank 0 closes with the engine; threads are of each rank."""

    def __init__(self, size: int, spec: RankSpec, model_impl: str):
        threads = spec.threads or max(1, usable_threads() // size)
        group = ShmGroup.create(size, is_crowded=size * threads > usable_threads())
        super().__init__(dataclasses.replace(spec, threads=threads, group=group))
        sent = {
            field.name: getattr(self.spec, field.name)
            for field in dataclasses.fields(RankSpec)
            if field.name not in _NOT_SENT
        }
        path = str(Path(spec.path).resolve())
        settings = {"path": path, "model_impl": model_impl, "spec": sent}
        self._followers = Followers(_FOLLOWER, group, settings)

    def load(self) -> None:
        self._followers.send({"load": True})

    def start(self, rank: Rank, limits: RankLimits) -> None:
        self._receive()  # all have loaded
        depths = sorted(rank.kept_depths)
        self._followers.send({"limits": dataclasses.asdict(limits), "depths": depths})

    def wait_until_started(self, rank: Rank) -> None:
        """Return when all ranks can take steps, and give the followers to rank 0.

        Raises:
            ConfigError: a follower could not load or start; with its last words.
        """
        self._receive()
        rank.followers = self._followers

    def _receive(self) -> None:
        try:
            self._followers.receive()
        except PeerEndedError as error:
            raise ConfigError(f"tensor_parallel_size: {error}") from error

    def close(self) -> None:
        self._followers.close()
