"""Registries whose engines are ready when a test says so, or are threads with the hash model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import READY, SILENCE, ScriptedEngine
from socket_engine import SocketLauncher
from thread_engine import ThreadEngine, ThreadLauncher

from octavo.server.engine.wire import encode_message
from octavo.server.registry.entries import ModelEntry
from octavo.server.registry.memory_need import MemoryNeed, PlannedModel
from octavo.server.registry.model_registry import ModelRegistry, RegistrySettings
from octavo.server.served_model import ServerCommons
from octavo.server.settings import ServerSettings
from octavo.settings.engine import EngineArgs


class ObedientEngine(ScriptedEngine):
    """Ends when it is told to stop, as a real one does."""

    async def connect(self, protocol: Any) -> None:
        await super().connect(protocol)
        self._theirs.setblocking(False)
        asyncio.get_running_loop().add_reader(self._theirs, self._look)

    def _look(self) -> None:
        data = self._theirs.recv(4096)
        if not data or b"stop" in data:
            self.kill()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if not self.is_over:
            with contextlib.suppress(RuntimeError):  # no loop runs before it is connected
                asyncio.get_running_loop().remove_reader(self._theirs)
        super().kill(signum)


class HeldLauncher(SocketLauncher):
    """Engines that load until `say` lets them go on."""

    def __init__(self, says_ready: bool):
        self._says_ready = says_ready
        self.engines: list[ScriptedEngine] = []

    def launch(self) -> ScriptedEngine:
        self.engines.append(ObedientEngine(READY if self._says_ready else SILENCE))
        return self.engines[-1]

    def say(self, message: dict[str, Any]) -> None:
        self.engines[-1]._theirs.send(encode_message(message))


class ComputingLauncher(ThreadLauncher):
    """Engines that compute, and load until ``let_go`` is set."""

    def __init__(self, tokenizer: Any, is_held: bool):
        super().__init__(tokenizer)
        self.let_go = threading.Event()
        if not is_held:
            self.let_go.set()

    def launch(self) -> ThreadEngine:
        self.engines.append(HeldEngine(self.tokenizer, self.let_go))
        return self.engines[-1]


class HeldEngine(ThreadEngine):
    def __init__(self, tokenizer: Any, let_go: threading.Event):
        self._let_go = let_go
        super().__init__(tokenizer)

    def _run(self) -> None:
        self._let_go.wait()
        super()._run()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._let_go.set()
        super().kill(signum)


class Setting:
    """A registry, with what a test does to its engines. Each model takes 100 bytes."""

    def __init__(self, registry: ModelRegistry, launchers: dict[str, list[Any]]):
        self.registry = registry
        self.launchers = launchers

    def states(self) -> dict[str, str]:
        return {status.names[0]: status.state for status in self.registry.list()}

    async def acquire(self, name: str) -> Callable[[], None]:
        """Have a request of a model; returns what ends it."""
        model = self.registry.named(name)
        await self.registry.acquire(model)
        return partial(self.registry.release, model)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)

    async def until_states(self, **states: str) -> None:
        await self.until(lambda: states.items() <= self.states().items())

    def num_launches(self, name: str) -> int:
        return sum(len(launcher.engines) for launcher in self.launchers.get(name, ()))

    def engines(self) -> list[Any]:
        return [
            e for each in self.launchers.values() for launcher in each for e in launcher.engines
        ]


@pytest.fixture
def in_registry(tiny_model, byte_tokenizer) -> Callable[..., Any]:
    """Runs ``main(setting)`` beside a registry of models of these names; ``held``: those whose
    engines wait; ``threads``: engines compute; others are settings of the registry."""

    def run(
        main: Callable[[Setting], Any],
        *names: str,
        budget: int = 250,
        pinned: tuple[str, ...] = (),
        held: tuple[str, ...] = (),
        at_start: bool = False,
        idle: float | None = None,
        max_waiting: int = 8,
        threads: bool = False,
        sizes: dict[str, int] | None = None,
        **settings: Any,
    ) -> Any:
        launchers: dict[str, list[Any]] = {}

        def create_launcher(args: EngineArgs) -> Any:
            if threads:
                made: Any = ComputingLauncher(byte_tokenizer, is_held=args.model in held)
            else:
                made = HeldLauncher(says_ready=args.model not in held)
            launchers.setdefault(args.model, []).append(made)
            return made

        def plan(entry: ModelEntry) -> PlannedModel:
            size = (sizes or {}).get(entry.names[0], 100)
            return PlannedModel(MemoryNeed(size, 0, 0), entry.args)

        entries = [
            ModelEntry(
                (name,),
                Path(tiny_model),
                EngineArgs(name),
                is_pinned=name in pinned,
                loads_at_start=at_start,
            )
            for name in names
        ]

        async def all_of_it() -> Any:
            registry = ModelRegistry(
                entries,
                RegistrySettings(budget, max_waiting, idle, plan, create_launcher, lambda: entries),
                partial(ServerCommons.create, ServerSettings(**settings)),
            )
            setting = Setting(registry, launchers)
            await registry.start()
            try:
                return await main(setting)
            finally:
                await registry.stop()
                assert not any(model.engine.num_unfinished for model in registry.loaded)

        return asyncio.run(all_of_it())

    return run
