"""Refusal of layouts of ranks that cannot be, before anything is started.

Processors share a model by the scheme `gather` (``kernels/parts.py``), GPUs by `sum`
(``kernels/sum_division.py``): ranks are processes on one machine, with some of the query heads and
of the cores each, or a GPU; in a pipeline, each stage of layers has so many of them. Plans and the
start of an engine ask here, each with what it knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from octavo.base.errors import ConfigError

AUTO = "auto"  # as many ranks as there are NUMA nodes with processors


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBounds:
    """Bounds of the ranks that can share a model on one machine. None: it is not known, or there is
    no such bound.

    Args:
        model: its name, for errors.
        num_heads: of the layer that has the fewest; each rank computes one at least.
        num_experts: of a layer, where ranks have whole ones; each has one at least.
        num_layers: each stage of a pipeline has one at least.
        num_cores: that ranks may use; each rank has one at least.
        num_gpus: from the first one that ranks may use; each rank has one.
        num_slices: of canonical sums, of which all ranks have equally many.
        free_bytes: of memory, for all ranks together.
        needed_bytes: that so many ranks need together, at least.
        why_alone: why there can be no second rank at all, see ``why_one_rank``.
    """

    model: str
    num_heads: int | None = None
    num_experts: int | None = None
    num_layers: int | None = None
    num_cores: int | None = None
    num_gpus: int | None = None
    num_slices: int | None = None
    free_bytes: float | None = None
    needed_bytes: Callable[[int], float] | None = None
    why_alone: str | None = None

    def why_not(self, tp: int, pp: int = 1) -> str | None:
        """Return why so many ranks in each of ``pp`` stages cannot be; None if they can."""
        count = tp * pp
        if count == 1:
            return self._why_no_memory(count)
        if self.why_alone is not None:
            return self.why_alone
        if self.num_heads is not None and tp > self.num_heads:
            return f"{tp} ranks cannot share its {self.num_heads} heads, one each at least"
        if self.num_experts is not None and tp > self.num_experts:
            return f"{tp} ranks cannot share its {self.num_experts} experts, one each at least"
        if self.num_layers is not None and pp > self.num_layers:
            return f"{pp} stages cannot have its {self.num_layers} layers, one each at least"
        if self.num_cores is not None and count > self.num_cores:
            what = f"{tp} ranks" if pp == 1 else f"{pp} stages of {tp} rank{'s' if tp > 1 else ''}"
            return f"{what} need a core each, and {self.num_cores} may be used"
        if self.num_gpus is not None and count > self.num_gpus:
            gpus = f"{self.num_gpus} GPU{'' if self.num_gpus == 1 else 's'}"
            return f"{count} ranks need a GPU each, and {gpus} can be used"
        if self.num_slices is not None and self.num_slices % tp:
            return (
                f"with batch_invariant, sums are of {self.num_slices} slices, which {tp} ranks "
                "cannot share out evenly"
            )
        return self._why_no_memory(count)

    def _why_no_memory(self, count: int) -> str | None:
        if self.needed_bytes is None or self.free_bytes is None:
            return None
        needed = self.needed_bytes(count)
        if needed <= self.free_bytes:
            return None
        return (
            f"{count} rank{'s' if count > 1 else ''} need {needed / 2**30:.2f} GiB together, and "
            f"{self.free_bytes / 2**30:.2f} GiB of memory are free"
        )

    def nearest(self, tp: int) -> int | None:
        """Return the number of ranks nearest to ``tp`` that can be: ``tp`` itself, or the most of
        fewer ones; None if there is none. More ranks never need less memory together."""
        layout = self.nearest_layout(tp, 1)
        return None if layout is None else layout[0]

    def nearest_layout(self, tp: int, pp: int) -> tuple[int, int] | None:
        """Return the numbers of ranks and of stages that can be, and that are nearest: none is more
        than ``tp`` and ``pp``, and together they are as many ranks as possible; of equal ones, with
        the most stages."""
        most_tp, most_pp = tp, pp
        for bound in (self.num_heads, self.num_experts):
            if bound is not None:
                most_tp = min(most_tp, bound)
        if self.num_layers is not None:
            most_pp = min(pp, self.num_layers)
        if self.why_alone is not None:
            most_tp = most_pp = 1
        for most in (self.num_cores, self.num_gpus):
            if most is not None:
                most_tp, most_pp = (max(1, min(n, most)) for n in (most_tp, most_pp))
        layouts = ((t, p) for t in range(1, most_tp + 1) for p in range(1, most_pp + 1))
        possible = [each for each in layouts if self.why_not(*each) is None]
        return max(possible, key=lambda each: (each[0] * each[1], each[1]), default=None)


def parse_ranks(text: str | int) -> int | str:
    """Return a number of ranks, or ``auto``. ConfigError if it is neither."""
    if text == AUTO:
        return AUTO
    is_number = isinstance(text, int) and not isinstance(text, bool)
    number = int(text) if is_number or (isinstance(text, str) and text.isdecimal()) else 0
    if number < 1:
        raise ConfigError(
            f"tensor_parallel_size must be an integer of at least 1, or auto, not {text!r:.40}"
        )
    return number


def check_ranks(tp: int, bounds: RankBounds, pp: int = 1) -> None:
    """ConfigError if a model cannot be shared by ``tp`` ranks in each of ``pp`` stages; it says
    why, and the nearest layout that can be."""
    why = bounds.why_not(tp, pp)
    if why is None:
        return
    nearest = bounds.nearest_layout(tp, pp)
    if nearest is None:
        remedy = "no other number can be either"
    elif pp == 1:
        remedy = f"the nearest is {nearest[0]}"
    else:
        remedy = f"the nearest is {_settings(*nearest)}"
    asked = f"tensor_parallel_size={tp}" if pp == 1 else _settings(tp, pp)
    raise ConfigError(f"{asked}: {bounds.model}: {why}; {remedy}")


def _settings(tp: int, pp: int) -> str:
    """Return the settings of a pipeline, as an error names them."""
    stages = f"pipeline_parallel_size={pp}"
    return stages if tp == 1 else f"tensor_parallel_size={tp}, {stages}"


def resolve_ranks(asked: int | str, bounds: RankBounds, num_nodes: int, pp: int = 1) -> int:
    """Return the number of ranks for ``--tensor-parallel-size``: a number as it is, and for
    ``auto`` the nearest to one a NUMA node that a stage has.

    Args:
        num_nodes: that have processors, see ``octavo.system.numa.auto_ranks``.
        pp: stages.

    Raises:
        ConfigError: so many cannot be, or not even one.
    """
    tp = asked if isinstance(asked, int) else (bounds.nearest(max(1, num_nodes // pp)) or 1)
    check_ranks(tp, bounds, pp)
    return tp


def device_of_rank(device: str, rank: int) -> str:
    """Return the device of a rank: the CPU, or the GPU so many behind that of rank 0."""
    if device == "cpu":
        return device
    kind, _, first = device.partition(":")
    return f"{kind}:{int(first or 0) + rank}"


def why_no_dp_attention(kernels: str, device: str, *, has_latents: bool) -> str | None:
    """Return why ranks cannot have requests of their own, whose attention they compute; None if
    they can."""
    if not has_latents:
        return (
            "it is for latent attention (MLA), of which each rank would have all KV otherwise; KV "
            "heads of this model are shared out to ranks anyway: leave it off"
        )
    if device != "cpu" or kernels != "native":
        return (
            f"it needs octavo's native CPU kernels, and these are {kernels} ones on {device} "
            "(`octavo doctor` says why): leave it off"
        )
    return None


def why_one_rank(
    kernels: str, device: str, platform: str = sys.platform, *, pp: int = 1
) -> str | None:
    """Return why several ranks, in ``pp`` stages, cannot run a model with these kernels there
    (names as of `Rank` and of ``EngineArgs``), None if they can."""
    if not platform.startswith("linux"):
        return f"ranks share memory as Linux has it, and this is {platform}"
    if device != "cpu" and kernels != "fused":
        return (
            f"ranks on GPUs need octavo's fused kernels, and these are {kernels} ones "
            "(`octavo doctor` says why; recurrent layers have none)"
        )
    if pp > 1 and kernels == "fused":
        return "stages of a pipeline need octavo's native CPU kernels, and these are fused ones"
    if kernels not in ("native", "fused"):
        return (
            f"ranks need octavo's native CPU kernels, and these are {kernels} ones "
            "(`octavo doctor` says why)"
        )
    return None
