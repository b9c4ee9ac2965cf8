"""``octavo doctor``: what this machine has, what will be used and why, what is missing; the same of
a model's files."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from octavo.base.optional_deps import ADD_GPU
from octavo.cli import terminal
from octavo.cli.flags import add_json_flag

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.doctor import DoctorReport
    from octavo.models.checkpoint_check import ModelReport

EXAMPLES = """\
examples:
  octavo doctor
  octavo doctor --json | jq .kernels
  octavo doctor ./my-model      # what is missing in it, left over, or not supported
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="look over this model's files in place of the machine: no weight is read",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    return _run_on_machine(args) if args.model is None else _run_on_model(args)


def _run_on_model(args: argparse.Namespace) -> int:
    """1 where loading would fail."""
    from octavo.models.checkpoint_check import inspect_model

    report = inspect_model(terminal.resolve(args.model))
    if args.json:
        terminal.print_json({**dataclasses.asdict(report), "summary": model_in_one_line(report)})
    else:
        print_model_report(report, terminal.console())
    return 1 if report.problems else 0


def print_model_report(report: ModelReport, console: Console) -> None:
    rows = [
        ("model", report.path),
        ("architecture", report.architecture or "unknown"),
        ("tensors", f"{report.num_tensors:,}, {terminal.format_bytes(report.num_bytes)}"),
        ("quantization", report.quantization or "none"),
    ]
    for name, value in rows:
        console.print(f"  {name:<14} {value}", markup=False)
    console.print("[bold]Problems[/bold]")
    if not report.problems:
        console.print("  none")
    for problem in report.problems:
        where = f"{problem.name}: " if problem.name else ""
        console.print(f"  - {problem.kind}: {where}{problem.reason}", markup=False)
    if report.notes:
        console.print("[bold]Notes[/bold]")
    for note in report.notes:
        console.print(f"  - {note}", markup=False)
    console.print(model_in_one_line(report), style="bold", markup=False)


def model_in_one_line(report: ModelReport) -> str:
    if not report.problems:
        return "ready: nothing in the model's files is missing, left over, or not supported"
    first = report.problems[0]
    where = f"{first.name}: " if first.name else ""
    count = len(report.problems)
    problems = "one problem" if count == 1 else f"{count:,} problems"
    return f"not ready: {problems}, first: {where}{first.reason}"


def _run_on_machine(args: argparse.Namespace) -> int:
    with terminal.spinner("looking at this machine"):
        from octavo.doctor import examine, in_one_line

        report = examine()
    if args.json:
        terminal.print_json({**dataclasses.asdict(report), "summary": in_one_line(report)})
    else:
        console = terminal.console()
        print_report(report, console)
        console.print(in_one_line(report), style="bold", markup=False)
    return 0


def print_report(report: DoctorReport, console: Console) -> None:
    for title, rows in (
        ("Software", _software(report)),
        ("Machine", _machine(report)),
        ("Models", _models(report)),
        ("Kernels", _kernels(report)),
        ("GPUs", _gpus(report)),
    ):
        console.print(f"[bold]{title}[/bold]")
        for name, value in rows:
            console.print(f"  {name:<14} {value}", markup=False)
    if report.platform_lacks:
        console.print("[bold]What this platform lacks[/bold]")
    for lack in report.platform_lacks:
        console.print(f"  - {lack.missing}: {lack.consequence}", markup=False)
    console.print("[bold]Missing[/bold]")
    if not report.findings:
        console.print("  nothing")
    for finding in report.findings:
        console.print(f"  - {finding.problem}\n    {finding.remedy}", markup=False)


def _software(report: DoctorReport) -> list[tuple[str, str]]:
    return [
        ("octavo", report.octavo),
        ("Python", f"{report.python} ({report.python_path})"),
        ("system", report.platform),
        *((name, version or "not installed") for name, version in report.packages.items()),
    ]


def _machine(report: DoctorReport) -> list[tuple[str, str]]:
    cpu, memory = report.cpu, report.memory
    cores = f"{report.usable_cores} usable of {cpu.logical_cores}"
    if cpu.quota is not None:
        cores += f" (the control group allows {cpu.quota:g})"
    room = f"{terminal.format_bytes(memory.available)} available of "
    room += terminal.format_bytes(memory.total)
    if memory.limit is not None:
        room += f" (the control group allows {terminal.format_bytes(memory.limit)})"
    compiler = f"{report.compiler.path}: {report.compiler.version}" if report.compiler else "none"
    rows = [
        ("CPU", f"{cpu.model} ({cpu.architecture})"),
        ("ISA", " ".join(cpu.isa) or "nothing known beyond the baseline"),
        ("cores", cores),
        ("memory", room),
        *_numa(report),
        ("C++ compiler", compiler),
    ]
    for i, device in enumerate(report.cuda.devices):
        size = terminal.format_bytes(device.memory_bytes)
        rows.append((f"CUDA {i}", f"{device.name}, {size}, compute {device.capability}"))
    if not report.cuda.devices:
        rows.append(("CUDA", f"none: {report.cuda.reason}"))
    return rows


def _numa(report: DoctorReport) -> list[tuple[str, str]]:
    """A row for each node, where there are several."""
    if len(report.numa_nodes) < 2:
        return []
    return [
        (
            f"NUMA node {node.number}",
            f"{node.cpus_text}, {terminal.format_bytes(node.free_bytes)} free of "
            f"{terminal.format_bytes(node.total_bytes)}"
            + ("" if node.has_memory else ", which this process may not use"),
        )
        for node in report.numa_nodes
    ]


def _models(report: DoctorReport) -> list[tuple[str, str]]:
    storage = report.storage
    have = ", ".join(storage.models) or "none yet (octavo pull smollm2-135m)"
    return [
        ("folder", f"{storage.home}, {terminal.format_bytes(storage.free_bytes)} free"),
        ("fetched", f"{have}, {terminal.format_bytes(storage.models_bytes)}"),
    ]


def _kernels(report: DoctorReport) -> list[tuple[str, str]]:
    """Ops of one fate in one row: most share theirs."""
    fates: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[str]] = {}
    for choice in report.kernels:
        fates.setdefault((choice.device, choice.chosen, choice.refused), []).append(choice.op)
    native = report.native
    level = f"{native.chosen}, with {report.usable_cores} threads" if native.chosen else "none"
    rows = [("native level", f"{level} (built: {', '.join(native.built) or 'nothing'})")]
    for (device, chosen, refused), ops in fates.items():
        rows.append((f"{device} {chosen}", ", ".join(ops)))
        rows += [("", f"not {name}: {reason}") for name, reason in refused]
    return rows


def _gpus(report: DoctorReport) -> list[tuple[str, str]]:
    """List the software for GPUs, and how far the kernels were tested."""
    software = report.gpu
    rows = [
        ("driver", software.driver or "none, or it does not tell"),
        ("CUDA", software.cuda or "none in PyTorch"),
        ("Triton", software.triton or f"not installed: {ADD_GPU}"),
        ("NVML", software.nvml or "not installed: benchmarks report no energy of GPUs"),
    ]
    for other in software.alternatives:
        state = f"{other.version}, not used: {other.why_not}" if other.version else "not installed"
        rows.append((other.package, f"{other.name} ({other.ops}): {state}"))
    return rows + [("tested", f"{tested.what}: {tested.where}") for tested in software.tested]
