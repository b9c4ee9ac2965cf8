"""The ranks of an engine whose stages are on several machines, seen from the last one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from octavo.base.errors import ConfigError, PeerEndedError
from octavo.kernels.parts import Stage
from octavo.links.listener import LOOPBACK
from octavo.links.ticket import parse_address
from octavo.runtime.capacity import Capacity, RankLimits, RankSpec, machine_share
from octavo.runtime.home_connection import STEP_BYTES
from octavo.runtime.hosts import CommandHost, Host
from octavo.runtime.layout import RankBounds, resolve_ranks, why_one_rank
from octavo.runtime.machine_links import most_message_bytes
from octavo.runtime.rank_memory import Membership
from octavo.runtime.rank_process import Message
from octavo.runtime.remote_followers import RemoteFollowers
from octavo.serving.expert_files import PlaceExperts, num_experts_of
from octavo.serving.one_rank import OneRank
from octavo.serving.rank_group import kernels_of, sent_settings, with_experts
from octavo.serving.remote_follower import machine_facts, model_facts, places_of_stage
from octavo.serving.stage_ranks import StageRanks
from octavo.system import numa

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.runtime.backends import NativeBackend
    from octavo.runtime.rank import Rank

_FOLLOWER = "octavo.serving.remote_follower"


def open_remote_stages(
    asked: int | str,
    commands: Sequence[str],
    address: str | None,
    spec: RankSpec,
    model: ModelConfig,
    model_impl: str,
    place_experts: PlaceExperts | None = None,
) -> RemoteStages:
    """Start a stage on each of the machines that commands reach; this one has the last stage.

    Args:
        asked: ranks of each stage, as of ``tensor_parallel_size``.
        commands: of the stages in their order, see ``CommandHost``.
        address: of this machine, that the others connect to; None is loopback.
        place_experts: as of ``open_ranks``.

    Raises:
        ConfigError: so many stages, or ranks, cannot be, or one does not come up.
    """
    kernels, num_stages = kernels_of(spec, model), len(commands) + 1
    bounds = RankBounds(
        model=model.name,
        num_heads=model.fewest_heads,
        num_experts=None if place_experts is None else num_experts_of(model),
        num_layers=model.num_layers,
        why_alone=why_one_rank(kernels, spec.device, pp=num_stages),
    )
    # Each stage has the nodes, and the cores, of a machine to itself.
    num_nodes = numa.auto_ranks(numa.nodes()) * num_stages
    size = resolve_ranks(asked, bounds, num_nodes, num_stages)
    places = places_of_stage(size, spec.threads)
    hosts = [CommandHost(command) for command in reversed(commands)]
    spec = with_experts(spec, place_experts, size, kernels)
    return RemoteStages(hosts, address, places, spec, model, model_impl)


class RemoteStages(OneRank):
    """Rank 0, the other ranks of the last stage here, and a stage on each of some hosts.

    Args:
        hosts: of the stage before the last one first.
        places: of the ranks of the last stage. Rank 0 is pinned to its own.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        address: str | None,
        places: Sequence[numa.RankPlace],
        spec: RankSpec,
        model: ModelConfig,
        model_impl: str,
    ):
        settings = {
            **sent_settings(spec, model_impl),
            "tp": len(places),
            "threads": spec.threads,
            "facts": dict(model_facts(Path(spec.path))),
        }
        self._model, self._block_size = model, spec.block_size
        self._places = places
        self._machines: list[Message] = []  # from the last stage to the first
        self._followers = RemoteFollowers(
            _FOLLOWER,
            hosts,
            settings,
            tp=len(places),
            address=LOOPBACK if address is None else parse_address(address),
        )
        try:
            place = self._followers.place
            first = Membership(0, len(places) * place.stage.count, place.messages, None, place)
            self._stage = StageRanks(first, places, settings)
        except BaseException:
            self._followers.close()
            raise
        # Ends of ranks, in their order; None for one on another machine, of which `receive` tells.
        self._ends = ends = list[PeerEndedError | None]()
        messages, abort = place.messages, self._stage.abort

        def ended_here(error: PeerEndedError) -> None:
            ends.append(error)
            messages.abort()

        def ended_there(_: PeerEndedError) -> None:
            ends.append(None)
            abort()

        self._stage.when_one_ends(ended_here)
        self._followers.when_one_ends(ended_there)
        own, membership = places[0], self._stage.membership
        own.pin()
        super().__init__(
            dataclasses.replace(
                spec,
                threads=own.num_threads,
                numa_nodes=own.nodes,
                group=membership.group,
                pipeline=membership.pipeline,
            )
        )

    def load(self, rank: Rank) -> None:
        """Have the others load. ConfigError if rank 0 runs on kernels that cannot be shared."""
        if reason := why_one_rank(rank.kernels, self.spec.device, pp=2):
            raise ConfigError(f"pipeline_parallel_size: {reason}")
        self._send({"load": True})

    def capacity(self, rank: Rank, draft_bytes: int) -> Capacity:
        """Return the capacity of all machines: of each the share of its stage, once all have
        loaded."""
        machines = self._receive()
        here = {**machine_facts(self._places), "free_bytes": rank.free_bytes}
        capacity = super().capacity(rank, draft_bytes)
        backend, count = cast("NativeBackend", rank.backend), self.spec.stage.count
        self._machines, shares = [here, *machines], []
        names = [f"rank 0 of {self.spec.num_ranks}, here,", *self._followers.names]
        for number, (name, machine) in enumerate(zip(names, self._machines, strict=True)):
            layers = backend.layers_of(Stage(count - 1 - number, count))
            free_bytes = int(machine["free_bytes"])
            shares.append(machine_share(name, self.spec, self._model, layers, free_bytes))
        drafted = shares[0].kv_bytes_per_token + draft_bytes
        shares[0] = dataclasses.replace(shares[0], kv_bytes_per_token=drafted)
        return dataclasses.replace(capacity, machines=tuple(shares))

    @property
    def info(self) -> dict[str, Any]:
        """The machines of the stages, in their order: what stays as it is from start to start."""
        count, layers = self.spec.stage.count, self._model.num_layers
        stages = []
        for index, machine in enumerate(reversed(self._machines)):
            own = Stage(index, count).layers(layers)
            facts = {name: fact for name, fact in machine.items() if name != "free_bytes"}
            stages.append({"stage": index, "layers": [own.start, own.stop], **facts})
        return {"stages": stages}

    def start(self, rank: Rank, limits: RankLimits) -> None:
        self._send(
            {
                "limits": dataclasses.asdict(limits),
                "depths": sorted(rank.kept_depths),
                STEP_BYTES: most_message_bytes(limits, self._block_size),
            }
        )

    def wait_until_started(self, rank: Rank) -> None:
        self._receive()
        rank.followers = self

    def whole_rows(self, rank: Rank) -> Sequence[memoryview]:
        raise ConfigError(
            "kv_offload: stages on other machines have their KV there, and a folder here would be "
            "without it; leave kv_offload out, or give a size of host memory alone (swap_space)"
        )

    def when_one_ends(self, callback: Callable[[PeerEndedError], object]) -> None:
        self._followers.when_one_ends(callback)
        self._stage.when_one_ends(callback)

    def close(self) -> None:
        self._followers.close()
        self._stage.close()

    def _send(self, message: Message) -> None:
        self._followers.send(message)
        self._stage.send(message)

    def _receive(self) -> list[Message]:
        """Wait for all other ranks, and return the messages of other machines."""
        try:
            self._stage.receive()
            return self._followers.receive()
        except PeerEndedError as error:
            first = self._ends[0] if self._ends else None
            raise ConfigError(f"pipeline_parallel_size: {first or error}") from error
