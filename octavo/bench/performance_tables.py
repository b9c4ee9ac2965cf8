"""Results as tables in Markdown, written between two markers of a document:

<!-- how-fast:begin -->
…
<!-- how-fast:end -->
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.bench.noise import OTHERS_BUSY
from octavo.bench.peers.report import SpeedRatio
from octavo.bench.peers.workers.workloads import FIGURES, WORKLOADS
from octavo.measure.results import write_bytes

ResultDocument = Mapping[str, Any]


# -- a place in a file ---------------------------------------------------------------------------


def rewrite(text: str, name: str, content: str) -> str:
    """Return ``text`` with the content between the markers of ``name`` replaced; all else stays.

    Raises:
        BenchmarkError: a marker is missing, is there twice, or they are in the wrong order.
    """
    begin, end = markers(name)
    for marker in (begin, end):
        count = text.count(marker)
        if count != 1:
            found = "is missing" if count == 0 else f"is there {count} times"
            raise BenchmarkError(f"the marker {marker} {found}; it must be there once")
    before, _, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_end:
        raise BenchmarkError(f"the marker {end} stands before {begin}")
    return f"{before}{begin}\n{content.strip()}\n{end}{after}"


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def rewrite_file(path: Path, sections: Mapping[str, str]) -> None:
    """Rewrite each section, by its name; the file is replaced as a whole or not at all.

    Raises:
        BenchmarkError: a marker is missing or repeated, or the file cannot be read or written.
    """
    text = read_document(path)
    try:
        for name, content in sections.items():
            text = rewrite(text, name, content)
    except BenchmarkError as error:
        raise BenchmarkError(f"{path}: {error}") from error
    write_bytes(path.resolve(), text.encode())


def read_document(path: Path) -> str:
    """Return the text of a file, with the ends of lines that it has. BenchmarkError if there is
    none."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path} cannot be read: {error}") from error


# -- how fast octavo is --------------------------------------------------------------------------


def how_fast(document: ResultDocument) -> str:
    """Describe the standard set (see ``standard.py``): machine, figures, and warnings."""
    done: Mapping[str, ResultDocument] = document["measurements"]
    rows: list[Sequence[str]] = []
    for name, describe in _ROWS.items():
        if name in done:
            rows += describe(done[name])
    lines = [
        f"`{document['model']}` on {_machine(document)}, by `scripts/bench` on "
        f"{document['date'][:10]} with {_versions(document['versions'])}:",
        "",
        *markdown(("figure", "median", "range", "of the roofline"), rows),
    ]
    if document["warnings"]:
        lines += ["", _doubts(document)]
    return "\n".join(lines)


def _doubts(document: ResultDocument) -> str:
    """One line on the noise of the machine; the stored document has every warning."""
    noise = [each["run"]["noise"] for each in document["measurements"].values()]
    probes = [each[when] for each in noise for when in ("before", "after") if each[when]]
    others = [use for each in noise if (use := each["other_processors"] or 0.0) >= OTHERS_BUSY]
    figures = (("memory reads at", "read_gbytes_per_s", "GB/s"), ("GEMM", "gemm_gflops", "GFLOP/s"))
    said = []
    for what, name, unit in figures if probes else ():
        rates = [probe[name] for probe in probes]
        said.append(f"{what} {min(rates):.0f} to {max(rates):.0f} {unit}")
    if others:
        said.append(f"up to {max(others):.1f} processors in use by others")
    return f"The machine was not quiet ({_count(document['warnings'])}): {', '.join(said)}."


def _count(warnings: Sequence[str]) -> str:
    return f"{len(warnings)} warning{'' if len(warnings) == 1 else 's'}"


def _startup(result: ResultDocument) -> Iterable[Sequence[str]]:
    for kind in ("warm", "cold"):
        first_token = _spread(result[kind]["first_token_s"], "s", 2)
        yield (f"process start to first token, {kind}", *first_token, "")


def _latency(result: ResultDocument) -> Iterable[Sequence[str]]:
    requests = "one request" if result["batch_size"] == 1 else f"{result['batch_size']} requests"
    tokens = f"{result['input_len']} tokens"
    roofline = result["roofline"]
    if result["batch_size"] == 1:
        yield (f"TTFT, {tokens}", *_spread(result["ttft_ms"], "ms"), "")
        prefill = _spread(result["prefill_tps"], "tokens/s")
        yield (f"prefill, {tokens}", *prefill, _achieved(roofline["prefill"]))
    decode = _spread(result["decode_tps"], "tokens/s")
    yield (f"decode, {requests}", *decode, _achieved(roofline["decode"]))
    overhead = _spread(result["step_overhead_us"], "µs")
    yield (f"Python outside the kernels, for a token of {requests}", *overhead, "")


def _throughput(result: ResultDocument) -> Iterable[Sequence[str]]:
    settings = result["run"]["settings"]
    lengths = f"{settings['input_len']} in, {settings['output_len']} out"
    work = f"{settings['num_prompts']} × ({lengths}) at once, output"
    output = _spread(result["spread"]["output_tps"], "tokens/s")
    yield (work, *output, "")
    yield ("peak memory meanwhile", f"{result['peak_rss_bytes'] / 2**20:,.0f} MiB", "", "")


def _prefix(result: ResultDocument) -> Iterable[Sequence[str]]:
    about = f"TTFT, a question about {result['prefix_len']:,} tokens"
    yield (f"{about}, the first", *_spread(result["cold_ttft_ms"], "ms"), "")
    yield (f"{about}, further ones", *_spread(result["warm_ttft_ms"], "ms"), "")


def _serve(result: ResultDocument) -> Iterable[Sequence[str]]:
    streams = f"{result['max_concurrency']} streams over HTTP"
    yield (f"{streams}, output", f"{result['output_throughput']:,.0f} tokens/s", "", "")
    for name, title in (("ttft", "TTFT"), ("itl", "time between tokens")):
        median, p99 = result[f"median_{name}_ms"], result[f"p99_{name}_ms"]
        yield (f"{streams}, {title}", f"{_number(median)} ms", f"P99 {_number(p99)}", "")


_ROWS = {
    "startup": _startup,
    "latency": _latency,
    "latency-8": _latency,
    "throughput": _throughput,
    "prefix": _prefix,
    "serve": _serve,
}


def _achieved(utilisation: ResultDocument | None) -> str:
    if utilisation is None:
        return ""
    return f"{utilisation['achieved']:.0%} ({utilisation['bound']})"


def _machine(document: ResultDocument) -> str:
    """Describe the machine: ``2 threads of an AMD EPYC (2 cores, avx512bf16 kernels)``."""
    cpu, engine = document["machine"]["cpu"], document["engine"]
    threads = "1 thread" if document["threads"] == 1 else f"{document['threads']} threads"
    kernels = " ".join(filter(None, (engine["isa"], engine["kernels"], "kernels")))
    cores = cpu["physical_cores"] or cpu["logical_cores"]
    return f"{threads} of “{cpu['model']}” ({cores} cores, {kernels})"


def _versions(versions: Mapping[str, str | None]) -> str:
    named = {"octavo": "octavo", "torch": "PyTorch", "python": "Python"}
    return ", ".join(f"{title} {versions[name]}" for name, title in named.items() if versions[name])


# -- how fast others are -------------------------------------------------------------------------


def peers(document: ResultDocument) -> str:
    """Describe a comparison: medians of every engine, and the ratio of octavo to the best other."""
    engines: Mapping[str, ResultDocument] = document["engines"]
    by_workload: dict[str, dict[str, ResultDocument]] = {}
    for row in document["summary"]:
        if row["figure"] == FIGURES[WORKLOADS[row["workload"]].kind][0].name:
            by_workload.setdefault(row["workload"], {})[row["contender"]] = row
    names = [name for name in engines if any(name in found for found in by_workload.values())]
    head = [f"{name.partition(':')[0]}, {_weights(engines[name])}" for name in names]
    rows = [
        (
            _title(workload),
            *(_number(found[name]["median"] if name in found else None) for name in names),
            _lead(workload, found),
        )
        for workload, found in by_workload.items()
    ]
    run = document["run"]
    rounds = run["settings"]["rounds"]
    lines = [
        f"Beside others on the same machine, in turns, by `octavo bench compare` on "
        f"{run['date'][:10]} (medians of {rounds} rounds, {_software(engines)}):",
        "",
        *markdown(("work", *head, "octavo to the best other"), rows),
    ]
    bandwidths = _bandwidths(document)
    if bandwidths:
        low, high = min(bandwidths), max(bandwidths)
        lines += [
            "",
            f"Memory bandwidth was {low:.0f} to {high:.0f} GB/s meanwhile, with "
            f"{_count(run['warnings'])} of noise: look at ratios.",
        ]
    return "\n".join(lines)


def _title(workload: str) -> str:
    figure = FIGURES[WORKLOADS[workload].kind][0]
    unit = "s" if figure.name == "start_s" else "tokens/s"
    if figure.name == "output_tps":
        unit = "output tokens/s"
    return f"{WORKLOADS[workload].title}, {unit}"


def _lead(workload: str, rows: Mapping[str, ResultDocument]) -> str:
    """Ratio of octavo, with weights as in the file where it ran those, to the best other: by the
    medians, and the range over the rounds."""
    ours = [name for name in rows if name.startswith("octavo:")]
    others = {name: row["median"] for name, row in rows.items() if name not in ours}
    if not ours or not others:
        return ""
    is_better = max if FIGURES[WORKLOADS[workload].kind][0].higher_is_better else min
    best = is_better(others, key=lambda name: others[name])
    our = "octavo:file" if "octavo:file" in ours else ours[0]
    return str(SpeedRatio(**rows[best]["ratios"][our]))


def _weights(about: ResultDocument) -> str:
    weights: str = about["weights"]
    return weights.upper() if weights.startswith(("q", "iq")) else weights


def _software(engines: Mapping[str, ResultDocument]) -> str:
    found: dict[str, str] = {}
    for name, about in engines.items():
        version = about.get("version") or about.get("build_commit")
        if version:
            found.setdefault(name.partition(":")[0], version)
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _bandwidths(document: ResultDocument) -> list[float]:
    turns = document["run"]["samples"].get("turns", ())
    measured = (turn[name] for turn in turns for name in ("bandwidth_before", "bandwidth_after"))
    return [value for value in measured if value is not None]


# -- how far predictions are off ------------------------------------------------------------------


def predicted(document: ResultDocument) -> str:
    """Describe a validation: errors of simulations, by figure, and how often intervals held."""
    run, about = document["run"], document["calibration"]["about"]
    rows = [
        (
            _PREDICTED[metric],
            f"{each['mean_abs_error']:.1%}",
            f"{each['max_abs_error']:.1%}",
            f"{each['inside_interval']:.0%}",
            f"{each['mean_abs_error_as_calibrated']:.1%}",
        )
        for metric, each in document["summary"].items()
    ]
    runs = len({(row["trace"], row["repeat"]) for row in document["rows"]})
    lines = [
        f"`{about['model']}` on {_machine(run)}, by `octavo validate` on {run['date'][:10]}, "
        f"{runs} runs of {len({row['trace'] for row in document['rows']})} traces:",
        "",
        *markdown(
            (
                "figure",
                "mean error",
                "largest",
                "in its interval",
                "mean error, as calibrated",
            ),
            rows,
        ),
    ]
    if run["warnings"]:
        lines += ["", f"The machine was not quiet: {_count(run['warnings'])}."]
    return "\n".join(lines)


_PREDICTED = {
    "output_throughput": "output tokens a second",
    "mean_tpot_ms": "mean time per output token",
    "mean_ttft_ms": "mean time to first token",
    "p99_ttft_ms": "P99 of the time to first token",
}


# -- Markdown ------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; a column that is empty in all rows is left out."""
    kept = list(rows)
    columns = [i for i in range(len(head)) if i == 0 or any(row[i] for row in kept)]
    lines = [[head[i] for i in columns], ["---"] * len(columns)]
    lines += [[row[i] for i in columns] for row in kept]
    return [f"| {' | '.join(line)} |".replace("  ", " ") for line in lines]


def _spread(spread: Mapping[str, float] | None, unit: str, digits: int = 0) -> tuple[str, str]:
    """Format the median with its unit, and the range."""
    if spread is None:
        return "", ""
    median, low, high = (_number(spread[name], digits) for name in ("median", "min", "max"))
    return f"{median} {unit}", f"{low} – {high}" if low != high else ""


def _number(value: float | None, digits: int = 0) -> str:
    """Format with as many digits as a noisy machine leaves: 1,773  41.2  0.23."""
    if value is None:
        return ""
    if digits:
        return f"{value:.{digits}f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
