"""Run ``octavo serve``, which starts the engine's process and the server.

The engine's process is started before the server's own modules are imported: both take half a
second, side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import hub
from octavo.base.errors import ConfigError
from octavo.server.engine.process import ProcessLauncher
from octavo.server.http.listener import listen
from octavo.server.settings import DEFAULT_LEASE_TIMEOUT, STOP_SIGNALS, ServerSettings
from octavo.server.watch.logs import configure_logging
from octavo.settings.engine import EngineArgs
from octavo.sources.open import open_source
from octavo.system import machine

if TYPE_CHECKING:
    from octavo.server.engine.placed_engines import PlacedLaunchers
    from octavo.server.engine.replicas import Launchers
    from octavo.server.engine.step_prediction import FindCalibration
    from octavo.server.http.access_control import DrainState
    from octavo.server.requested_model import RequestedModel
    from octavo.server.server import Served

_log = logging.getLogger("octavo.server")

# Warning about keys among the arguments.
VISIBLE_KEYS_WARNING = (
    "--api-key and --admin-key stand in the list of processes, where all users of this machine can "
    "read them: --api-key-file, or the variables OCTAVO_API_KEY and OCTAVO_ADMIN_KEY, keep them to "
    "yourself"
)


def serve(
    args: EngineArgs,
    settings: ServerSettings,
    find_calibration: FindCalibration = lambda: None,
) -> int:
    """Serve until a signal says to stop; return the exit status.

    Args:
        find_calibration: called once all is ready; returns the calibration of the model on this
            machine, if there is one.

    Raises:
        ConfigError, ModelError: the server could not start.
    """
    _prepare(settings)
    _refuse_idle_settings(args, settings)
    args.check_server()
    path = hub.resolve(args.model)
    args = open_source(path, args.model_impl).settings(args)
    with (
        listen(settings) as listener,
        contextlib.closing(_create_launcher(args, settings, listener)) as launcher,
    ):
        _end_on_signals()
        launcher.launch_ahead()
        parts = _one_model(args, settings, path, launcher, find_calibration)
        return _run(settings, listener, *parts)


def serve_several(
    models: Sequence[RequestedModel],
    others: Callable[[str], EngineArgs],
    settings: ServerSettings,
    find_calibration: Callable[[str], Any] = lambda model: None,
) -> int:
    """Serve several models, which are loaded when they are asked for, until a signal says to stop;
    return the exit status.

    Args:
        models: those that were named.
        others: returns the engine's settings of a model of ``settings.model_dir``, by its path.
        find_calibration: of a model, by its argument.

    Raises:
        ConfigError, ModelError: the server could not start.
    """
    _prepare(settings)
    from octavo.server.registry.set_up import RegistrySetUp

    set_up = RegistrySetUp(models, others, settings, find_calibration)
    with listen(settings) as listener:
        _end_on_signals()
        return _run(settings, listener, *set_up.create())


def _prepare(settings: ServerSettings) -> None:
    """Set up logs. ConfigError where no server can run."""
    if not machine.can_hand_over_files():
        raise ConfigError(
            "octavo serve cannot run on this system, where a process cannot hand open files to the "
            "one that it starts, as the server does to its engine: run it in WSL 2, or use octavo "
            "generate, octavo chat, or LLM from Python"
        )
    configure_logging(settings)
    if settings.api_key or settings.admin_key:
        _log.warning("%s", VISIBLE_KEYS_WARNING)


def _end_on_signals() -> None:
    """Have signals end this process, until the server listens to them."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, _end_the_start)


def _refuse_idle_settings(args: EngineArgs, settings: ServerSettings) -> None:
    """Raise ConfigError for a setting of the server that would have no effect."""
    if settings.router is not None and not args.has_replicas:
        raise ConfigError(
            f"router {settings.router} chooses among replicas, and there is one engine: give "
            "data_parallel_size, or leave router out"
        )
    if settings.max_local_prefill_length is not None and not args.prefill_replicas:
        raise ConfigError(
            "max_local_prefill_length says which prompts are not for prefill_replicas, and there "
            "are none: give their number, or leave it out"
        )
    for name in ("target_ttft", "scale_down_after"):
        if getattr(settings, name) is not None and not args.replicas.is_elastic:
            raise ConfigError(
                f"{name} is for replicas that come and go: give data_parallel_size as LEAST..MOST, "
                f"such as 1..8, or leave {name} out"
            )
    for name, default in (("allow_open_ray", False), ("lease_timeout", None)):
        if getattr(settings, name) != default and args.distributed != "ray":
            raise ConfigError(f"{name} is of distributed ray: give that, or leave {name} out")


def _create_launcher(
    args: EngineArgs, settings: ServerSettings, listener: socket.socket
) -> ProcessLauncher | Launchers:
    if args.distributed == "ray":
        return _create_ray_launchers(args, settings, listener)
    if not args.has_replicas:
        return ProcessLauncher(args, settings.log_format)
    from octavo.server.engine.replica_launchers import ReplicaLaunchers

    return ReplicaLaunchers(args, settings.log_format)


def _create_ray_launchers(
    args: EngineArgs, settings: ServerSettings, listener: socket.socket
) -> PlacedLaunchers:
    from octavo.cluster.ray_cluster import address_of_cluster
    from octavo.server.engine.placed_engines import PlacedLaunchers, PlacementSettings

    timeout = DEFAULT_LEASE_TIMEOUT if settings.lease_timeout is None else settings.lease_timeout
    place = {
        "address": address_of_cluster(args.ray_address),
        # No two servers that run have both in common, so who has them releases what is left of
        # the one before.
        "server": f"octavo-{socket.gethostname()}-{listener.getsockname()[1]}",
        "allow_open": settings.allow_open_ray,
        "lease_timeout": timeout,
    }
    return PlacedLaunchers(args, PlacementSettings("ray", place, timeout), settings.log_format)


def _end_the_start(signum: int, frame: object) -> None:
    raise SystemExit(0)


def _one_model(
    args: EngineArgs,
    settings: ServerSettings,
    path: Path,
    launcher: ProcessLauncher | Launchers,
    find_calibration: FindCalibration,
) -> tuple[DrainState, Served]:
    from octavo.server.one_model import OneModel
    from octavo.server.served_model import ServedModel, ServerCommons, identity_of

    commons = ServerCommons.create(settings, has_replicas=args.has_replicas)
    model = ServedModel(
        identity_of(args.model, path, settings.served_model_name),
        args,
        launcher,
        commons,
        chat_template=settings.chat_template,
        find_calibration=find_calibration,
    )
    return commons.drain_state, OneModel(model)


def _run(
    settings: ServerSettings, listener: socket.socket, drain_state: DrainState, served: Served
) -> int:
    from octavo.server.server import OctavoServer

    server = OctavoServer(settings, listener, drain_state, served)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server.run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
