"""Times of one model with its layers on one rank, cut among ranks, and with whole experts on ranks.

    python benchmarks/rank_layouts.py MODEL [--layouts one,cut,whole] [--ranks 2] [--threads N]
        [--rounds 4] [--output-len 24] [--batch-size 8] [--input-len 256]

All engines are loaded at once, have the same threads in all, and run in turns, whose order changes;
those that wait sleep. In each turn an engine answers one prompt (``token``: the time of a token of
one stream; ``prompt``: the first token of a longer one), and several at once (``batch``). Answers
have to be the same, to the token. Of each layout, the median of its times, and of their ratios to
those of the first layout in the same round, with the least and the most.

    python benchmarks/make_random.py qwen3-moe.gguf --shape qwen3-30b-6l
    python benchmarks/rank_layouts.py qwen3-moe.gguf
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from octavo.bench.offline.session import OfflineSession, RunTiming, latencies
from octavo.settings.engine import EngineArgs
from octavo.workload.datasets import random_requests

LAYOUTS = ("one", "cut", "whole")
LEAD = 16  # tokens of a prompt whose answer is timed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(LAYOUTS))
    parser.add_argument("--placement", help="of whole experts: a file of `octavo place-experts`")
    for name, default in (
        *(("ranks", 2), ("threads", None), ("rounds", 4), ("seed", 0)),
        *(("output-len", 24), ("batch-size", 8), ("input-len", 256)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)
    if unknown := set(args.layouts) - {*LAYOUTS}:
        parser.error(f"no layout {min(unknown)!r}: there are {', '.join(LAYOUTS)}")
    with ExitStack() as stack:
        sessions = {
            layout: stack.enter_context(OfflineSession(engine_args(layout, args)))
            for layout in args.layouts
        }
        rounds = [one_round(sessions, args, number) for number in range(args.rounds + 1)]
        report(rounds[1:])  # the first one warms up
        for layout, session in sessions.items():
            figures = session.probe.expert_figures()
            if rows := figures.get("expert_rank_tokens"):
                busiest = sum(figures["expert_busiest_rank_tokens"])
                ratio = len(rows) * busiest / sum(rows)
                print(f"{layout}: in steps, the busiest rank had {ratio:.2f} times the mean rows")


def engine_args(layout: str, args: argparse.Namespace) -> EngineArgs:
    is_cut = layout != "one"
    return EngineArgs(
        args.model,
        threads=args.threads,
        tensor_parallel_size=args.ranks if is_cut else 1,
        enable_expert_parallel=layout == "whole",
        expert_placement=args.placement if layout == "whole" else None,
        max_model_len=max(args.input_len, LEAD) + args.output_len + 16,
        max_num_seqs=args.batch_size,
        kv_cache_memory="256MiB",
        enable_prefix_caching=False,
    )


Times = dict[str, dict[str, float]]  # seconds by the layout, and by what was done


def one_round(sessions: dict[str, OfflineSession], args: argparse.Namespace, number: int) -> Times:
    """Let each engine do everything once. The first of a round is the last of the next."""
    names = list(sessions)
    order = names if number % 2 else names[::-1]
    times: Times = {name: {} for name in names}
    workloads: dict[str, tuple[int, int, int, Callable[[RunTiming], float]]] = {
        "token": (1, LEAD, args.output_len, lambda run: latencies(run.requests)["tpot"][0]),
        "prompt": (1, args.input_len, 1, lambda run: latencies(run.requests)["ttft"][0]),
        "batch": (args.batch_size, LEAD, args.output_len, lambda run: run.elapsed_s),
    }
    for what, (count, input_len, output_len, seconds_of) in workloads.items():
        answers = {}
        for name in order:
            session = sessions[name]
            requests = random_requests(
                count, session.vocab_size, input_len, output_len, seed=args.seed + number
            )
            run = session.run(requests)
            times[name][what], answers[name] = seconds_of(run), run.output_token_ids
        if any(answer != answers[names[0]] for answer in answers.values()):
            raise SystemExit(f"{what}: the layouts answer differently: {answers}")
    return times


def report(rounds: Sequence[Times]) -> None:
    first, *_ = rounds[0]
    print(f"{len(rounds)} rounds in turns, medians; ratios to {first!r}: median (least to most)")
    for what in rounds[0][first]:
        for layout in rounds[0]:
            seconds = [times[layout][what] for times in rounds]
            ratios = [times[layout][what] / times[first][what] for times in rounds]
            print(
                f"{what:8}{layout:8}{statistics.median(seconds) * 1e3:10.2f} ms   "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
