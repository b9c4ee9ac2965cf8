"""Communication between ranks in a step, and the time that it takes.

Rings and direct exchanges over links of ``bandwidth`` bytes a second and direction, with a floor
of latency: small messages, as those of decoding, take little else. For n ranks and S bytes:

    all-reduce       alpha + 2 (n-1)/n S / bandwidth        (reduce-scatter, then all-gather)
    all-gather       alpha +   (n-1)/n S / bandwidth        S is what every rank has at the end
    all-to-all       alpha +   (n-1)/n S / bandwidth        S is what one rank sends
    point to point   alpha +           S / bandwidth

Tokens go to whole experts elsewhere as DeepEP sends them (its README and ``get_dispatch_layout``;
https://github.com/deepseek-ai/DeepEP): a token once to each rank that has some of its experts,
however many these are, and one sum of what they make back from each. What is multiplied in FP8 goes
there in FP8, with a float32 scale for each 128 values, and comes back 16 bits wide. Devices that
share each matrix (tp) send a part of their tokens each, and gather the results, as vLLM does
(``sequence_parallel_chunk`` in its models). Nothing of this is hidden behind computing: engines can
compute one half of a batch while they send the other (vLLM's ``enable_dbo``, SGLang's
``enable_two_batch_overlap``), and do not unless told to.

A stage of a pipeline sends the hidden states of a step to the next one: as wide as activations on
GPUs, and as 32-bit floats on processors, which keep all their bits. That is one row a token, or two
where its last layer norms what its MLP gives, or has experts beside shared ones
(``LayerSpec.rows_after``).

Ranks on processors (scheme `gather`) send nothing: each writes its part of a value into memory that
all have, they meet, and each reads what the others wrote. That is an all-gather whose S is what all
of them write together, once; each rank reads (n-1)/n of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from octavo.base.errors import ConfigError
from octavo.cost.exchange import Meeting
from octavo.cost.hardware import SHARED_MEMORY, Device
from octavo.cost.model_spec import ModelSpec
from octavo.cost.networks import Network
from octavo.cost.parallel import Parallel
from octavo.cost.rank_model import EXCHANGED_BYTES, Exchange, RankModel
from octavo.cost.shares import shares
from octavo.cost.work import RowCounts, ranks_hit


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices: bandwidth and latency.

    Args:
        bandwidth: bytes a second and direction, of the sheet.
        shares: of it that collective operations reach among 2, 4, and 8 or more ranks.
        latency_s: the least that one takes among 2 ranks; each doubling of them adds a quarter.
        island: how many devices have this link to each other; more of them talk over a network.
        network: as it was measured; None: the usual one.
        hidden_bytes: of a number of hidden states that cross it; None: as wide as activations.
        sends_fp8: rows of products in FP8 go to other devices in FP8: these compute in it.
    """

    bandwidth: float
    shares: tuple[float, float, float]
    latency_s: float
    island: int = 8
    network: Network | None = None
    hidden_bytes: int | None = None
    sends_fp8: bool = False

    def reached(self, num_ranks: int) -> float:
        """Bytes a second."""
        own = self.bandwidth * self.shares[min(2, bisect_left((2, 4), num_ranks))]
        return own if num_ranks <= self.island else min(own, self._network_reached)

    def floor_s(self, num_ranks: int) -> float:
        own = self.latency_s * (0.75 + 0.25 * (num_ranks - 1).bit_length())
        return own if num_ranks <= self.island else own + self._network_latency_s

    @property
    def _network_reached(self) -> float:
        return _NETWORK_REACHED if self.network is None else self.network.bandwidth

    @property
    def _network_latency_s(self) -> float:
        return _NETWORK_LATENCY_S if self.network is None else self.network.latency_s


_LOGIT_BYTES = 4
_FP8_ROW_BYTES = 1 + 4 / 128  # of a value, with its share of the scale
# Between machines, for each device: 400 Gbit/s of which 0.8 is reached.
_NETWORK_REACHED, _NETWORK_LATENCY_S = 40e9, 20e-6
# By what a link is called. Shares from Vidur's all-reduces of 64 MB: bus bandwidths of 156, 167 and
# 174 GB/s among 2, 4 and 8 A100, 274, 317 and 365 among H100. Small messages take 5 to 10 us in
# one-shot kernels, which engines use for decoding, 7 to 60 in NCCL; 20 to 40 us over PCIe, of whose
# 32 GB/s 12 to 20 are reached without peer-to-peer copies. In a mesh, two devices have but one of
# the links between them, of 64 GB/s. NVLink2 is taken to be as NVLink3. In shared memory (two vCPUs
# of a Xeon with AMX, quiet, 2026-11-28) two pinned processes met in 0.18 us, and a core read what
# the other had just written, 2 KB in 0.4 us, 8 in 1.3, 32 in 3.5, 128 in 7.3, 512 in 26: 1 us and
# 20 GB/s a core (``hardware.py``). Between sockets it was not measured.
_LINKS = {
    "NVLink2": ((0.52, 0.56, 0.58), 12e-6),
    "NVLink3": ((0.52, 0.56, 0.58), 10e-6),
    "NVLink4": ((0.61, 0.70, 0.81), 8e-6),
    "NVLink5": ((0.61, 0.70, 0.81), 8e-6),
    "NVLink bridge": ((0.52, 0.52, 0.52), 12e-6),
    "xGMI": ((0.11, 0.32, 0.70), 12e-6),
    "PCIe": ((0.50, 0.50, 0.50), 30e-6),
    SHARED_MEMORY: ((1.0, 1.0, 1.0), 1e-6),
}
_UNKNOWN_LINK = ((0.50, 0.50, 0.50), 20e-6)
_ISLANDS = {"NVL72": 72, "pair": 2}  # by a word of what the link is called; others: a machine of 8


def link_of(device: Device) -> Link:
    """ConfigError if nothing is known of a link between devices of this kind."""
    if device.link_bandwidth is None:
        raise ConfigError(
            f"{device.name} has no link to another device: a model stays on one; to cut it, choose "
            "hardware that has links (`octavo hardware list`), or add link_gb_s to your own"
        )
    kind = SHARED_MEMORY if device.kind == "cpu" else device.link_kind
    known = (of for name, of in _LINKS.items() if kind.startswith(name))
    shares, latency = next(known, _UNKNOWN_LINK)
    island = next((size for word, size in _ISLANDS.items() if word in device.link_kind), 8)
    hidden_bytes = EXCHANGED_BYTES if device.kind == "cpu" else None
    sends_fp8 = device.kind != "cpu" and "fp8" in device.peaks
    bandwidth, network = device.link_bandwidth, device.network
    return Link(bandwidth, shares, latency, island, network, hidden_bytes, sends_fp8)


def link_between(device: Device, parallel: Parallel) -> Link:
    """The link of a layout's devices. ConfigError if they have none, or no such layout can be."""
    link = link_of(device)
    if device.kind != "cpu":
        return link
    if device.network is not None:
        return _link_of_machines(link, device.network, parallel)
    if parallel.ep not in (1, parallel.tp):
        raise ConfigError(
            f"{device.name}: on processors, the ranks that share the experts are those that share "
            f"the other weights: choose ep = tp, here {parallel.tp}, or 1"
        )
    most = device.num_ranks if device.is_measured else link.island
    if parallel.tp * parallel.pp > most:
        raise ConfigError(
            f"{device.name}: {parallel.tp * parallel.pp} ranks do not share the memory of one "
            f"machine, but {most} do: choose tp x pp = {most}, or copies (dp, replicas)"
        )
    return link


def _link_of_machines(link: Link, network: Network, parallel: Parallel) -> Link:
    """The link of processors of several machines, which have a stage each."""
    if parallel.tp > 1 or parallel.ep > 1:
        raise ConfigError(
            f"the network to {network.name}: ranks that share a layer meet several times in it, "
            "which takes longer over a network than the layer: choose pp, or copies (dp, replicas)"
        )
    return replace(link, island=1)


# -- the operations -------------------------------------------------------------------------------


def all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds until every rank has the sum of all."""
    return _collective(2 * num_bytes, num_ranks, link)


def all_gather(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds until every rank has all ``num_bytes``, of which each had its part."""
    return _collective(num_bytes, num_ranks, link)


def all_to_all(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds until each rank has sent its ``num_bytes`` to all others in equal parts."""
    return _collective(num_bytes, num_ranks, link)


def point_to_point(num_bytes: float, link: Link, num_ranks: int = 2) -> float:
    """Seconds until one rank has what another one sends. ``num_ranks``: all there are, which says
    whether a network lies between them."""
    if num_ranks > link.island and link.network is not None:
        return link.network.seconds(num_bytes)
    if num_ranks > link.island:
        return _NETWORK_LATENCY_S + num_bytes / min(link.reached(2), _NETWORK_REACHED)
    return link.floor_s(2) + num_bytes / link.reached(2)


def _collective(num_bytes: float, num_ranks: int, link: Link) -> float:
    if num_ranks == 1:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    return link.floor_s(num_ranks) + share * num_bytes / link.reached(num_ranks)


# -- of a step ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective operation of all layers: ``num_bytes`` and ``seconds`` are sums over them."""

    name: str
    count: int
    num_bytes: float
    seconds: float


def transfers(model: RankModel, rows: RowCounts, link: Link) -> list[Transfer]:
    """The communication of one pass through the model, on all stages of a pipeline."""
    parallel = model.parallel
    hidden = rows.num_tokens * model.hidden_size * model.activation_bytes
    said: list[Transfer] = []
    if model.exchange is not None:
        said += _gathered(model.exchange, rows, parallel.tp, link)
    elif parallel.tp > 1:
        said += _of_tensors(model, rows, hidden, link)
    if _sends_to_experts(parallel):
        said += _of_experts(model, rows, link)
    if parallel.pp > 1:
        hops, sent = parallel.pp - 1, sent_bytes(model, rows.num_tokens, link)
        seconds = hops * point_to_point(sent / hops, link, parallel.tp * parallel.pp)
        said.append(Transfer("stages.send", hops, sent, seconds))
    return said


def sent_bytes(model: RankModel, num_tokens: int, link: Link) -> float:
    """Bytes that a stage of a pipeline, or all of them, send on in a pass of so many tokens."""
    row_bytes = model.hidden_size * (link.hidden_bytes or model.activation_bytes)
    return num_tokens * model.sent_rows * row_bytes


def exchange_of(
    spec: ModelSpec,
    tp: int,
    span: range | None = None,
    *,
    has_whole_experts: bool = False,
    dp_attention: bool = False,
) -> Exchange:
    """Return the exact exchange of ``tp`` ranks of the scheme `gather`, in all layers or in those
    of ``span``; ``has_whole_experts``: each has some experts (ep = tp), and not a part of all;
    ``dp_attention``: each attends for requests of its own.

    In a pass of T tokens, R rows of which are sampled, all ranks together write
    T x token_values + R x row_values numbers, of 4 bytes, into values that all ranks have: each
    number once, by the rank that computes it. A KV head that several ranks compute counts once.
    Each rank reads (tp-1)/tp of them. What is private is not in it: queries, keys and values of a
    rank's own heads, and outputs of matrices that have no tile of rows for each rank, which all
    ranks compute whole. A step of several passes (multi-step) writes the sum of them.

        attention               heads x value size, hidden size; before these, if queries and keys
                                are normed over all heads at once, all of both; gates of outputs
        latent attention        before these, both latent vectors; of requests of their own, ranks
                                exchange the hidden size alone
        recurrence              outputs of all projections, and of all heads
        MLP                     inner size, hidden size
        experts                 their number (router), inner size x experts of a token, hidden size
        whole experts           their number, hidden size x experts of a token, hidden size
        head                    vocabulary, for each sampled row
    """
    said, counted = shares(tp, "gather"), [0, 0]
    layers = spec.layers if span is None else spec.layers[span.start : span.stop]
    for layer in layers:
        parts = [list(mixer.meetings(spec.hidden_size)) for mixer in layer.mixers]
        if dp_attention:
            parts = [[_by_rows(meetings[-1])] for meetings in parts]  # that of the output
        if layer.mlp is not None:
            parts.append(list(layer.mlp.meetings(spec.hidden_size)))
        for meetings in parts:
            for meeting in meetings:
                values = [
                    (value.of_whole if is_whole else value.width) * value.times
                    for value in meeting
                    if (is_whole := has_whole_experts and value.of_whole > 0)
                    or value.by_heads
                    or said.exchanges(value.width)
                ]
                counted[0] += sum(values)
                counted[1] += bool(values)
    logits = spec.vocab_size if said.exchanges(spec.vocab_size) else 0
    return Exchange(counted[0], logits, counted[1])


def _by_rows(meeting: Meeting) -> Meeting:
    """Return a meeting in which each rank makes some rows, whole, however narrow they are."""
    return tuple(value._replace(by_heads=True) for value in meeting)


def _gathered(exchange: Exchange, rows: RowCounts, tp: int, link: Link) -> Iterator[Transfer]:
    """Yields the exchange of ranks on processors in all layers, and of the logits at the end."""
    num_bytes = float(rows.num_tokens * exchange.token_bytes)
    waits = (exchange.meetings - 1) * link.floor_s(tp)
    seconds = waits + all_gather(num_bytes, tp, link)
    yield Transfer("layers.gather", exchange.meetings, num_bytes, seconds)
    if rows.num_sampled:
        logits = float(rows.num_sampled * exchange.row_bytes)
        yield Transfer("head.gather", 1, logits, all_gather(logits, tp, link))


def _sends_to_experts(parallel: Parallel) -> bool:
    """Whether tokens go to experts elsewhere. Ranks that share each matrix have all tokens, compute
    those of their own experts, and add up."""
    return parallel.ep > parallel.tp


def _of_tensors(model: RankModel, rows: RowCounts, hidden: float, link: Link) -> list[Transfer]:
    """A sum of embeddings; two in each layer, after attention and after the MLP, and one after the
    MLP that all tokens use beside experts; the logits at the end, which are float32."""
    tp, pp = model.parallel.tp, model.parallel.pp
    shared = sum(each.count for each in model.matrices if each.name == "shared.down")
    sums = 2 * model.num_layers + shared
    if _sends_to_experts(model.parallel):
        sums -= model.num_moe_layers  # whose results come back by themselves
    sums *= pp
    said = [
        Transfer("embedding.all_reduce", 1, hidden, all_reduce(hidden, tp, link)),
        Transfer("layers.all_reduce", sums, sums * hidden, sums * all_reduce(hidden, tp, link)),
    ]
    if rows.num_sampled:
        logits = float(rows.num_sampled * model.vocab_size * _LOGIT_BYTES)
        said.append(Transfer("head.all_gather", 1, logits, all_gather(logits, tp, link)))
    return said


def _of_experts(model: RankModel, rows: RowCounts, link: Link) -> list[Transfer]:
    """Sends each token to the ranks of its experts, and the sums of what these make back."""
    first = next((each for each in model.matrices if each.experts is not None), None)
    if first is None or first.experts is None or not model.num_moe_layers:
        return []
    parallel = model.parallel
    layers = model.num_moe_layers * parallel.pp
    # The ranks that share a sequence have its rows in common, and send a part each.
    sent = rows.num_tokens * ranks_hit(first.experts, parallel.ep) / parallel.tp
    is_fp8 = link.sends_fp8 and first.arithmetic == "fp8"
    there = sent * first.inputs * (_FP8_ROW_BYTES if is_fp8 else model.activation_bytes)
    back = sent * first.inputs * model.activation_bytes
    seconds = all_to_all(there, parallel.ep, link) + all_to_all(back, parallel.ep, link)
    said = [
        Transfer("experts.all_to_all", 2 * layers, layers * (there + back), layers * seconds),
    ]
    if parallel.tp > 1:
        whole = rows.num_tokens * first.inputs * model.activation_bytes
        seconds = layers * all_gather(whole, parallel.tp, link)
        said.append(Transfer("experts.all_gather", layers, layers * whole, seconds))
    return said


def merge_transfers(said: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Sum the transfers of several passes by name."""
    merged: dict[str, Transfer] = {}
    for each in said:
        before = merged.get(each.name, Transfer(each.name, 0, 0.0, 0.0))
        merged[each.name] = Transfer(
            each.name,
            before.count + each.count,
            before.num_bytes + each.num_bytes,
            before.seconds + each.seconds,
        )
    return tuple(merged.values())
