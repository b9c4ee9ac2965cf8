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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import hub
from octavo.base.errors import ConfigError
from octavo.server.engine.process import ProcessLauncher
from octavo.server.http.listener import listen
from octavo.server.settings import STOP_SIGNALS, ServerSettings
from octavo.server.watch.logs import configure_logging
from octavo.settings.engine import EngineArgs
from octavo.sources.open import open_source
from octavo.system import machine

if TYPE_CHECKING:
    from octavo.server.engine.replica_launchers import ReplicaLaunchers
    from octavo.server.engine.step_prediction import FindCalibration

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
    if not machine.can_hand_over_files():
        raise ConfigError(
            "octavo serve cannot run on this system, where a process cannot hand open files to the "
            "one that it starts, as the server does to its engine: run it in WSL 2, or use octavo "
            "generate, octavo chat, or LLM from Python"
        )
    configure_logging(settings)
    if settings.api_key or settings.admin_key:
        _log.warning("%s", VISIBLE_KEYS_WARNING)
    if settings.router is not None and args.data_parallel_size == 1:
        raise ConfigError(
            f"router {settings.router} chooses among replicas, and there is one engine: give "
            "data_parallel_size, or leave router out"
        )
    if settings.max_local_prefill_length is not None and not args.prefill_replicas:
        raise ConfigError(
            "max_local_prefill_length says which prompts are not for prefill_replicas, and there "
            "are none: give their number, or leave it out"
        )
    path = hub.resolve(args.model)
    args = open_source(path, args.model_impl).settings(args)
    launcher = _create_launcher(args, settings.log_format)
    with listen(settings) as listener, contextlib.closing(launcher):
        for signum in STOP_SIGNALS:  # until the server listens to them
            signal.signal(signum, _end_the_start)
        launcher.launch_ahead()
        return _run(args, settings, path, listener, launcher, find_calibration)


def _create_launcher(args: EngineArgs, log_format: str) -> ProcessLauncher | ReplicaLaunchers:
    if args.data_parallel_size == 1:
        return ProcessLauncher(args, log_format)
    from octavo.server.engine.replica_launchers import ReplicaLaunchers

    return ReplicaLaunchers(args, log_format)


def _end_the_start(signum: int, frame: object) -> None:
    raise SystemExit(0)


def _run(
    args: EngineArgs,
    settings: ServerSettings,
    path: Path,
    listener: socket.socket,
    launcher: ProcessLauncher | ReplicaLaunchers,
    find_calibration: FindCalibration,
) -> int:
    from octavo.server.server import OctavoServer

    server = OctavoServer(args, settings, path, listener, launcher, find_calibration)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server.run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
