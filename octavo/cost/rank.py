"""The share of a model that one device has: a ``RankModel``, and its weights.

Tensor parallelism cuts matrices, as ``shares.py`` has it; key-value heads are repeated where there
are more devices than heads. Where shares are uneven, each operation is that of the rank that has
most of it, as all wait for that one before they go on. Pipelines take layers one after the other,
the embedding is with the first and the head with the last. Expert parallelism deals out experts
whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from octavo.base.errors import ConfigError
from octavo.cost.communication import exchange_of
from octavo.cost.engine_profile import EngineProfile
from octavo.cost.hardware import Device
from octavo.cost.kv import attention_ops
from octavo.cost.mixers import LatentAttention, Mixer
from octavo.cost.model_spec import ModelSpec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision
from octavo.cost.rank_model import Exchange, MatrixOp, RankModel
from octavo.cost.recurrences import Recurrence
from octavo.cost.weight_shape import WeightShape
from octavo.cost.weight_type import WeightType
from octavo.kernels.parts import Stage


@lru_cache(maxsize=64)
def rank_model(
    spec: ModelSpec, precision: Precision, parallel: Parallel | None = None
) -> RankModel:
    """The work of the rank that has most to do.

    ConfigError if the model cannot be laid out so; the message says what can.
    """
    parallel = parallel or Parallel()
    check_layout(spec, parallel)
    # A step goes through the head once, whichever stage has most layers.
    exchange = _exchange(spec, parallel, range(spec.num_layers))
    models = (
        _model_of(spec, precision, parallel, stage_layers(spec, parallel, stage), exchange, True)
        for stage in range(parallel.pp)
    )
    longest = max(models, key=lambda model: model.weights_bytes)
    sent_rows = sum(_rows_after(spec, parallel, stage) for stage in range(parallel.pp))
    return replace(longest, sent_rows=sent_rows)


@lru_cache(maxsize=64)
def stage_models(
    spec: ModelSpec, precision: Precision, parallel: Parallel
) -> tuple[RankModel, ...]:
    """The work of a rank in each stage of a pipeline, as if there were no other stage.

    ConfigError if the model cannot be laid out so.
    """
    check_layout(spec, parallel)
    alone, last = replace(parallel, pp=1), parallel.pp - 1
    return tuple(
        replace(
            _model_of(spec, precision, alone, span, _exchange(spec, parallel, span), stage == last),
            sent_rows=_rows_after(spec, parallel, stage),
        )
        for stage in range(parallel.pp)
        for span in [stage_layers(spec, parallel, stage)]
    )


def _rows_after(spec: ModelSpec, parallel: Parallel, stage: int) -> int:
    """Rows that a stage sends on; the last one sends none."""
    if stage == parallel.pp - 1:
        return 0
    return spec.layers[stage_layers(spec, parallel, stage).stop - 1].rows_after


def on_devices(
    spec: ModelSpec, parallel: Parallel, device: Device, engine: EngineProfile
) -> Parallel:
    """The layout as an engine has it on devices of a kind. Where heads do not come out even,
    devices that add up have some more or less, if the engine can do that."""
    parallel = parallel.on(device.kind)
    if parallel.scheme != "sum" or not engine.has_uneven_heads:
        return parallel
    mixers = {mixer for layer in spec.layers for mixer in layer.mixers}
    heads = [mixer.heads for mixer in mixers if not isinstance(mixer, Recurrence)]
    if any(count % parallel.tp for count in heads):
        return replace(parallel, scheme="uneven sum")
    return parallel


def check_layout(spec: ModelSpec, parallel: Parallel) -> None:
    """ConfigError if heads, experts or layers cannot be shared out so."""
    mixers = {mixer for layer in spec.layers for mixer in layer.mixers}
    scanned = {mixer.heads for mixer in mixers if isinstance(mixer, Recurrence)}
    heads = {mixer.heads for mixer in mixers if not isinstance(mixer, Recurrence)}
    if parallel.dp_attention:
        _check_dp_attention(spec, parallel, mixers)
        heads = set()
    parallel.shares.check(spec.name, sorted(heads), sorted(scanned))
    if parallel.pp > spec.num_layers:
        raise ConfigError(
            f"{spec.name}: {spec.num_layers} layers cannot make a pipeline of pp = {parallel.pp}"
        )
    experts = max((layer.mlp.num_experts for layer in spec.layers if layer.mlp), default=0)
    if parallel.ep > max(experts, 1):
        raise ConfigError(
            f"{spec.name}: has {experts or 'no'} experts, which ep = {parallel.ep} devices "
            f"cannot share, one each at least: the most are {max(experts, 1)}"
        )


def _check_dp_attention(spec: ModelSpec, parallel: Parallel, mixers: Iterable[Mixer]) -> None:
    if not all(isinstance(mixer, LatentAttention) for mixer in mixers):
        raise ConfigError(
            f"{spec.name}: dp_attention is for latent attention alone (MLA), of which each device "
            "would have all KV otherwise"
        )
    if parallel.scheme != "gather":
        raise ConfigError(
            f"{spec.name}: dp_attention is planned for processors; on GPUs, choose copies of all "
            f"but the experts: dp = ep = {parallel.tp}, tp = 1"
        )


def stage_layers(spec: ModelSpec, parallel: Parallel, stage: int) -> range:
    """The layers of a stage of the pipeline, as an engine deals them out."""
    return Stage(stage, parallel.pp).layers(spec.num_layers)


def stage_weights(spec: ModelSpec, parallel: Parallel, stage: int) -> Iterator[WeightShape]:
    """The weights that a stage holds, whole: a head that is the embedding is there once."""
    layers = stage_layers(spec, parallel, stage)
    is_first, is_last = stage == 0, stage == parallel.pp - 1
    if is_first:
        yield from spec.first_weights()
    yield from spec.layer_weights(layers.start, layers.stop)
    if is_last:
        for weight in spec.last_weights():
            if not (weight.part == "head" and spec.tie_embeddings and is_first):
                yield weight


def _model_of(
    spec: ModelSpec,
    precision: Precision,
    parallel: Parallel,
    span: range,
    exchange: Exchange | None,
    has_head: bool,
) -> RankModel:
    layers = spec.layers[span.start : span.stop]
    weights = [*spec.layer_weights(span.start, span.stop)]
    if has_head:
        weights += spec.last_weights()
    return RankModel(
        matrices=tuple(_matrices(weights, precision, parallel)),
        attention=attention_ops(layers, precision, parallel.attention_shares, parallel.num_pools),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_layers=len(layers),
        activation_bytes=precision.activation_bytes,
        num_moe_layers=sum(1 for layer in layers if layer.mlp and layer.mlp.num_experts),
        parallel=parallel,
        exchange=exchange,
    )


def _exchange(spec: ModelSpec, parallel: Parallel, span: range) -> Exchange | None:
    """The exchange of ranks on processors in some layers; None of others."""
    if parallel.scheme != "gather":
        return None
    return exchange_of(
        spec,
        parallel.tp,
        span,
        has_whole_experts=parallel.ep > 1,
        dp_attention=parallel.dp_attention,
    )


def _matrices(
    weights: Iterable[WeightShape], precision: Precision, parallel: Parallel
) -> Iterator[MatrixOp]:
    """Weights of one layer and one product, as q, k and v, are one matrix; what is the same in
    several layers is one op."""
    parts: defaultdict[tuple[int | None, str], list[WeightShape]] = defaultdict(list)
    for weight in weights:
        if weight.op:
            parts[weight.layer, weight.op].append(weight)
    known: dict[tuple[_Alike, ...], MatrixOp] = {}
    counts: Counter[tuple[_Alike, ...]] = Counter()
    for each in parts.values():
        alike = tuple((*_sizes(part), precision.type_of(part)) for part in each)
        if alike not in known:
            known[alike] = _matrix(each, precision, parallel)
        counts[alike] += 1
    same: Counter[MatrixOp] = Counter()
    for alike, count in counts.items():
        same[known[alike]] += count
    for op, count in same.items():
        yield replace(op, count=count)


# What makes weights of two layers the same to a step: their names and sizes, and their type.
_Alike = tuple[str | int | WeightType, ...]


def _sizes(part: WeightShape) -> tuple[str | int, ...]:
    return (
        *(part.name, part.part, part.op, part.outputs, part.inputs),
        *(part.units, part.experts, part.experts_per_token, part.query_heads, part.kv_heads),
    )


def _matrix(parts: list[WeightShape], precision: Precision, parallel: Parallel) -> MatrixOp:
    shares = [part.of_rank(parallel) for part in parts]
    num_bytes = sum(map(precision.num_bytes, parts, shares))
    return MatrixOp(
        name=parts[0].op,
        count=1,
        inputs=shares[0].inputs,
        outputs=sum(share.outputs for share in shares),
        num_params=sum(share.num_params for share in shares),
        num_bytes=num_bytes,
        arithmetic=precision.type_of(parts[0]).arithmetic,
        sampled_only=parts[0].part == "head",
        experts=parts[0].experts_on(parallel),
        num_sharing=parallel.num_pools if parts[0].part == "attention" else 1,
    )
