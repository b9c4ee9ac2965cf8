"""Child processes of a comparison, such as workers that are stopped while others are measured."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.base.errors import BenchmarkError
from octavo.bench.child_processes import need_process_groups
from octavo.bench.noise import group_cpu_s
from octavo.bench.peers.workers.workloads import PeerWorkload

# Variables of this process that would change how the engine's threads run.
_FOREIGN_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", "TORCHINDUCTOR_", "VLLM_")


class ChildError(BenchmarkError):
    """An engine could not be started, or failed; says where its log is."""


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without settings of thread pools, and with
    ``variables``."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_VARIABLES)
    }
    return {**kept, **variables}


def output_of(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 900.0
) -> str:
    """Run a command to its end, and return what it prints. ChildError if it fails."""
    try:
        done = subprocess.run(
            command,
            env=environment() if env is None else env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"{command[0]}: no answer within {timeout:.0f} s") from None
    except OSError as error:
        raise ChildError(str(error)) from error
    if done.returncode != 0:
        raise ChildError(f"{' '.join(command)} failed:\n{done.stderr[-1500:]}")
    return done.stdout


def start_to_first_byte(command: Sequence[str], env: Mapping[str, str], timeout: float) -> float:
    """Return the seconds from the start of a process to the first byte that it prints; waits for
    its end."""
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        elapsed = time.perf_counter() - started
        try:
            _, message = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ChildError(f"{command[0]} did not end within {timeout:.0f} s") from None
    if process.returncode != 0 or not first:
        tail = message.decode(errors="replace")[-1000:]
        raise ChildError(f"{' '.join(command)} failed ({process.returncode}):\n{tail}")
    return elapsed


class Worker:
    """A running worker.py, the leader of a process group of its own.

    Between its turns the whole group is stopped (SIGSTOP), so that an engine that polls for work
    takes nothing from the one that is measured. A stopped process does not notice the end of its
    parent: a watchdog does, and ends the group.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, timeout: float):
        need_process_groups("octavo bench compare")
        self._log, self._timeout, self._buffer = log, timeout, b""
        self.idle_cpu_s = 0.0
        self._is_closed = False
        started = time.perf_counter()
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                process_group=0,
            )
        self.group = self._process.pid
        # Its input ends without a line when this process dies, however that happens.
        watch = f"read line || kill -KILL -{self.group}"
        self._watchdog = subprocess.Popen(
            ["sh", "-c", watch], stdin=subprocess.PIPE, process_group=0
        )
        try:
            ready = self._receive()
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - started
        self.about: dict[str, Any] = ready["about"]
        self._pause()

    def measure(
        self, workload: PeerWorkload, seed: int, timeout: float | None = None
    ) -> list[dict[str, float]]:
        """Return the figures of each repetition.

        Raises:
            ChildError: there is no answer within ``timeout`` seconds: by default, as many as
                the start may take.
        """
        self._resume()
        try:
            request = {"workload": workload.as_json(), "seed": seed}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return self._receive(timeout)["samples"]
        except BrokenPipeError:
            raise ChildError(f"the worker is gone; see {self._log}") from None
        finally:
            self._pause()

    def close(self) -> None:
        """End the worker and everything that it started; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._watchdog.communicate(b"\n")

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)
        self._cpu_s_when_paused = group_cpu_s(self.group)

    def _resume(self) -> None:
        self.idle_cpu_s += group_cpu_s(self.group) - self._cpu_s_when_paused
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def _receive(self, timeout: float | None = None) -> dict[str, Any]:
        line = self._read_line(self._timeout if timeout is None else timeout)
        try:
            answer = json.loads(line)
        except ValueError:
            raise ChildError(f"the worker ended; see {self._log}") from None
        if "error" in answer:
            raise ChildError(f"{answer['error']}; see {self._log}")
        return answer

    def _read_line(self, timeout: float) -> bytes:
        """Return a line, or the rest when the output ends."""
        deadline = time.monotonic() + timeout
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ChildError(f"no answer within {timeout:.0f} s; see {self._log}")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
