"""The ranks of an engine whose stages are on several machines, seen from the last one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError, PeerEndedError
from octavo.links.listener import LOOPBACK
from octavo.links.ticket import parse_address
from octavo.runtime.backends import why_not_native
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.home_connection import STEP_BYTES
from octavo.runtime.hosts import CommandHost, Host
from octavo.runtime.layout import RankBounds, check_ranks, why_one_rank
from octavo.runtime.machine_links import most_message_bytes
from octavo.runtime.remote_followers import RemoteFollowers
from octavo.serving.one_rank import OneRank
from octavo.serving.rank_group import sent_settings
from octavo.serving.remote_follower import model_facts

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.runtime.rank import Rank

_FOLLOWER = "octavo.serving.remote_follower"


def open_remote_stages(
    commands: Sequence[str],
    address: str | None,
    spec: RankSpec,
    model: ModelConfig,
    model_impl: str,
) -> RemoteStages:
    """Start a stage on each of the machines that commands reach; this process has the last one.

    Args:
        commands: of the stages in their order, see ``CommandHost``.
        address: of this machine, that the others connect to; None is loopback.

    Raises:
        ConfigError: so many stages cannot be, or one does not come up.
    """
    kernels = spec.kernels
    if kernels == "auto":
        kernels = "native" if why_not_native(spec, model) is None else "reference"
    bounds = RankBounds(
        model=model.name,
        num_layers=model.num_layers,
        why_alone=why_one_rank(kernels, spec.device, pp=2),
    )
    check_ranks(1, bounds, len(commands) + 1)
    hosts = [CommandHost(command) for command in reversed(commands)]
    return RemoteStages(hosts, address, spec, model, model_impl)


class RemoteStages(OneRank):
    """Rank 0, which has the last stage, and a rank on each of some hosts, for the others.

    Args:
        hosts: of the stage before the last one first.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        address: str | None,
        spec: RankSpec,
        model: ModelConfig,
        model_impl: str,
    ):
        settings = {
            **sent_settings(spec, model_impl),
            "threads": spec.threads,
            "facts": dict(model_facts(Path(spec.path))),
        }
        self._num_layers, self._block_size = model.num_layers, spec.block_size
        self._followers = RemoteFollowers(
            _FOLLOWER,
            hosts,
            settings,
            address=LOOPBACK if address is None else parse_address(address),
        )
        super().__init__(dataclasses.replace(spec, pipeline=self._followers.place))

    def load(self, rank: Rank) -> None:
        """Have the others load. ConfigError if rank 0 runs on kernels that cannot be shared."""
        if reason := why_one_rank(rank.kernels, self.spec.device, pp=2):
            raise ConfigError(f"pipeline_parallel_size: {reason}")
        self._followers.send({"load": True})

    def start(self, rank: Rank, limits: RankLimits) -> None:
        """Have the others allocate memory. ConfigError if one of them has too little of it."""
        for number, loaded in enumerate(self._receive(), 1):
            self._check_memory(number, int(loaded["free_bytes"]), rank, limits)
        self._followers.send(
            {
                "limits": dataclasses.asdict(limits),
                "depths": sorted(rank.kept_depths),
                STEP_BYTES: most_message_bytes(limits, self._block_size),
            }
        )

    def wait_until_started(self, rank: Rank) -> None:
        self._receive()
        rank.followers = self._followers

    def whole_rows(self, rank: Rank) -> Sequence[memoryview]:
        raise ConfigError(
            "kv_offload: stages on other machines have their KV there, and a folder here would be "
            "without it; leave kv_offload out, or give a size of host memory alone (swap_space)"
        )

    def when_one_ends(self, callback: Callable[[PeerEndedError], object]) -> None:
        self._followers.when_one_ends(callback)

    def close(self) -> None:
        self._followers.close()

    def _receive(self) -> list[dict[str, int]]:
        try:
            return self._followers.receive()
        except PeerEndedError as error:
            raise ConfigError(f"pipeline_parallel_size: {error}") from error

    def _check_memory(self, number: int, free: int, rank: Rank, limits: RankLimits) -> None:
        """Raise ConfigError if the KV of a rank's layers is more than its machine has free."""
        stages = self.spec.stage.count
        stage = dataclasses.replace(self.spec.stage, index=stages - 1 - number)
        share = len(stage.layers(self._num_layers)) / self._num_layers
        slots = limits.num_blocks * self._block_size
        needed = slots * rank.capacity.kv_bytes_per_token * share
        if needed > free:
            raise ConfigError(
                f"pipeline_parallel_size: rank {number} has {free / 2**30:.2f} GiB of free memory, "
                f"and KV of its layers takes {needed / 2**30:.2f}: lower num_blocks, or "
                "kv_cache_memory"
            )
