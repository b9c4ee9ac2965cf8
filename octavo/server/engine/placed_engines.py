"""Engines that a placement starts, maybe on other machines, and that connect to this server.

    PlacedLaunchers   the launchers of a server's replicas   (`ReplicaLaunchers` for this machine)
      PlacedLauncher    of one replica: holds its place from one engine to the next
        PlacedEngine      one engine process

The placement itself is in a process of its own (`octavo.cluster.driver`), which is asked where an
engine starts and how it ended. Between server and engine there is a link, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import Any, NamedTuple

from octavo import __version__, hub
from octavo.base.errors import ConfigError, EngineError, EngineUnavailableError, OctavoError
from octavo.cluster.driver_client import DriverClient
from octavo.cluster.placement import ProcessSpec, count
from octavo.links.facts import Facts
from octavo.links.link import Link
from octavo.links.listener import Listener
from octavo.links.ticket import Address
from octavo.server.engine.hosted_worker import FACTS
from octavo.server.engine.in_flight_record import NUM_BYTES, names_in
from octavo.server.engine.link_transport import LinkTransport
from octavo.server.engine.replica_launchers import Slots, offload_of_replica, roles_in_words
from octavo.server.engine.wire import Message, encode_message
from octavo.settings.engine import EngineArgs, is_gpu
from octavo.system import machine
from octavo.system.machine import KILL

_log = logging.getLogger("octavo.server")

WORKER = "octavo.server.engine.hosted_worker"
_CONNECT_SECONDS = 60.0  # for an engine that was started to connect
_END_SECONDS = 10.0  # for one that was killed to end
_RETRY_SECONDS = 2.0


class OpenPlacement(NamedTuple):
    """A placement as its driver has opened it."""

    driver: DriverClient
    listener: Listener
    cpus: int  # of each replica
    num_gpus: int


class PlacementSettings(NamedTuple):
    """The name of a placement, as `octavo.cluster.driver` knows it, and its settings.

    ``patience``: seconds for which one that was lost is tried again.
    """

    kind: str
    settings: Mapping[str, Any]
    patience: float = 0.0


class PlacedLaunchers:
    """Makes the launcher of each replica of a server, by number.

    Args:
        args: of the server. Each engine gets threads, and a share of its machine's memory, by the
            place that it has.
    """

    def __init__(self, args: EngineArgs, placement: PlacementSettings, log_format: str = "text"):
        self.args = args
        self.log_format = log_format
        self._placement = placement
        self._opened: OpenPlacement | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._ahead: dict[int, PlacedLauncher] = {}
        self.slots = Slots()

    @cached_property
    def model(self) -> Facts:
        """The fingerprint of the model on this machine. ModelError if that cannot be read."""
        from octavo.models.model_content import fingerprint  # which imports numpy

        return fingerprint(hub.resolve(self.args.model))

    def launch_ahead(self) -> None:
        """Begin to start the first engines: they load while the server is being imported."""
        for number in range(self.args.replicas.least):
            launcher = self._ahead[number] = PlacedLauncher(self, number)
            launcher.launch_ahead()

    def create(self, number: int) -> PlacedLauncher:
        """Return the launcher of the replica of this number."""
        return self._ahead.pop(number, None) or PlacedLauncher(self, number)

    def close(self) -> None:
        """Give all places back."""
        with self._lock:
            self._is_closed = True
            if self._opened is not None:
                self._opened.listener.close()
                self._opened.driver.close()

    def describe(self) -> str:
        """Return where replicas run, for the log."""
        replicas = self.args.replicas
        number = count(replicas.most, "replica")
        if replicas.is_elastic:
            number = f"{replicas.least} to {number}"
        where = self._placement.settings.get("address", "this machine")
        return f"{number}, placed by {self._placement.kind} ({where}){roles_in_words(self.args)}"

    def release(self, name: str) -> None:
        """Give a place back, if there is a placement that has it."""
        opened = self._opened
        if opened is not None:
            opened.driver.ask("release", name=name)

    def opened(self) -> OpenPlacement:
        """Return the placement, opened; anew, if its driver has ended. May be called from any
        thread.

        Raises:
            ConfigError, EngineError: it cannot be opened.
        """
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            elif self._opened.driver.has_ended:
                self._opened.listener.close()
                self._opened = self._open_again()
            return self._opened

    def _open(self) -> OpenPlacement:
        if self._is_closed:
            raise EngineUnavailableError("the server is stopping")
        kind, settings, _ = self._placement
        driver = DriverClient()
        try:
            asked = driver.ask(
                "open",
                kind=kind,
                settings=dict(settings),
                num_processes=self.args.replicas.most,
            )
            answer = asked.result()
            if answer["num_released"]:
                places = count(answer["num_released"], "place")
                _log.warning("%s of an earlier server of this name were released", places)
            listener = Listener(Address(answer["address"]))
        except BaseException:
            driver.close()
            raise
        return OpenPlacement(driver, listener, answer["cpus"], answer["num_gpus"])

    def _open_again(self) -> OpenPlacement:
        deadline = time.monotonic() + self._placement.patience
        while True:
            try:
                return self._open()
            except (ConfigError, EngineError) as error:
                if self._is_closed or time.monotonic() > deadline:
                    raise EngineError(f"the placement is gone: {error}") from None
            time.sleep(_RETRY_SECONDS)


class PlacedLauncher:
    """Starts the engines of one replica, one after another, in the same place."""

    def __init__(self, launchers: PlacedLaunchers, number: int):
        self._launchers = launchers
        self._number = number
        self._slot = launchers.slots.take()
        self._ahead: PlacedEngine | None = None

    def launch_ahead(self) -> None:
        self._ahead = self.launch()

    def launch(self) -> PlacedEngine:
        if (engine := self._ahead) is not None:
            self._ahead = None
            return engine
        return PlacedEngine(self._launchers, self._number, self._slot)

    def close(self) -> None:
        """Give the place back, with what runs there."""
        if self._ahead is not None:
            self._ahead.kill()
            self._ahead = None
        self._launchers.slots.give_back(self._slot)
        self._launchers.release(name_of(self._number))


class PlacedEngine:
    """One engine process: it waits for its place in a thread of its own, and starts there."""

    def __init__(self, launchers: PlacedLaunchers, number: int, slot: int):
        self._launchers = launchers
        self._number, self._slot = number, slot
        self._args: dict[str, Any] = {}
        self._driver: DriverClient | None = None  # since the process was started
        self._is_killed = False
        self._memory = b""
        self._link: Future[Link] = Future()
        threading.Thread(target=self._start, name="octavo-placing", daemon=True).start()

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        link = await asyncio.shield(asyncio.wrap_future(self._link))
        transport = LinkTransport(link, protocol())
        clock = {"now": time.monotonic(), "boot": machine.boot_id()}
        start = {"op": "start", "args": self._args, "cpus": [], "clock": clock, **self._kv_links()}
        start["model"] = self._launchers.model
        transport.write(encode_message(start))

    def _kv_links(self) -> Message:
        """Return what an engine is told of the links by which replicas pass on KV, if they do."""
        args = self._launchers.args
        if not args.prefill_replicas:
            return {}
        computes_prompts = self._number < args.prefill_replicas
        peers = [] if computes_prompts else [*range(args.prefill_replicas)]
        links = {"computes_prompts": computes_prompts, "peers": peers}
        return {"links": {**links, "bytes": args.kv_buffer_bytes}}

    def kill(self, signum: int = KILL) -> None:
        self._is_killed = True
        if self._driver is not None:
            self._driver.ask("kill", name=name_of(self._number), signum=int(signum))

    def wait(self) -> str:
        if self._driver is None:
            return "before it was started"
        try:
            asked = self._driver.ask("end", name=name_of(self._number), seconds=_END_SECONDS)
            answer = asked.result(2 * _END_SECONDS)
        except (EngineError, TimeoutError) as error:
            return f"its end is not known: {error}"
        if answer["status"] is None:
            return "it does not end"
        self._memory = base64.b64decode(answer["memory"])
        return str(answer["status"])

    def at_work(self) -> list[str]:
        return names_in(self._memory)

    def _start(self) -> None:
        try:
            link = self._started()
        except OctavoError as error:
            self._link.set_exception(error)
        except Exception as error:
            self._link.set_exception(EngineError(f"{type(error).__name__}: {error}"))
        else:
            if self._is_killed:
                link.close()
            self._link.set_result(link)

    def _started(self) -> Link:
        """Wait for a place, start the process there, and return the link to it."""
        placement = self._launchers.opened()
        args, name, ask = self._launchers.args, name_of(self._number), placement.driver.ask
        device = _device(args.device, placement.num_gpus)
        num_cpus = args.threads or (1 if is_gpu(device) else placement.cpus)
        num_gpus = _num_ranks(args) if is_gpu(device) else 0
        place = ask("lease", name=name, cpus=num_cpus, gpus=num_gpus).result()
        if self._is_killed:
            raise EngineUnavailableError("the server is stopping")
        changes: dict[str, Any] = {
            "device": device,
            "data_parallel_size": place["num_alike"],
            "distributed": None,
            "ray_address": None,
            **offload_of_replica(args, self._slot),
        }
        if not is_gpu(device):
            changes["threads"] = num_cpus
        args = dataclasses.replace(args, **changes, given=args.given_settings())
        self._args = {**dataclasses.asdict(args), "given": sorted(args.given_settings())}
        invitation = placement.listener.invite(f"replica {self._number}", FACTS)
        spec = ProcessSpec(
            WORKER,
            (self._launchers.log_format,),
            invitation.ticket.secret_text(),
            NUM_BYTES,
            __version__,
        )
        self._driver = placement.driver
        ask("start", name=name, spec=spec.as_json()).result()
        self._launchers.model  # noqa: B018 - read while the process starts
        return invitation.wait(_CONNECT_SECONDS)


def name_of(number: int) -> str:
    """Return the name of a replica's place."""
    return f"replica-{number}"


def _device(asked: str, num_gpus: int) -> str:
    if asked == "auto":
        return "cuda" if num_gpus else "cpu"
    if asked not in ("cpu", "cuda"):
        raise ConfigError(
            f"device {asked} is one GPU of one machine, and the placement chooses: give cuda"
        )
    return asked


def _num_ranks(args: EngineArgs) -> int:
    return args.tensor_parallel_size if isinstance(args.tensor_parallel_size, int) else 1
