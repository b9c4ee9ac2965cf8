"""The time of one step, for a batch on a model and a device given by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.base.errors import ConfigError
from octavo.cost.engine_profile import EngineProfile, profile
from octavo.cost.find_device import find_device
from octavo.cost.hardware import Device
from octavo.cost.model_spec import ModelSpec
from octavo.cost.op_cost import OpCost
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision, precision_of
from octavo.cost.prediction import Source
from octavo.cost.rank import on_devices, rank_model
from octavo.cost.step_cost import StepBatch, StepModel
from octavo.cost.work import Chunk, Span

Chunks = Iterable[Chunk | tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step.

    Args:
        ops: of each operation on one rank; in a pipeline, on its longest stage.
        comm, overhead: between devices; once in each step.
        total: of all stages; nine times out of ten it is from ``low`` to ``high``.
        source: how that is known; see `octavo.cost.prediction`.
    """

    ops: tuple[OpCost, ...]
    comm: float
    overhead: float
    total: float
    low: float
    high: float
    source: Source


def step_cost(
    batch: StepBatch | Chunks,
    model: str | ModelSpec,
    hardware: str | Device = "auto",
    profile: str | EngineProfile = "octavo",
    parallel: Parallel | None = None,
    quantization: str | Precision | None = None,
) -> StepSeconds:
    """Return the time of a step of an engine; `octavo.cost.step_cost.StepModel` is for many of
    them.

    Args:
        batch: of an engine, or chunks of sequences: (tokens before, tokens computed now) is one
            after which a token is sampled; a ``Span`` says more.
        parallel: the layout; None takes tensor parallelism over as many devices as ``hardware``
            says.
        quantization: of the weights, or the precision of everything; None is as the model is.

    Raises:
        ConfigError: a name is not known, the batch is empty, or the model cannot be laid out
            so.
    """
    spec = open_spec(model) if isinstance(model, str) else model
    engine = _engine(profile)
    device, count = find_device(hardware) if isinstance(hardware, str) else (hardware, 1)
    if not isinstance(quantization, Precision):
        quantization = precision_of(spec, quantization, engine.kv_dtype(None))
    layout = on_devices(spec, parallel or Parallel(tp=count), device, engine)
    rank = rank_model(spec, quantization, layout)
    cost = StepModel.of(rank, device, engine.name).cost(*_chunks(batch))
    total = cost.total
    return StepSeconds(
        cost.ops,
        cost.comm.value,
        cost.overhead.value,
        total.value,
        total.low,
        total.high,
        total.source,
    )


def _engine(name: str | EngineProfile) -> EngineProfile:
    return profile(name) if isinstance(name, str) else name


def _chunks(batch: StepBatch | Chunks) -> tuple[list[Chunk], int]:
    """Return the chunks, and the number of multi-steps."""
    if isinstance(batch, Iterable):
        chunks, num_steps = [Span(*each) if isinstance(each, tuple) else each for each in batch], 1
    else:
        chunks, num_steps = list(batch.items), batch.num_multi_steps
    if not chunks:
        raise ConfigError("a step of nothing: the batch has no chunk")
    return chunks, num_steps
