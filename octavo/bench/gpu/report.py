"""Tables of the figures of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.bench.gpu.run import CaseOutcome, GpuReport
from octavo.bench.peers.workers.workloads import FIGURES, PeerWorkload


def print_report(document: GpuReport, console: Console) -> None:
    device = document.device
    if document.is_dry_run:
        console.print("a dry run on the CPU: no figure means anything")
    peaks = ", ".join(
        f"{name} {ops / 1e12:,.1f}" for name, ops in device["ops_per_s"].items() if ops
    )
    console.print(
        f"{device['name']}: {device['bytes_per_s'] / 1e9:,.0f} GB/s in copies; products in 10^12 "
        f"operations/s: {peaks}",
        highlight=False,
    )
    console.print(_rates(document))
    if any(outcome.agreement for outcome in document.outcomes):
        console.print(_agreements(document))
    if any(outcome.failed for outcome in document.outcomes):
        console.print(_failures(document))
    for outcome in document.outcomes:
        kernels = outcome.about.get("engine", {}).get("kernels", "fused")
        if kernels != "fused":
            console.print(
                f"{outcome.case.name}: run by {kernels} kernels, since the fused ones refused"
            )
        for what, reason in outcome.left_out.items():
            console.print(f"left out: {outcome.case.name}, {what}: {reason}", markup=False)


def _rates(document: GpuReport) -> Table:
    """Tokens per second by case and workload."""
    workloads = _workloads(document)
    titles = (workload.title for workload in workloads)
    table = _table("tokens/s", "start, s", *titles, "of the bandwidth", "of the peak")
    for outcome in document.outcomes:
        if outcome.figures:
            table.add_row(
                outcome.case.name,
                "" if outcome.start_s is None else f"{outcome.start_s:.1f}",
                *(_rate(outcome, workload) for workload in workloads),
                _greatest(outcome, "bandwidth_share"),
                _greatest(outcome, "peak_share"),
            )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None)
    for title in others:
        table.add_column(title, justify="right")
    return table


def _workloads(document: GpuReport) -> list[PeerWorkload]:
    found = {
        workload.name: workload
        for outcome in document.outcomes
        for workload in outcome.case.workloads
        if workload.name in outcome.figures
    }
    return list(found.values())


def _rate(outcome: CaseOutcome, workload: PeerWorkload) -> str:
    """Rate of a workload; of batches the decode rate: prompts have columns of their own."""
    names = [figure.name for figure in FIGURES[workload.kind]]
    name = "decode_tps" if "decode_tps" in names else names[0]
    value = outcome.figures.get(workload.name, {}).get(name)
    return "" if value is None else f"{value:,.0f}"


def _greatest(outcome: CaseOutcome, name: str) -> str:
    found = [value for each in outcome.figures.values() if (value := each.get(name)) is not None]
    return f"{max(found):.0%}" if found else ""


def _agreements(document: GpuReport) -> Table:
    titles = ("kernels", "first tokens alike", "log-probabilities apart by")
    table = _table("against reference ops", *titles)
    for outcome in document.outcomes:
        if (found := outcome.agreement) is not None:
            apart = found["largest_difference"]
            table.add_row(
                outcome.case.name,
                found["kernels"],
                f"{found['same_first_token']} of {found['prompts']}",
                "unknown" if apart is None else f"{apart:.2g}",
            )
    return table


def _failures(document: GpuReport) -> Table:
    """Failed cases with the last line of each reason; the document has all of it."""
    table = Table("failed", "by", box=None)
    for outcome in document.outcomes:
        if outcome.failed is not None:
            table.add_row(outcome.case.name, Text(outcome.failed.rstrip().rpartition("\n")[2]))
    return table
