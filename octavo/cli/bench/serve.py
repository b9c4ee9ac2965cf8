"""``octavo bench serve``: put load on a server, and see what it makes of it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from octavo.bench.serving.serve_config import (
    ReportSettings,
    ServeBenchConfig,
    ServedWorkload,
    ServerTarget,
)
from octavo.cli import UsageError, terminal
from octavo.cli.bench import common
from octavo.cli.engine_flags import (
    LORA_SETTINGS,
    add_engine_flags,
    add_flags,
    engine_kwargs,
    given_settings,
)
from octavo.cli.flags import add_json_flag, add_value, as_command_line
from octavo.cli.parser import rarely
from octavo.hub import DEFAULT_MODEL
from octavo.workload.settings import LoadSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.bench.serving.serve import ServeResult

EXAMPLES = """\
examples:
  octavo bench serve --num-prompts 64 --random-input-len 128 --random-output-len 64
  octavo bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --goodput ttft:500 tpot:50
  octavo bench serve --base-url http://127.0.0.1:8000 --max-concurrency 8 --duration 60
  octavo bench serve --base-url https://api.example.org --backend openai-chat \\
    --dataset-name sharegpt --dataset-path ShareGPT_V3.json --tokenizer smollm2-135m
  octavo bench serve --base-url http://127.0.0.1:8000 --dataset-name mooncake \\
    --dataset-path conversation_trace.jsonl --speedup 2 --request-log requests.jsonl

Without --request-rate, a ramp or a trace: all requests at once, or with --max-concurrency N a
closed loop of N clients. Lines and keys are named as `vllm bench serve` names them.
"""

# Flags that are in the short help.
_OFTEN = (
    *("base_url", "backend", "tokenizer", "dataset_name", "dataset_path", "num_prompts"),
    *("random_input_len", "random_output_len", "request_rate", "max_concurrency", "save_result"),
)
# Flags that take several values, or may be given several times.
_SEVERAL = {"goodput": "NAME:MS", "metadata": "KEY=VALUE"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model of the server to start, or with --base-url the model whose tokenizer is used "
        f"(default: {DEFAULT_MODEL}, or with --base-url what the server serves)",
    )
    add_json_flag(parser)
    add_value(parser, "--output FILE", "write the JSON object to a file, too")
    common.add_plot_flag(parser)
    add_flags(parser, "server", ServerTarget, often=_OFTEN)
    add_flags(parser, "workload", ServedWorkload, often=_OFTEN)
    add_flags(parser, "load", LoadSettings, often=_OFTEN)
    add_flags(parser, "report", ReportSettings, skip=_SEVERAL, often=_OFTEN)
    several = parser.add_argument_group("report, several values each")
    for each in fields(ReportSettings):
        if each.name in _SEVERAL:
            several.add_argument(
                f"--{each.name}",
                dest=f"{ReportSettings.__name__}_{each.name}",
                nargs="+",
                action="extend",
                default=argparse.SUPPRESS,
                metavar=_SEVERAL[each.name],
                help=each.metadata["help"],
            )
    rarely(parser, "--metadata", "--goodput", "--plot", "--output")
    add_engine_flags(parser, skip={"seed", *LORA_SETTINGS}, often=("threads",))


def run(args: argparse.Namespace) -> int:
    config = to_config(args)
    from octavo.bench.serving.serve import run_serve_bench

    if config.target.base_url is None:
        model = config.model or DEFAULT_MODEL
        terminal.resolve(model)
        terminal.say(f"starting octavo serve {model}")
    with terminal.request_progress() as progress:
        result = run_serve_bench(config, progress, terminal.say)
    return _tell(args, result)


def to_config(args: argparse.Namespace) -> ServeBenchConfig:
    """Raises UsageError for values that are wrong or contradict each other."""
    target = ServerTarget(**given_settings(args, ServerTarget))
    engine = engine_kwargs(args)
    if engine and target.base_url is not None:
        flag = "--" + next(iter(engine)).replace("_", "-")
        raise UsageError(
            f"{flag} is for a server that is started here: it goes not with --base-url"
        )
    return ServeBenchConfig(
        args.model,
        target,
        ServedWorkload(**given_settings(args, ServedWorkload)),
        LoadSettings(**given_settings(args, LoadSettings)),
        ReportSettings(**given_settings(args, ReportSettings)),
        tuple(as_command_line(engine)),
    )


def _tell(args: argparse.Namespace, result: ServeResult) -> int:
    """Result to stdout and files; 1 if no request was answered, 130 after Ctrl-C."""
    document = result.as_json()
    if args.json:
        terminal.print_json(document)
    else:
        print(result.as_text())
    if args.output:
        from octavo.measure.results import write_json

        write_json(args.output, document)
    for path in result.write_files():
        terminal.say(f"written to {path}")
    if result.report.metrics.completed:
        common.save_plots(args, lambda: _figure(result))
    for warning in result.run["warnings"]:
        terminal.say(f"warning: {warning}")
    if result.is_interrupted:
        return 130
    if result.report.metrics.completed == 0:
        terminal.say("octavo: error: no request was answered")
        return 1
    return 0


def _figure(result: ServeResult) -> Figure:
    """TTFT, TPOT and ITL, with the limits of the SLO."""
    from octavo.measure.metrics import latency_values
    from octavo.plots.distributions import latency_distributions

    values = latency_values(result.report.records)
    samples = {
        name: [seconds * 1e3 for seconds in values[name]] for name in ("ttft", "tpot", "itl")
    }
    return latency_distributions(
        {name.upper(): each for name, each in samples.items()},
        title=f"{result.summary.model_id}: {result.report.metrics.completed} requests",
        bounds_ms=result.report.limits_ms,
    )
