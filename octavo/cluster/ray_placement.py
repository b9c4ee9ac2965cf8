"""`RayPlacement`: places on the machines of a Ray cluster. Nothing else of octavo imports ray.

A lease is a placement group, of one bundle on one machine. A host is an actor in it, which starts a
process of octavo's as its child and does nothing else. Groups and actors belong to the process that
has this object: when it ends, however that is, Ray removes them. What Ray could not remove, since
its own controller died with that process, is found by its name at the next start.

Ray sends objects by pickle, among processes that have shown the cluster's token. Octavo gives it
records of strings and numbers alone, and no answer to a request passes through it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

from octavo.base.errors import ConfigError, EngineError
from octavo.cluster.placement import Bundle, ProcessEnd, ProcessSpec, Waiting, count
from octavo.cluster.process_host import ProcessHost

NAMESPACE = "octavo"
AUTH_VARIABLE = "RAY_AUTH_MODE"
_QUIET_SECONDS = 10.0  # that a lease waits without a word
_ACTOR_SECONDS = 60.0  # for an actor to start, on a machine that has much else to do
_ANSWER_SECONDS = 15.0  # for an actor to answer


class RayPlacement:
    """Places on the machines of a Ray cluster; see `placement.Placement`.

    Args:
        address: HOST:PORT of its head.
        server: the name of the server, which no two that run at once have in common.
        allow_open: use a cluster that asks for no token, too.
        lease_timeout: seconds to wait for a place.

    Raises:
        ConfigError: the cluster cannot be reached, refuses the token, or asks for none.
    """

    def __init__(self, address: str, server: str, *, allow_open: bool, lease_timeout: float):
        self._ray = _connected(address, allow_open=allow_open)
        self._server = server
        self._lease_timeout = lease_timeout
        self._leases: list[RayLease] = []
        self.address: str = self._ray.util.get_node_ip_address()
        self.num_released = self._release_leftovers()
        self.num_gpus = int(self._ray.cluster_resources().get("GPU", 0))

    def cpus_for(self, num_processes: int) -> int:
        """Return the CPUs of each process: machines share the processes evenly."""
        sizes = [int(node["Resources"].get("CPU", 0)) for node in self._nodes()]
        sizes = sorted((size for size in sizes if size), reverse=True)[:num_processes]
        if not sizes:
            return 1
        return max(1, sizes[-1] // -(-num_processes // len(sizes)))

    def lease(self, name: str, bundle: Bundle, waiting: Waiting) -> RayLease:
        """Wait for a placement group. EngineError if it was not placed in time."""
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group(
            [_resources(bundle)], strategy="STRICT_PACK", name=f"{self._server}/{name}"
        )
        deadline = time.monotonic() + self._lease_timeout
        if not group.wait(min(_QUIET_SECONDS, self._lease_timeout)):
            waiting(f"{name} waits for a place in the Ray cluster: {self._shortage(bundle)}")
            while not group.wait(1.0):
                if time.monotonic() > deadline:
                    shortage = self._shortage(bundle)
                    remove_placement_group(group)
                    raise EngineError(
                        f"no place in the Ray cluster in {self._lease_timeout:g} s: {shortage}"
                    )
        lease = RayLease(self._ray, group, bundle, self._num_alike(group, bundle))
        self._leases.append(lease)
        return lease

    def close(self) -> None:
        for lease in self._leases:
            lease.release()
        self._ray.shutdown()

    def _num_alike(self, group: Any, bundle: Bundle) -> int:
        """Return how many such bundles the machine of a group has room for when nothing runs."""
        from ray.util.placement_group import placement_group_table

        node_id = placement_group_table(group)["bundles_to_node_id"][0]
        resources = next(
            (node["Resources"] for node in self._nodes() if node["NodeID"] == node_id), {"CPU": 0.0}
        )
        whole = _bundle_of(resources)
        if bundle.num_gpus:
            return max(1, whole.num_gpus // bundle.num_gpus)
        return max(1, whole.num_cpus // max(1, bundle.num_cpus))

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _shortage(self, bundle: Bundle) -> str:
        """Return in words what was asked, what there is, and what does not fit."""
        return shortage(
            bundle,
            [_bundle_of(node["Resources"]) for node in self._nodes()],
            _bundle_of(self._ray.available_resources()),
        )

    def _release_leftovers(self) -> int:
        """Remove placement groups of an earlier server of this name; return how many."""
        from ray.util.placement_group import (
            get_placement_group,
            placement_group_table,
            remove_placement_group,
        )

        names = [
            group["name"]
            for group in placement_group_table().values()
            if group["name"].startswith(f"{self._server}/") and group["state"] != "REMOVED"
        ]
        for name in names:
            try:
                remove_placement_group(get_placement_group(name))
            except ValueError:  # it has gone meanwhile
                continue
        return len(names)


class RayLease:
    """A placement group, and the actor in it."""

    def __init__(self, ray: Any, group: Any, bundle: Bundle, num_alike: int):
        self._ray, self._group, self._bundle = ray, group, bundle
        self.num_alike = num_alike
        self._actor: Any = None
        self._is_released = False

    def new_host(self) -> RayHost:
        from ray.exceptions import GetTimeoutError, RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._end_actor()
        actor_class = self._ray.remote(ProcessHost).options(
            num_cpus=self._bundle.num_cpus,
            num_gpus=self._bundle.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
        )
        self._actor = actor_class.remote()
        try:
            self._ray.get(self._actor.__ray_ready__.remote(), timeout=_ACTOR_SECONDS)
        except GetTimeoutError:
            raise EngineError(f"an actor did not start in {_ACTOR_SECONDS:g} s") from None
        except RayError as error:
            raise EngineError(f"an actor did not start: {_first_line(error)}") from None
        return RayHost(self._ray, self._actor)

    def release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if not self._is_released:
            self._is_released = True
            self._end_actor()
            remove_placement_group(self._group)

    def _end_actor(self) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None


class RayHost:
    """A `ProcessHost` in an actor."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor

    def start(self, spec: ProcessSpec) -> None:
        from ray.exceptions import RayError, RayTaskError

        try:
            self._ray.get(self._actor.start.remote(spec), timeout=_ANSWER_SECONDS)
        except RayTaskError as error:
            raise EngineError(str(error.cause)) from None
        except RayError as error:
            raise EngineError(f"the actor has ended: {_first_line(error)}") from None

    def kill(self, signum: int) -> None:
        self._actor.kill.remote(signum)

    def end_of_process(self, seconds: float) -> ProcessEnd | None:
        from ray.exceptions import GetTimeoutError, RayError

        try:
            end: ProcessEnd | None = self._ray.get(
                self._actor.end_of_process.remote(seconds), timeout=seconds + _ANSWER_SECONDS
            )
            return end
        except GetTimeoutError:
            return ProcessEnd("its machine does not answer")
        except RayError:
            return ProcessEnd("with its actor")


def shortage(asked: Bundle, nodes: list[Bundle], free: Bundle) -> str:
    """Return in words what was asked, what the nodes have, and what does not fit."""
    text = f"{asked} on one machine are asked for; "
    there = ", ".join(map(str, nodes)) or "none"
    text += f"{count(len(nodes), 'machine')} with {there}, of which {free} are free; "
    fits = [
        node
        for node in nodes
        if node.num_cpus >= asked.num_cpus and node.num_gpus >= asked.num_gpus
    ]
    if fits:
        return text + "it fits as soon as others give back what they have"
    missing = [
        noun
        for noun, needed, most in (
            ("CPUs", asked.num_cpus, max((node.num_cpus for node in nodes), default=0)),
            ("GPUs", asked.num_gpus, max((node.num_gpus for node in nodes), default=0)),
        )
        if needed > most
    ]
    what = " and ".join(missing) or "of both"
    return text + f"no machine has enough {what}: join one that has, or ask for fewer"


def is_open(address: str) -> bool:
    """Return whether a Ray cluster lets in who shows no token.

    It is asked by a process of its own, since ray reads its environment but once.
    """
    result = subprocess.run(
        [sys.executable, "-m", __name__, address],
        env={**os.environ, AUTH_VARIABLE: "disabled"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return result.stdout.strip() == b"open"


def _ask_without_a_token(address: str) -> str:
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError

    try:
        GcsClient(address=address).check_alive([], timeout=5)
    except AuthenticationError:
        return "closed"
    return "open"


def _check_reachable(address: str) -> None:
    """Raise ConfigError at once if nothing listens there: ray would try for 40 seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({error}): give HOST:PORT of its head, or "
            "start one with octavo cluster start"
        ) from None


def cluster_state(address: str) -> dict[str, Any]:
    """Return the machines of a cluster, and the places that servers hold there.

    Raises:
        ConfigError: it cannot be reached, or refuses the token.
    """
    ray = _connected(address, allow_open=True)
    from ray.util.placement_group import placement_group_table

    try:
        return {
            "address": address,
            "asks_for_token": os.environ[AUTH_VARIABLE] == "token",
            "machines": [
                {
                    "address": node["NodeManagerAddress"],
                    "hostname": node["NodeManagerHostname"],
                    "is_head": "node:__internal_head__" in node["Resources"],
                    "cpus": int(node["Resources"].get("CPU", 0)),
                    "gpus": int(node["Resources"].get("GPU", 0)),
                }
                for node in ray.nodes()
                if node["Alive"]
            ],
            "free": _bundle_of(ray.available_resources())._asdict(),
            "places": [
                {"name": group["name"], "state": group["state"].lower()}
                for group in placement_group_table().values()
                if group["name"].startswith("octavo-") and group["state"] != "REMOVED"
            ],
        }
    finally:
        ray.shutdown()


def _connected(address: str, *, allow_open: bool) -> Any:
    """Return ray, connected to a cluster. ConfigError if that cannot be."""
    _check_reachable(address)
    if is_open(address):
        if not allow_open:
            raise ConfigError(
                f"the Ray cluster at {address} asks for no token: all who reach it may run what "
                "they like on its machines. Start it with octavo cluster start, or with "
                "RAY_AUTH_MODE=token, or give --allow-open-ray"
            )
        os.environ[AUTH_VARIABLE] = "disabled"
    else:
        os.environ[AUTH_VARIABLE] = "token"
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise ConfigError("ray is not installed: pip install 'octavo[ray]'") from None
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            ignore_reinit_error=False,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined: {_first_line(error)}. Its token must "
            "be in ~/.ray/auth_token, or in the file that RAY_AUTH_TOKEN_PATH names"
        ) from None
    return ray


def _resources(bundle: Bundle) -> dict[str, int]:
    found = {"CPU": bundle.num_cpus, "GPU": bundle.num_gpus}
    return {name: number for name, number in found.items() if number}


def _bundle_of(resources: dict[str, float]) -> Bundle:
    return Bundle(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    print(_ask_without_a_token(sys.argv[1]))
