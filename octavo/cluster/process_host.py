"""`ProcessHost` starts one process as its child, and is outlived by nothing of it.

The child is started by a thread that lives as long as the child does, since the system ends a child
when the *thread* that started it ends (``PR_SET_PDEATHSIG``). The end of the child's standard input
says the same on every system.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading

from octavo import __version__
from octavo.base.errors import EngineError
from octavo.cluster.placement import ProcessEnd, ProcessSpec
from octavo.system.child_process import environment_without_keys
from octavo.system.machine import KILL
from octavo.system.nameless_memory import open_memory


class ProcessHost:
    """Starts and watches one process on this machine. See `placement.Host`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: mmap.mmap | None = None
        self._failure: OSError | None = None
        self._started, self._ended = threading.Event(), threading.Event()

    def start(self, spec: ProcessSpec) -> None:
        """Start the process, and return when the system has.

        Raises:
            EngineError: the system refuses, or octavo has another version here.
        """
        if spec.version != __version__:
            raise EngineError(
                f"{os.uname().nodename} has octavo {__version__}, and the server has "
                f"{spec.version}: install the same version on all machines"
            )
        threading.Thread(target=self._run, args=(spec,), name="octavo-host", daemon=True).start()
        self._started.wait()
        if self._failure is not None:
            raise EngineError(f"a process cannot be started: {self._failure}")

    def kill(self, signum: int = KILL) -> None:
        """Send it a signal. No error if it has ended already."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def end_of_process(self, seconds: float) -> ProcessEnd | None:
        """Wait for its end; None if it still runs after so many seconds."""
        if self._process is None or self._memory is None or not self._ended.wait(seconds):
            return None
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return ProcessEnd(how, self._memory[:].rstrip(b"\0"))

    def _run(self, spec: ProcessSpec) -> None:
        try:
            process = self._process = self._start(spec)
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        process.wait()
        self._ended.set()

    def _start(self, spec: ProcessSpec) -> subprocess.Popen[bytes]:
        fd = open_memory("octavo-process", spec.memory_bytes)
        try:
            self._memory = mmap.mmap(fd, spec.memory_bytes)
            process = subprocess.Popen(
                [sys.executable, "-m", spec.module, str(fd), *spec.words],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment_without_keys(),
            )
        finally:
            os.close(fd)
        assert process.stdin is not None
        process.stdin.write(f"{spec.secret}\n".encode())
        process.stdin.flush()  # it stays open for as long as this process lives
        return process
