"""A machine's part of a Ray cluster: started, described and stopped by ``octavo cluster``.

Ray runs as one process tree, whose first process is the leader of its session: so to stop it is to
end that session, and nothing else of ray's on the machine. A file in octavo's folder says which
process that is.

The cluster asks for a token, which is in a file, never on a command line. There is no dashboard.
Ray binds its ports to all addresses of a machine, whatever it is told; the token is what keeps
others out, and a firewall should.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from octavo.base.errors import ConfigError
from octavo.base.files import NewFile
from octavo.hub.store import home

DEFAULT_PORT = 6379
# Ray takes 127.0.0.1 for an address that others cannot reach, and puts that of a network in its
# place. All of 127.0.0.0/8 is loopback.
LOOPBACK = "127.0.0.2"
TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
_START_SECONDS = 120.0
_STOP_SECONDS = 20.0
# Seconds for which a machine waits for a head that does not answer, before all on it ends.
_HEAD_SECONDS = "30"


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine's part of a cluster, as it was started here.

    Args:
        address: HOST:PORT of the head.
        host: of this machine, as the others know it.
        pid: of the first process. started: when that was started, in clock ticks since boot.
        log: file with what it says.
    """

    address: str
    host: str
    is_head: bool
    pid: int
    started: int
    log: str

    @property
    def is_running(self) -> bool:
        return _start_of(self.pid) == self.started


def start_head(host: str, port: int, num_cpus: int | None, num_gpus: int | None) -> RayNode:
    """Start a cluster on this machine. ``port``: 0 is one that is free.

    Raises:
        ConfigError: one was started already, the port is taken, or ray does not start.
    """
    token_file(makes_one=True)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be listened on ({error.strerror}): give --address and --port"
            ) from None
        port = probe.getsockname()[1]
    flags = ["--head", f"--port={port}", "--include-dashboard=false"]
    return _start(f"{host}:{port}", host, True, flags, num_cpus, num_gpus)


def join(address: str, host: str, num_cpus: int | None, num_gpus: int | None) -> RayNode:
    """Add this machine to the cluster whose head is at an address.

    Raises:
        ConfigError: nothing answers there, there is no token, or ray does not start.
    """
    token_file(makes_one=False)
    address_towards(address)  # which raises where nothing answers
    return _start(address, host, False, [f"--address={address}"], num_cpus, num_gpus)


def running_nodes() -> list[RayNode]:
    """Return what `start_head` and `join` have started on this machine and runs still."""
    found = []
    for file in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            node = RayNode(**json.loads(file.read_text()))
            if node.is_running:
                found.append(node)
    return found


def stop() -> list[RayNode]:
    """End what `running_nodes` has, with all that runs in it; return it."""
    nodes = running_nodes()
    for node in nodes:
        os.kill(node.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for node in nodes:
        while node.is_running and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        _state_file(node.pid).unlink(missing_ok=True)
    return nodes


def address_of_cluster(given: str | None) -> str:
    """Return the address of the cluster to use: the one that was given, that of ``RAY_ADDRESS``, or
    of the one that was started here. ConfigError if there is none."""
    address = given or os.environ.get("RAY_ADDRESS")
    if address and address != "auto":
        return address
    known = sorted({node.address for node in running_nodes()})
    if len(known) == 1:
        return known[0]
    what = f"this machine is in several ({', '.join(known)})" if known else "none is known here"
    raise ConfigError(
        f"which Ray cluster? {what}: start one with octavo cluster start, or give ray_address as "
        "HOST:PORT of its head"
    )


def address_towards(cluster: str) -> str:
    """Return the address of this machine from which it reaches a cluster, at HOST:PORT."""
    at, _, port = cluster.rpartition(":")
    try:
        with socket.create_connection((at.strip("[]"), int(port)), 5.0) as probe:
            host: str = probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"nothing answers at {cluster!r} ({error}): give HOST:PORT as octavo cluster start has "
            "said it, and open that port in the firewall"
        ) from None
    return LOOPBACK if host == "127.0.0.1" else host


def token_file(*, makes_one: bool) -> Path:
    """Return the file with the token of the cluster: the one that ``RAY_AUTH_TOKEN_PATH`` names, or
    ``~/.ray/auth_token``, where ray looks for it.

    Raises:
        ConfigError: there is none, and none is made.
    """
    path = Path(os.environ.get(TOKEN_PATH_VARIABLE) or Path.home() / ".ray" / "auth_token")
    if path.is_file() or os.environ.get("RAY_AUTH_TOKEN"):
        return path
    if not makes_one:
        raise ConfigError(
            f"the token of the cluster is not in {path}: copy that file from the machine where "
            f"octavo cluster start has run, or name another one by {TOKEN_PATH_VARIABLE}"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _start(
    address: str,
    host: str,
    is_head: bool,
    flags: list[str],
    num_cpus: int | None,
    num_gpus: int | None,
) -> RayNode:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray is not installed: pip install 'octavo[ray]'")
    for node in running_nodes():
        if (node.address, node.host) == (address, host):
            raise ConfigError(
                f"this machine is in the cluster at {address} already, as {host}: octavo cluster "
                "stop ends that"
            )
    flags += [
        f"--node-ip-address={host}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        "--min-worker-port=0",  # any that are free: ray's own range takes ports of others
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
    ]
    if is_head and _has_ray_client():
        flags.append(f"--ray-client-server-port={_free_port(host)}")
    flags += [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
    flags += [] if num_gpus is None else [f"--num-gpus={num_gpus}"]
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / f"{'head' if is_head else 'node'}-{os.getpid()}.log"
    with log.open("wb") as file:
        process = _start_ray(flags, file)
    node = RayNode(address, host, is_head, process.pid, _start_of(process.pid) or 0, str(log))
    with NewFile(_state_file(node.pid)) as new:
        new.file.write(json.dumps(asdict(node)).encode())
        new.publish(mode=0o600)
    _wait_until_started(process, node)
    return node


def _start_ray(flags: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_gcs_rpc_server_reconnect_timeout_s": _HEAD_SECONDS,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )


def _wait_until_started(process: subprocess.Popen[bytes], node: RayNode) -> None:
    deadline = time.monotonic() + _START_SECONDS
    log = Path(node.log)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if b"Ray runtime started" in log.read_bytes():
            return
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _state_file(node.pid).unlink(missing_ok=True)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    why = lines[-1].strip() if lines else "it said nothing"
    raise ConfigError(f"ray does not start: {why} (more in {node.log})")


def _has_ray_client() -> bool:
    """Return whether ray starts a server for its client, which has a fixed port by default."""
    return importlib.util.find_spec("grpc") is not None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _start_of(pid: int) -> int | None:
    """Return when a process was started, which tells it from another one of the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _folder() -> Path:
    return home() / "cluster"


def _state_file(pid: int) -> Path:
    return _folder() / f"{pid}.json"
