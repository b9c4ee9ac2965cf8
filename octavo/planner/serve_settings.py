"""Settings of a server that is as a plan has it, each with the reason for its value.

`octavo serve` takes them as they are, in a file or as flags. What it could not serve so is an error
here: nothing of a plan is left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError
from octavo.base.model_files import begins_as_gguf
from octavo.cost.file_weights import has_weights
from octavo.cost.find_device import AUTO
from octavo.cost.precision import precision_of
from octavo.cost.prediction import Prediction
from octavo.cost.shares import WHOLE
from octavo.planner.answer import Plan
from octavo.planner.deployment import Deployment
from octavo.runtime.layout import why_one_rank

_OWN_ENGINE = "octavo"
# Types of the KV cache, by what plans call them.
_KV_NAMES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "octavo-int8": "int8",
    "octavo-fp8": "fp8",
    "int4": "int4",
    "k8v4": "k8v4",
}


class Setting(NamedTuple):
    """A setting by its name in ``EngineArgs``; ``why`` is a sentence for people."""

    name: str
    value: Any
    why: str


def serve_settings(plan: Plan, num_prefill: int = 0) -> list[Setting]:
    """Return the settings of a server of the deployment that a plan recommends.

    Args:
        num_prefill: of the replicas, those that compute prompts for the others.

    Raises:
        ConfigError: the plan is not feasible, or octavo cannot serve it so; says what to do.
    """
    _check(plan)
    found = [
        Setting("model", _served_name(plan), "the model that was planned"),
        *_layout(plan.deployment),
        *_precision(plan),
        *_limits(plan),
    ]
    if num_prefill:
        why = "of the replicas, those that compute prompts: furthest from the limits in simulation"
        found.append(Setting("prefill_replicas", num_prefill, why))
    _check_server_takes(found)
    return found


def summary(plan: Plan) -> list[str]:
    """Return sentences that say what the settings are for, with the figures of the plan."""
    deployment, traffic, service = plan.deployment, plan.traffic, plan.service
    layout = deployment.parallel.text(deployment.replicas) or "one rank"
    asked = f"{traffic.input_len:,} tokens and answers of {traffic.output_len:,}"
    lines = [
        f"Settings for `octavo serve --config`, which `octavo plan` wrote: "
        f"{deployment.spec.name} in {deployment.precision.name} on {deployment.num_devices} x "
        f"{deployment.device.name} ({layout}).",
        f"Planned for prompts of {asked}, {_load(plan)}.",
    ]
    if service is not None:
        mean = service.latency()
        rate = service.requests_per_second * traffic.output_len
        lines.append(
            f"Predicted: first token after {_figure(mean.ttft * 1e3)} ms, "
            f"{_figure(mean.tpot * 1e3)} ms a token, {_figure(rate)} tokens/s in all."
        )
    return lines


def _load(plan: Plan) -> str:
    rate, concurrency = plan.traffic.rate, plan.traffic.concurrency
    if rate is None:
        return f"{concurrency or 1} at once"
    most = "" if concurrency is None else f", {concurrency} at once at the most"
    return f"{rate:g} a second{most}"


def _figure(of: Prediction) -> str:
    return f"{of.value:.3g} ({of.low:.3g} to {of.high:.3g})"


# -- what cannot be -------------------------------------------------------------------------------


def _check(plan: Plan) -> None:
    deployment = plan.deployment
    if not plan.is_feasible:
        raise ConfigError("the plan is not feasible, so that there is nothing to serve: see it")
    if deployment.profile.name != _OWN_ENGINE:
        raise ConfigError(
            f"settings are those of octavo's server, and the plan is of {deployment.profile.name}: "
            "leave out --profile"
        )
    if not deployment.profile.runs_on(deployment.device):
        raise ConfigError(f"octavo does not run on {deployment.device.name}")
    if deployment.spec.why_not_run is not None:
        raise ConfigError(deployment.spec.why_not_run)
    _check_is_one_machine(plan.question.hardware)
    if deployment.parallel.tp * deployment.parallel.pp > 1:
        kernels, device = _kernels_of(deployment)
        pp = deployment.parallel.pp
        if (why := why_one_rank(kernels, device, "linux", pp=pp)) is not None:
            raise ConfigError(f"{deployment.parallel.text()}: {why}: choose --tp 1 --pp 1")
    own = precision_of(deployment.spec, None, deployment.precision.kv.name)
    if deployment.precision.rule != own.rule:
        raise ConfigError(
            f"weights in {deployment.precision.name} have to be made before they are served: "
            "`octavo quantize` makes them; then plan of their folder, without --quantization and "
            "--dtype"
        )


def _kernels_of(deployment: Deployment) -> tuple[str, str]:
    """Return the kernels that will run, and the device."""
    if deployment.device.kind == "cpu":
        return "native", "cpu"
    mixers = (mixer for layer in deployment.spec.layers for mixer in layer.mixers)
    is_recurrent = any(mixer.state_values(WHOLE) for mixer in mixers)
    return "reference" if is_recurrent else "fused", "cuda"


def _check_is_one_machine(hardware: str) -> None:
    name, _, network = hardware.partition("@")
    name, _, count = name.partition(":")
    if name.strip().lower() != AUTO and not network:
        return  # so many devices of one machine
    if count.strip() not in ("", "1"):
        raise ConfigError(
            f"{hardware} is several machines, and a plan does not know how to reach the others: "
            "plan of auto, and name them by --stage-command, or start a server on each"
        )


def _check_server_takes(settings: list[Setting]) -> None:
    from octavo.settings.engine import EngineArgs  # it takes a while to import

    values = {each.name: each.value for each in settings}
    EngineArgs.from_kwargs(values.pop("model"), **values).check_server()


# -- the settings ---------------------------------------------------------------------------------


def _served_name(plan: Plan) -> str:
    from octavo.hub import CATALOG, store
    from octavo.hub.huggingface import HubId

    asked = plan.question.model
    if not isinstance(asked, str):
        raise ConfigError("a plan of a shape has no weights to serve: plan of a model by its name")
    path = Path(asked).expanduser()
    is_model = has_weights(path) if path.is_dir() else path.is_file() and begins_as_gguf(path)
    if is_model:
        return str(path.resolve())
    if path.exists():
        raise ConfigError(f"{asked} has no weights to serve: plan of a folder or file that has")
    if asked in CATALOG or store.find(asked) is not None or HubId.parse(asked) is not None:
        return asked
    from octavo.cost.catalogue import entries, find_name

    return str(entries()[find_name(asked)]["source"]).removeprefix("https://huggingface.co/")


def _layout(deployment: Deployment) -> Iterator[Setting]:
    parallel, replicas = deployment.parallel, deployment.replicas
    if parallel.ep not in (1, parallel.tp):
        raise ConfigError(
            f"{parallel.text(replicas)}: octavo's server shares experts among the ranks of a "
            "replica, all of them: choose --ep as many as --tp, or 1"
        )
    yield Setting(
        "tensor_parallel_size", parallel.tp, _why(parallel.tp, "ranks share each layer", "one rank")
    )
    if parallel.pp > 1:
        why = "stages have some of the layers each"
        yield Setting("pipeline_parallel_size", parallel.pp, f"{parallel.pp} {why}")
    copies = parallel.dp * replicas
    yield Setting(
        "data_parallel_size", copies, _why(copies, "replicas take requests", "one replica")
    )
    if parallel.ep > 1:
        why = f"each of the {parallel.ep} ranks has whole experts"
        yield Setting("enable_expert_parallel", True, why)
    if parallel.dp_attention:
        why = f"each of the {parallel.tp} ranks has requests of its own, with their KV"
        yield Setting("enable_dp_attention", True, why)


def _why(count: int, several: str, one: str) -> str:
    return f"{count} {several}" if count > 1 else f"{one} is enough"


def _precision(plan: Plan) -> Iterator[Setting]:
    deployment = plan.deployment
    if plan.question.hardware.partition(":")[0].strip().lower() != AUTO:
        device = "cpu" if deployment.device.kind == "cpu" else "cuda"
        yield Setting("device", device, f"planned for {deployment.device.name}")
    source = deployment.spec.source
    if source is not None:
        from octavo.models.checkpoint import open_checkpoint

        stored = open_checkpoint(source).quantization
        if stored is not None:
            why = "as the weights are stored; others than those are refused"
            yield Setting("quantization", stored, why)
    kv = deployment.precision.kv.name
    if kv not in _KV_NAMES:
        raise ConfigError(
            f"octavo has no KV cache of {kv}: choose --kv-cache-dtype among "
            f"{', '.join(_KV_NAMES.values())}"
        )
    per_token = deployment.memory.kv_bytes_per_token
    yield Setting(
        "kv_cache_dtype", _KV_NAMES[kv], f"a token takes {per_token:,.0f} bytes on each rank"
    )


def _limits(plan: Plan) -> Iterator[Setting]:
    deployment, asked, settled = plan.deployment, plan.question.limits, plan.deployment.settled
    length = plan.traffic.total_len
    fitting = deployment.memory.max_concurrency(length)
    yield Setting(
        "max_num_seqs",
        settled.max_num_seqs,
        f"of each replica; {fitting:,} requests of {length:,} tokens fit",
    )
    yield Setting(
        "max_num_batched_tokens",
        settled.max_num_batched_tokens,
        "tokens of a step, by which prompts are cut into pieces",
    )
    yield _longest(plan)
    if asked.block_size is not None:
        yield Setting("block_size", settled.block_size, "as it was asked for")
    if asked.utilization is not None:
        yield Setting("gpu_memory_utilization", settled.utilization, "as it was asked for")
    if asked.kv_cache_memory is not None:
        yield Setting("kv_cache_memory", settled.kv_cache_memory, "as it was asked for, in bytes")


def _longest(plan: Plan) -> Setting:
    memory, longest = plan.deployment.memory, plan.deployment.settled.max_model_len
    if memory.max_concurrency(longest) >= 1:
        asked = plan.question.limits.max_model_len is not None
        why = "as it was asked for" if asked else "all that the model has, which fits"
        return Setting("max_model_len", longest, why)
    fitting = f"{memory.longest_sequence:,}"
    why = f"{longest:,} tokens do not fit: the longest that do, which is about {fitting}"
    return Setting("max_model_len", "auto", why)
