"""``octavo cluster``: the machines on which ``octavo serve --distributed ray`` places replicas."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from octavo.cli import Command
from octavo.cli.flags import add_json_flag, add_value, non_negative
from octavo.cluster import ray_cluster

EXAMPLES = """\
examples:
  octavo cluster start --address 10.0.0.1       # then copy ~/.ray/auth_token to the others
  octavo cluster join 10.0.0.1:6379 --address 10.0.0.2
  octavo cluster status
  octavo serve --distributed ray --data-parallel-size 2
  octavo cluster stop
"""

COMMANDS = {
    "start": Command("cluster", "configure_start", "start a Ray cluster, with this machine"),
    "join": Command("cluster", "configure_join", "add this machine to a cluster"),
    "status": Command("cluster", "configure_status", "list machines, and places that are held"),
    "stop": Command("cluster", "configure_stop", "end what start or join began on this machine"),
}


def configure_start(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    _add_address(parser)
    add_value(
        parser,
        "--port N",
        f"port of the cluster; 0 takes a free one (default: {ray_cluster.DEFAULT_PORT})",
        non_negative,
        default=ray_cluster.DEFAULT_PORT,
    )
    _add_resources(parser)
    parser.set_defaults(run=start)


def configure_join(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("cluster", metavar="HOST:PORT", help="as octavo cluster start has said it")
    _add_address(parser)
    _add_resources(parser)
    parser.set_defaults(run=join)


def configure_status(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_value(parser, "--ray-address HOST:PORT", "the cluster (default: the one begun here)")
    add_json_flag(parser)
    parser.set_defaults(run=status)


def configure_stop(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_json_flag(parser)
    parser.set_defaults(run=stop)


def start(args: argparse.Namespace) -> int:
    host = args.address or ray_cluster.LOOPBACK
    node = ray_cluster.start_head(host, args.port, args.num_cpus, args.num_gpus)
    return _began(node, args)


def join(args: argparse.Namespace) -> int:
    host = args.address or ray_cluster.address_towards(args.cluster)
    node = ray_cluster.join(args.cluster, host, args.num_cpus, args.num_gpus)
    return _began(node, args)


def status(args: argparse.Namespace) -> int:
    from octavo.cluster.ray_placement import cluster_state

    state = cluster_state(ray_cluster.address_of_cluster(args.ray_address))
    if args.json:
        _print(state)
        return 0
    token = "asks for a token" if state["asks_for_token"] else "is OPEN: it asks for no token"
    print(f"{state['address']} {token}")
    for each in state["machines"]:
        head = ", head" if each["is_head"] else ""
        print(
            f"  {each['address']} ({each['hostname']}{head}): {each['cpus']} CPUs, "
            f"{each['gpus']} GPUs"
        )
    print(f"free: {state['free']['num_cpus']} CPUs, {state['free']['num_gpus']} GPUs")
    for place in state["places"]:
        print(f"  {place['name']}: {place['state']}")
    return 0


def stop(args: argparse.Namespace) -> int:
    nodes = ray_cluster.stop()
    if args.json:
        _print({"stopped": [_as_json(node) for node in nodes]})
    else:
        for node in nodes:
            print(f"{node.host} has left the cluster at {node.address}")
        if not nodes:
            print("nothing runs here that octavo cluster has started", file=sys.stderr)
    return 0


def _began(node: ray_cluster.RayNode, args: argparse.Namespace) -> int:
    if args.json:
        _print(_as_json(node))
        return 0
    print(f"{node.host} is in the Ray cluster at {node.address}")
    if node.is_head:
        token = ray_cluster.token_file(makes_one=False)
        print(f"on other machines, with {token} copied there: octavo cluster join {node.address}")
    return 0


def _print(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=2))


def _as_json(node: ray_cluster.RayNode) -> dict[str, Any]:
    return {
        "address": node.address,
        "host": node.host,
        "is_head": node.is_head,
        "pid": node.pid,
        "log": node.log,
    }


def _add_address(parser: argparse.ArgumentParser) -> None:
    add_value(
        parser,
        "--address HOST",
        "of this machine, as the others reach it (default: start stays on loopback, and join takes "
        "the address from which it reaches the head)",
    )


def _add_resources(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--num-cpus N", "CPUs to offer (default: all)", non_negative)
    add_value(parser, "--num-gpus N", "GPUs to offer (default: all)", non_negative)
    add_json_flag(parser)
