"""The flags of those commands that plan, and the question that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.cli import UsageError
from octavo.cli.calibrate import steps_here
from octavo.cli.engine_flags import add_engine_flags, add_model_argument, engine_kwargs
from octavo.cli.flags import add_number, add_value, from_flags, number_of_ranks
from octavo.cli.parser import completed_by, rarely

if TYPE_CHECKING:
    from octavo.planner.answer import Question
    from octavo.planner.deployment import CalibratedSteps
    from octavo.planner.money import Price

# Settings of the engine that plans depend on.
_LIMITS = {
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("gpu_memory_utilization", "kv_cache_memory"),
}
_USUAL_YEARS, _USUAL_ELECTRICITY = 3.0, 0.15


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    completed_by(_planned_models, add_model_argument(parser))
    hardware = add_value(
        parser,
        "--hardware NAME[:N]",
        "a device and how many of them; auto is this machine (default: %(default)s)",
        default="auto",
    )
    completed_by(device_names, hardware)
    add_value(parser, "--hardware-file FILE", "devices of your own, beside those of the table")
    _add_model_flags(parser)
    _add_traffic_flags(parser)
    _add_engine_flags(parser)
    _add_money_flags(parser)
    rarely(parser, "--hardware-file", "--pp", "--ep", "--dp", "--dp-attention")
    rarely(parser, "--dtype", "--kv-cache-dtype")
    rarely(parser, "--purchase", "--years", "--electricity", "--utilization")


def _planned_models() -> list[str]:
    from octavo.cost.catalogue import names

    return names()


def device_names() -> list[str]:
    """The devices that are known by name, and this machine."""
    from octavo.cost.find_device import AUTO
    from octavo.cost.hardware_table import devices

    return [AUTO, *(device.name.lower().replace(" ", "-") for device in devices())]


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout and precision")
    add_value(
        group,
        "--tp --tensor-parallel-size N",
        "devices that share each matrix; auto is one rank for each processor, or for each NUMA "
        "node of this machine (default: the best)",
        number_of_ranks,
    )
    add_number(group, "--pp", "groups of layers, one after the other (default: the best)")
    add_number(group, "--ep", "devices that share the experts (default: the best)")
    add_number(
        *(group, "--dp"),
        "copies of all but the experts, with requests of their own (default: the best)",
    )
    group.add_argument(
        "--dp-attention",
        action="store_true",
        help="each of the --tp processors attends for requests of its own, whose KV it alone has",
    )
    add_value(group, "--dtype T", "of weights that are not quantized")
    add_value(
        group,
        "--quantization Q",
        "of weights, such as fp8, int4, int4-g32, Q4_K_M (default: as the model is)",
    )
    add_value(group, "--kv-cache-dtype T", "of keys and values, such as fp8")


def _add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    add_value(group, "--isl --input-len N", "tokens of a prompt", int, default=512)
    add_value(group, "--osl --output-len N", "tokens of an answer", int, default=128)
    add_value(group, "--rate --request-rate R", "requests a second, at random", float)
    add_value(
        group,
        "--concurrency C",
        "requests that begin together; with --rate, the most that run at once (default: 1)",
        int,
    )
    add_value(
        group,
        "--slo LIMITS",
        "in milliseconds: ttft=500,tpot=50,e2e=10s@p99, or a preset such as "
        "mlperf:llama-2-70b-interactive",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = add_engine_flags(parser, only=_LIMITS, often=())
    add_value(
        group,
        "--profile NAME",
        "whose memory and overheads: octavo, llama.cpp, or vllm, also by version as vllm-0.19 "
        "(default: %(default)s)",
        default="octavo",
    )


def _add_money_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("money")
    add_value(group, "--price USD", "of a device and hour, in place of the table's", float)
    add_value(group, "--purchase USD", "of a device that is owned", float)
    add_value(group, "--years Y", f"in which it is paid for (default: {_USUAL_YEARS:g})", float)
    add_value(group, "--electricity USD", f"price of a kWh (default: {_USUAL_ELECTRICITY})", float)
    add_value(
        group,
        "--utilization U",
        "mean load over capacity, for costs (default: 0.6; with --rate, what follows from it)",
        float,
    )


def question_of(args: argparse.Namespace) -> Question:
    """Make a question of the flags. ConfigError or UsageError for values that cannot be."""
    from octavo.planner.answer import Question
    from octavo.planner.traffic import Traffic
    from octavo.sim.fleet_setup import limits_of

    return from_flags(
        Question,
        args,
        traffic=Traffic(args.isl, args.osl, args.rate, args.concurrency),
        engine=args.profile,
        limits=limits_of(engine_kwargs(args)),
        price=_price(args),
        measured=_measured(args),
    )


def _measured(args: argparse.Namespace) -> CalibratedSteps | None:
    """Steps of the model on this machine, where that is asked about."""
    from octavo.cost.find_device import AUTO, find_device
    from octavo.cost.open_spec import open_spec
    from octavo.planner.deployment import CalibratedSteps

    names = {name.partition(":")[0].strip().lower() for name in args.hardware.split(",")}
    steps = steps_here(args.model, args.kv_cache_dtype) if AUTO in names else None
    if steps is None:
        return None
    device, _ = find_device(AUTO)
    return CalibratedSteps.of(steps, open_spec(args.model), device.name, args.kv_cache_dtype)


def _price(args: argparse.Namespace) -> Price | None:
    """Return the price that the flags state, or None."""
    from octavo.cost.find_device import find_device
    from octavo.planner.money import owned, rented, watts_of

    if args.purchase is None:
        if args.years is not None or args.electricity is not None:
            raise UsageError("--years and --electricity say nothing without --purchase")
        return None if args.price is None else rented(args.price)
    if args.price is not None:
        raise UsageError("--price is of rented hardware, and --purchase of owned: leave one out")
    device, _ = find_device(args.hardware, args.hardware_file)
    watts = watts_of(device)
    if watts is None:
        raise UsageError(f"nothing is known of the power of {device.name}: say --price")
    years = _USUAL_YEARS if args.years is None else args.years
    electricity = _USUAL_ELECTRICITY if args.electricity is None else args.electricity
    return owned(args.purchase, years, watts, electricity)
