"""From settings to a simulation that can be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError
from octavo.core.lookahead import MAX_ROUNDS
from octavo.cost.engine_profile import EngineProfile, Limits, profile
from octavo.cost.find_device import find_device
from octavo.cost.hardware import Device
from octavo.cost.kv import kv_bytes_per_token
from octavo.cost.measured_steps import MeasuredSteps, calibrated
from octavo.cost.memory import MemoryPlan, memory
from octavo.cost.model_spec import ModelSpec
from octavo.cost.open_spec import open_spec
from octavo.cost.parallel import Parallel
from octavo.cost.precision import Precision, precision_of
from octavo.cost.rank import rank_model
from octavo.cost.step_cost import StepModel
from octavo.measure.slo import Slo
from octavo.runtime.capacity import Capacity
from octavo.settings.engine import EngineArgs, EngineConfig, parse_bytes, resolve
from octavo.sim.costs import Cost, costs
from octavo.sim.demand import PromptSpec, as_conversations, asks_of_requests, asks_of_trace
from octavo.sim.fleet import Disaggregation, FleetSpec
from octavo.sim.replica import ReplicaSpec, ReplicaStepTimes
from octavo.sim.report import SimulationReport, report_on
from octavo.sim.settings import TRANSFER_GB_S, ClientSettings, FleetSettings
from octavo.sim.simulation import Progress, simulate
from octavo.workload.plan import LoadPlan, PromptMaker, create_plan, create_requests
from octavo.workload.settings import LoadSettings, Workload
from octavo.workload.traces import KINDS, read_trace

_TRACES = {"trace": "auto", "timed_trace": "bailian", **{kind: kind for kind in KINDS}}


class Typical(NamedTuple):
    """What is asked, as far as a layout is chosen for it.

    Args:
        input_len, output_len: mean tokens of prompts, without what conversations repeat, and of
            answers.
        rate: requests a second; None where they are all there at once, or a client sends the next
            one when the last has ended.
        concurrency: the most that run at once; without a rate, how many there are.
    """

    input_len: int
    output_len: int
    rate: float | None
    concurrency: int | None


LayOut = Callable[[FleetSettings, Typical], FleetSettings]


@dataclass(frozen=True)
class Simulation:
    """All that a run needs. ``setting``: what is simulated, as a report tells it."""

    model: str
    asks: Sequence[PromptSpec]
    plan: LoadPlan
    fleet: FleetSpec
    load: LoadSettings
    setting: Mapping[str, Any]
    slo: Slo | None = None
    seed: int = 0

    def run(
        self,
        watch: Callable[[ReplicaStepTimes], None] | None = None,
        progress: Progress | None = None,
    ) -> SimulationReport:
        """Simulate, and report on it; see ``simulate``."""
        result = simulate(self.asks, self.plan, self.fleet, watch=watch, progress=progress)
        return report_on(
            result,
            self.model,
            self.load,
            is_open_loop=self.plan.is_open_loop,
            setting=self.setting,
            slo=self.slo,
            seed=self.seed,
        )


def prepare(
    model: ModelSpec | str,
    fleet: FleetSettings,
    workload: Workload,
    load: LoadSettings,
    *,
    engine: Mapping[str, Any] | None = None,
    clients: ClientSettings | None = None,
    slo: Slo | None = None,
    tokenizer: PromptMaker | None = None,
    measured: MeasuredSteps | None = None,
    lay_out: LayOut | None = None,
) -> Simulation:
    """A simulation of a model.

    Args:
        model: or what `octavo.cost.open_spec` finds it by: a name, a folder, a file.
        engine: settings of the engine that were asked for, of ``ENGINE_SETTINGS``.
        measured: what steps take on the hardware, where that is known.
        slo: limits that requests should meet.
        tokenizer: of the model, for prompts that are text.
        lay_out: chooses a layout for what is asked, where nothing is said of one; without it, each
            matrix is shared out to all devices.

    Raises:
        ConfigError: settings contradict each other, or the model does not fit.
        WorkloadFileError: a file of requests is not as it should be.
    """
    spec = open_spec(model) if isinstance(model, str) else model
    clients = clients or ClientSettings()
    asks = _asks(workload, clients, tokenizer or _Vocabulary(spec.vocab_size))
    load = clients.load(load)
    plan = create_plan(load, [ask for ask in asks if ask.follows is None], workload.seed)
    if lay_out is not None and not fleet.has_layout:
        fleet = lay_out(fleet, typical(asks, plan))
    fleet_spec, setting = _fleet(spec, fleet, engine or {}, measured)
    return Simulation(spec.name, asks, plan, fleet_spec, load, setting, slo, workload.seed)


def typical(asks: Sequence[PromptSpec], plan: LoadPlan) -> Typical:
    """Of requests that are sent so."""
    input_len = max(1, round(sum(ask.input_len for ask in asks) / len(asks)))
    output_len = max(1, round(sum(ask.output_len for ask in asks) / len(asks)))
    seconds = max(plan.times, default=0.0) if plan.times is not None else 0.0
    if seconds:
        return Typical(input_len, output_len, len(asks) / seconds, plan.max_concurrency)
    at_once = min(len(asks), plan.max_concurrency or len(asks))
    return Typical(input_len, output_len, None, at_once)


# -- what serves ----------------------------------------------------------------------------------


def _fleet(
    spec: ModelSpec,
    settings: FleetSettings,
    engine: Mapping[str, Any],
    measured: MeasuredSteps | None,
) -> tuple[FleetSpec, dict[str, Any]]:
    device, count = find_device(settings.hardware)
    parallel, replicas = _layout(settings, count)
    known = profile(settings.profile)
    precision = precision_of(
        spec, settings.quantization, known.kv_dtype(settings.kv_cache_dtype), settings.dtype
    )
    held = memory(spec, precision, parallel, device, known, limits_of(engine))
    config = _engine_config(spec, precision, held, device, known, engine)
    eager = bool(engine.get("enforce_eager"))
    ranks = rank_model(spec, precision, parallel)
    if measured is None:
        cost: Cost = StepModel.of(ranks, device, known.name, eager=eager).seconds
    else:
        cost = costs(calibrated(ranks, device, measured), config.cache.block_size).value
    fleet = FleetSpec(
        # The stages of a pipeline work on a batch each.
        ReplicaSpec(config, cost, depth=parallel.pp),
        replicas * parallel.dp,
        settings.router,
        settings.outages,
        _disaggregation(settings, kv_bytes_per_token(spec, precision)),
    )
    told = {
        "hardware": device.name,
        "devices": parallel.num_devices * replicas,
        "profile": known.name,
        "step_times": "roofline" if measured is None else "measured",
        "precision": precision.name,
        **{name: getattr(parallel, name) for name in ("tp", "pp", "ep", "dp")},
        "layout": parallel.text(replicas),
        "router": settings.router,
    }
    return fleet, told | _limits_json(config)


def _limits_json(config: EngineConfig) -> dict[str, int]:
    limits = config.scheduler
    return {
        "kv_blocks": config.cache.num_blocks,
        "block_size": config.cache.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
    }


def _layout(settings: FleetSettings, count: int) -> tuple[Parallel, int]:
    """The layout of one replica on its share of the devices, and how many there are; where nobody
    says how many devices, there are as many as are needed."""
    copies = settings.pp * settings.dp
    if count == 1:
        tp, replicas = settings.tp or 1, settings.replicas or 1
    else:
        tp = settings.tp or _share(count, copies * (settings.replicas or 1), settings)
        replicas = settings.replicas or _share(count, copies * tp, settings)
        if count < tp * copies * replicas:
            raise ConfigError(
                f"{tp * copies * replicas} devices are needed, and --hardware has {count}"
            )
    return Parallel(tp, settings.pp, settings.ep, settings.dp), replicas


def _share(count: int, others: int, settings: FleetSettings) -> int:
    if count % others:
        said = ((getattr(settings, name), name) for name in ("replicas", "tp", "pp", "dp"))
        what = ", ".join(f"{name} = {number}" for number, name in said if number)
        raise ConfigError(
            f"{count} devices cannot be shared out by {what}: give others, or a multiple of "
            f"{others} devices"
        )
    return count // others


def limits_of(engine: Mapping[str, Any]) -> Limits:
    """Those of the settings of an engine that memory depends on."""
    kv_memory, length = engine.get("kv_cache_memory"), engine.get("max_model_len")
    return Limits(
        max_num_seqs=engine.get("max_num_seqs"),
        max_num_batched_tokens=engine.get("max_num_batched_tokens"),
        max_model_len=None if length == "auto" else length,  # the model's, if it fits
        block_size=engine.get("block_size"),
        utilization=engine.get("gpu_memory_utilization"),
        kv_cache_memory=None if kv_memory is None else parse_bytes(kv_memory),
    )


def _engine_config(
    spec: ModelSpec,
    precision: Precision,
    held: MemoryPlan,
    device: Device,
    known: EngineProfile,
    engine: Mapping[str, Any],
) -> EngineConfig:
    """What production makes of the same settings, on a device of that memory."""
    is_ours, on_cpu = known.name == "octavo", device.kind == "cpu"
    args = EngineArgs.from_kwargs(spec.name, **_engine_settings(spec, held, device, engine))
    if is_ours:
        args = args.serving()
    elif "max_queued_requests" not in engine:
        args = replace(args, max_queued_requests=None)
    capacity = Capacity(
        device="cpu" if on_cpu else "cuda",
        dtype=precision.name,
        model_max_len=held.limits.max_model_len,
        kv_bytes_per_token=int(held.kv_bytes_per_token),
        kv_memory_bytes=max(0, held.kv_bytes),
        kv_dtype=precision.kv.name,
        max_rounds=MAX_ROUNDS if is_ours and on_cpu else 1,
    )
    return resolve(args, capacity)


def _engine_settings(
    spec: ModelSpec, held: MemoryPlan, device: Device, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """What was asked for, and what follows from the memory that there is."""
    num_blocks = engine.get("num_blocks") or held.num_blocks
    if num_blocks < 1:
        raise ConfigError(
            f"{spec.name} does not fit {device.name}: of {held.usable_bytes / 1e9:.1f} GB that may "
            f"be used, its weights take {held.weights_bytes / 1e9:.1f} GB, and nothing is left for "
            "keys and values: choose more devices (--tp), larger ones, or a --quantization"
        )
    settings = {name: value for name, value in engine.items() if name != "kv_cache_memory"}
    settings |= {"num_blocks": num_blocks, "block_size": held.block_size}
    settings["max_num_seqs"] = held.limits.max_num_seqs
    if settings.get("enable_chunked_prefill", True):
        settings["max_num_batched_tokens"] = held.limits.max_num_batched_tokens
    return settings


def _disaggregation(settings: FleetSettings, kv_bytes: float) -> Disaggregation | None:
    if not settings.prefill_replicas:
        return None
    seconds_per_token = kv_bytes / ((settings.transfer_gb_s or TRANSFER_GB_S) * 1e9)
    return Disaggregation(settings.prefill_replicas, lambda tokens: tokens * seconds_per_token)


# -- who asks -------------------------------------------------------------------------------------


def _asks(workload: Workload, clients: ClientSettings, tokenizer: PromptMaker) -> list[PromptSpec]:
    kind = _TRACES.get(workload.dataset_name)
    if clients.trace is not None:
        asks = _asks_of_file(clients.trace, "auto", workload)
    elif kind is None:
        asks = asks_of_requests(create_requests(workload, tokenizer))
    elif workload.dataset_path is None:
        raise ConfigError(f"the data set {workload.dataset_name!r} needs a --dataset-path")
    else:
        asks = _asks_of_file(workload.dataset_path, kind, workload)
    if clients.turns > 1:
        asks = as_conversations(asks, clients.turns, clients.think_time)
    if clients.patience is not None:
        asks = [replace(ask, patience_s=clients.patience) for ask in asks]
    return asks


def _asks_of_file(path: str, kind: str, workload: Workload) -> list[PromptSpec]:
    entries = read_trace(path, kind, limit=workload.num_prompts)
    if workload.output_len is not None:
        entries = [replace(entry, output_len=workload.output_len) for entry in entries]
    return asks_of_trace(entries, speedup=workload.speedup, max_input_len=workload.max_input_len)


class _Vocabulary:
    """Of a model that is not here: it has so many tokens, and nobody knows which."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def is_special(self, token_id: int) -> bool:
        return False

    def encode(self, text: str) -> Sequence[int]:
        raise ConfigError(
            "only the model's tokenizer can count the tokens of a text: give a MODEL that is here, "
            "or a data set of token ids, or a trace"
        )
