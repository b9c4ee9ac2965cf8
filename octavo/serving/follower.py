"""Loading and work of a follower, a rank other than 0 of an engine.

``octavo.runtime.rank_process`` runs `serve` in a process of its own; ``rank_group.py`` is the other
end of the connection.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.base.gc_pause import no_collections
from octavo.kernels.expert_places import ExpertPlaces
from octavo.models.kv_groups import KVGroups
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.following_forward import Follower, FollowingForward, follow
from octavo.runtime.forward import Forward
from octavo.runtime.host_rows import HostMemory
from octavo.runtime.layout import device_of_rank
from octavo.runtime.rank_memory import Membership
from octavo.runtime.rank_process import Connection, Message
from octavo.sources.open import notes_folder, open_source
from octavo.system.machine import keep_openmp_patient
from octavo.system.numa import RankPlace

if TYPE_CHECKING:
    from octavo.runtime.rank import Rank


def serve(membership: Membership, settings: Message, home: Connection) -> None:
    """Load the model that rank 0 has loaded, start as it does, and obey until the engine ends."""
    keep_openmp_patient()
    place = RankPlace(**settings["places"][membership.local_rank])
    place.pin()
    import octavo.runtime.rank  # noqa: F401  (imported while rank 0 reads and packs weights)

    if home.receive() is None:
        return
    with no_collections():
        path, of_all = Path(settings["path"]), settings["spec"]
        meeting_point = settings["meeting_point"]
        experts = settings["experts"]
        spec = RankSpec(
            path,
            packed_folder=notes_folder(),
            threads=place.num_threads,
            numa_nodes=tuple(place.nodes),
            group=membership.group,
            experts=None if experts is None else ExpertPlaces.of(experts),
            pipeline=membership.pipeline,
            meeting_point=None if meeting_point is None else Path(meeting_point),
            **{**of_all, "device": device_of_rank(of_all["device"], membership.local_rank)},
        )
        rank = open_source(path, settings["model_impl"]).load_rank(spec)
        home.send({"loaded": rank.weights_bytes, "free_bytes": rank.free_bytes})
        if (start := home.receive()) is None:
            return
        rank.keep_hidden_states(start["depths"])
        rank.start(limits := limits_of(start["limits"]))
    if start.get("shares_host"):  # which ranks on other machines are not told
        if not _share_host(rank, membership, limits, home):
            return
    else:
        home.send({"started": True})
    follow(membership.messages, follower_of(rank.forward))


def _share_host(rank: Rank, membership: Membership, limits: RankLimits, home: Connection) -> bool:
    """Have the host blocks in the memory of all ranks. False if the home rank has ended."""
    forward = rank.forward
    assert isinstance(forward, FollowingForward) and membership.host is not None
    home.send({"started": True, "block_bytes": forward.cache.block_bytes})
    if (host := home.receive()) is None:
        return False
    sizes = host["part_bytes"], limits.num_host_blocks
    forward.cache.share_host(HostMemory(membership.host, membership.rank, *sizes))
    return True


def follower_of(forward: Forward) -> Follower:
    """Return what obeys the messages that are for a forward pass."""
    if isinstance(forward, FollowingForward):
        return Follower(forward)
    from octavo.runtime.cuda_ranks import CudaFollower, FollowingCudaForward

    assert isinstance(forward, FollowingCudaForward)
    return CudaFollower(forward)


def limits_of(fields: Message) -> RankLimits:
    """Return the limits that ``dataclasses.asdict`` and JSON have made these fields of."""
    groups = fields["kv_groups"]
    if groups is not None:
        places = tuple((group, place) for group, place in groups["places"])
        groups = KVGroups(tuple(groups["windows"]), places, groups["layers_per_block"])
    return RankLimits(**{**fields, "kv_groups": groups})
