"""The ranks of an engine that has several, seen from rank 0, which is the engine's own process."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.base.errors import ConfigError, PeerEndedError
from octavo.kernels.cpu.library import usable_threads
from octavo.kernels.sum_division import SLICES
from octavo.runtime.backends import why_not_fused, why_not_native
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.followers import Followers
from octavo.runtime.host_rows import HostMemory, HostRows
from octavo.runtime.layout import (
    RankBounds,
    device_of_rank,
    resolve_ranks,
    why_no_dp_attention,
    why_one_rank,
)
from octavo.runtime.leading_forward import LeadingForward
from octavo.runtime.pipelined_forward import PipelinedForward
from octavo.runtime.rank_memory import RankMemory
from octavo.runtime.rank_process import Message
from octavo.serving.expert_files import PlaceExperts, num_experts_of
from octavo.serving.one_rank import OneRank
from octavo.serving.stage_ranks import warn_if_crowded
from octavo.system import machine, numa
from octavo.system.machine import usable_memory_bytes

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig
    from octavo.runtime.rank import Rank

_log = logging.getLogger("octavo")

_FOLLOWER = "octavo.serving.follower"

# Memory of a follower beside the model, as it is measured: Python, its modules, and the kernels.
_PROCESS_BYTES = 30 << 20

# What followers are told in another way, or have themselves.
_NOT_SENT = (
    *("path", "packed_folder", "pool", "group", "meeting_point", "experts", "pipeline", "threads"),
    "numa_nodes",
)


def sent_settings(spec: RankSpec, model_impl: str) -> Message:
    """Return what followers need to load the model that rank 0 loads."""
    sent = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(RankSpec)
        if field.name not in _NOT_SENT
    }
    return {
        "path": str(Path(spec.path).resolve()),
        "model_impl": model_impl,
        "spec": sent,
        "experts": None if spec.experts is None else spec.experts.layers,
        "meeting_point": None if spec.meeting_point is None else str(spec.meeting_point),
    }


def open_ranks(
    asked: int | str,
    num_stages: int,
    spec: RankSpec,
    model: ModelConfig,
    model_impl: str,
    weights_bytes: Callable[[], int],
    place_experts: PlaceExperts | None = None,
) -> OneRank:
    """Return the ranks of an engine for ``tensor_parallel_size`` and ``pipeline_parallel_size``,
    started but for rank 0.

    Args:
        weights_bytes: as of a ``ModelSource``.
        place_experts: of ranks that have whole experts; None: they have some rows of each.

    Raises:
        ConfigError: so many cannot be, or a process cannot be started.
    """
    kernels = kernels_of(spec, model)
    is_cpu = spec.device == "cpu"
    if spec.by_sequences:
        has_latents = model.latent is not None
        if reason := why_no_dp_attention(kernels, spec.device, has_latents=has_latents):
            raise ConfigError(f"enable_dp_attention: {model.name}: {reason}")
    bounds = RankBounds(
        model=model.name,
        num_heads=None if spec.by_sequences else model.fewest_heads,
        num_experts=None if place_experts is None else num_experts_of(model),
        num_layers=model.num_layers,
        # Who gives more threads wants more; replicas may be more than there are cores.
        num_cores=max(spec.threads or 0, usable_threads()),
        num_gpus=None if is_cpu else _gpus_from(spec.device),
        num_slices=SLICES if kernels == "fused" and spec.batch_invariant else None,
        free_bytes=usable_memory_bytes() * spec.memory_share if is_cpu else None,
        needed_bytes=lambda count: weights_bytes() + (count - 1) * _PROCESS_BYTES,
        why_alone=why_one_rank(kernels, spec.device, pp=num_stages),
    )
    nodes = numa.nodes() if is_cpu else ()
    size = resolve_ranks(asked, bounds, numa.auto_ranks(nodes) if is_cpu else 1, num_stages)
    spec = with_experts(spec, place_experts, size, kernels)
    num_ranks = size * num_stages
    if num_ranks == 1:
        if spec.by_sequences:
            _log.warning("enable_dp_attention: there is one rank, which has all requests")
        return OneRank(dataclasses.replace(spec, by_sequences=False))
    num_threads = None if spec.threads is None else max(spec.threads, num_ranks)
    places = numa.places(num_ranks, nodes, num_threads)
    return RankGroup(places, size, num_stages, spec, model_impl, adds_up=kernels == "fused")


def with_experts(
    spec: RankSpec, place_experts: PlaceExperts | None, size: int, kernels: str
) -> RankSpec:
    """Return the specification of one of ``size`` ranks of a layer, with the places of whole
    experts if they have some.

    Raises:
        ConfigError: ranks of these kernels cannot have whole ones.
    """
    if place_experts is None:
        return spec
    if kernels == "fused":
        raise ConfigError(
            "enable_expert_parallel: ranks whose results are added up have some rows of every "
            "expert; leave it off with these kernels"
        )
    if size == 1:
        _log.warning("enable_expert_parallel: a layer has one rank, which has all its experts")
        return spec
    return dataclasses.replace(spec, experts=place_experts(size))


def kernels_of(spec: RankSpec, model: ModelConfig) -> str:
    """Return the kernels that will run a model, as far as is known before it is loaded."""
    if spec.kernels != "auto":
        return spec.kernels
    if spec.device == "cpu":
        return "native" if why_not_native(spec, model) is None else "reference"
    return "fused" if why_not_fused(spec, model) is None else "reference"


def _gpus_from(device: str) -> int:
    """Return how many GPUs there are from the one of rank 0 on."""
    return max(0, machine.num_gpus() - int(device.partition(":")[2] or 0))


class RankGroup(OneRank):
    """Rank 0 and its followers, which rank 0 closes with the engine.

    Args:
        places: of all ranks. This process is pinned to that of rank 0, if there are several nodes.
        size: ranks of each stage.
        num_stages: see ``RankMemory`` for the order of ranks.
        adds_up: ranks add up results by the scheme `sum`. They load at the same time, since they
            meet before they are loaded; others wait for the weights that rank 0 packs.
    """

    def __init__(
        self,
        places: Sequence[numa.RankPlace],
        size: int,
        num_stages: int,
        spec: RankSpec,
        model_impl: str,
        *,
        adds_up: bool = False,
    ):
        num_cores = usable_threads() * spec.memory_share  # other replicas have the rest
        setting = "tensor_parallel_size" if num_stages == 1 else "pipeline_parallel_size"
        is_crowded = warn_if_crowded(places, num_cores, setting)
        memory = RankMemory(size, num_stages, is_crowded=is_crowded)
        membership = memory.home
        own = places[0]
        self._memory = memory
        self._num_host_blocks = 0
        self._rows: HostRows | None = None
        self._adds_up = adds_up
        if adds_up:
            folder = Path(tempfile.mkdtemp(prefix="octavo-ranks-"))
            self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            spec = dataclasses.replace(spec, meeting_point=folder / "meeting")
        super().__init__(
            dataclasses.replace(
                spec,
                device=device_of_rank(spec.device, 0),
                threads=own.num_threads,
                numa_nodes=own.nodes,
                group=membership.group,
                pipeline=membership.pipeline,
            )
        )
        settings = {
            **sent_settings(spec, model_impl),
            "meeting_point": str(spec.meeting_point) if adds_up else None,
            "places": [dataclasses.asdict(place) for place in places],
        }
        self._followers = Followers(_FOLLOWER, memory, settings, patience_s=spec.start_timeout)
        own.pin()
        if adds_up:
            self._followers.send({"load": True})

    @contextmanager
    def loading(self) -> Iterator[None]:
        try:
            yield
        except PeerEndedError:
            self._receive()  # which says who has ended, and how
            raise

    @property
    def _setting(self) -> str:
        """The setting that errors name."""
        return "tensor_parallel_size" if self.spec.stage.is_whole else "pipeline_parallel_size"

    def load(self, rank: Rank) -> None:
        """Have the others load. ConfigError if rank 0 runs on kernels that cannot be shared."""
        if reason := why_one_rank(rank.kernels, self.spec.device, pp=self.spec.stage.count):
            raise ConfigError(f"{self._setting}: {reason}")
        if not self._adds_up:
            self._followers.send({"load": True})

    def start(self, rank: Rank, limits: RankLimits) -> None:
        self._receive()  # all have loaded
        # Those that add up have KV caches of PyTorch.
        self._num_host_blocks = 0 if self._adds_up else limits.num_host_blocks
        self._followers.send(
            {
                "limits": dataclasses.asdict(limits),
                "depths": sorted(rank.kept_depths),
                "shares_host": self._num_host_blocks > 0,
            }
        )

    def wait_until_started(self, rank: Rank) -> None:
        """Return when all ranks can take steps, and give the followers to rank 0.

        Raises:
            ConfigError: a follower could not load or start; with its last words.
        """
        answers = self._receive()
        if self._num_host_blocks:
            self._share_host(rank, [int(answer["block_bytes"]) for answer in answers])
        rank.followers = self._followers

    def _share_host(self, rank: Rank, others: Sequence[int]) -> None:
        """Have the host blocks of all ranks in one memory.

        ``others``: the bytes of a block in ranks 1 and up.
        """
        forward = rank.forward
        assert isinstance(forward, LeadingForward | PipelinedForward)
        part_bytes = [forward.cache.block_bytes, *others]
        memory = HostMemory(self._memory.host, 0, part_bytes, self._num_host_blocks)
        forward.cache.share_host(memory)
        self._rows = forward.kv_cache.host = HostRows(memory)
        self._followers.send({"part_bytes": part_bytes})

    def whole_rows(self, rank: Rank) -> Sequence[memoryview]:
        if self._rows is None:
            raise ConfigError(
                f"{self._setting}: ranks of PyTorch's kernels, or of GPUs, have KV in memory of "
                "their own: leave out kv_offload and prefill_replicas, or set it to 1"
            )
        return self._rows

    def _receive(self) -> list[Message]:
        try:
            return self._followers.receive()
        except PeerEndedError as error:
            raise ConfigError(f"{self._setting}: {error}") from error

    def when_one_ends(self, callback: Callable[[PeerEndedError], object]) -> None:
        self._followers.when_one_ends(callback)

    def close(self) -> None:
        self._followers.close()
        if self._adds_up:
            self._remove()
