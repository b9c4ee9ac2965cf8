"""``octavo place-experts``: which ranks of an engine have which experts of a model."""

from __future__ import annotations

import argparse

from octavo.cli import UsageError, terminal
from octavo.cli.flags import add_json_flag, add_number

EXAMPLES = """\
LOADS is what --save-expert-loads of an engine has counted. Experts are shared out so that all ranks
have as much to do; with more --slots than it takes, the busiest experts are on several ranks, which
share their tokens. An engine takes the result by --expert-placement; answers stay the same.

examples:
  octavo place-experts loads.json placement.json --ranks 2
  octavo place-experts loads.json placement.json --ranks 8 --slots 18 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("loads", metavar="LOADS", help="tokens by layer and expert, as counted")
    parser.add_argument("placement", metavar="OUT", help="the file to write or replace")
    add_number(parser, "--ranks", "ranks that share the experts: --tensor-parallel-size")
    add_number(
        parser, "--slots", "experts of a layer that a rank has at most (default: the fewest)"
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.cost.expert_placement import imbalance, place_experts
    from octavo.kernels.expert_places import ExpertPlaces, deal_out
    from octavo.serving.expert_files import read_loads, write_placement

    if args.ranks is None:
        raise UsageError("say how many ranks share the experts: --ranks N")
    counted = read_loads(args.loads)
    loads, num_experts = counted.loads, len(counted.loads[0])
    placed = place_experts(loads, args.ranks, args.slots)
    in_order = ExpertPlaces((deal_out(num_experts, args.ranks),) * len(loads))
    before, after = (imbalance(loads, each, args.ranks) for each in (in_order, placed))
    copies = sum(len(ranks) - 1 for layer in placed.layers for ranks in layer)
    write_placement(args.placement, counted, placed, args.ranks)
    if args.json:
        terminal.print_json(
            {
                "output": args.placement,
                "model": counted.model,
                "num_ranks": args.ranks,
                "num_layers": len(loads),
                "num_experts": num_experts,
                "num_copies": copies,
                "imbalance_in_order": before,
                "imbalance": after,
            }
        )
        return 0
    print(
        f"{args.placement}: {num_experts} experts in {len(loads)} layers on {args.ranks} ranks, "
        f"with {copies} copies; the busiest rank has {after:.3f} times the mean to do, and "
        f"{before:.3f} times where experts are in order"
    )
    return 0
