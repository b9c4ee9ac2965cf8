"""octavo as other platforms would meet it, as far as Linux can play that; tells in JSON.

    python other_platform.py MODEL FOLDER      where native libraries would be

First all of octavo is imported, and the commands below are run, as it is here, so that whatever
octavo imports of others is loaded. Then, for each platform, octavo is forgotten; ``sys.platform``
and the modules that differ are changed, modules that are absent there can neither be found nor
imported, /proc and /sys cannot be opened; octavo is imported anew, and Linux is restored. So it is
octavo's own code that is tried, not that of Python and of packages, which know these platforms
themselves. What cannot be played: paths of Windows, files that cannot be renamed while they are
open, compilers, processors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Its modules are scripts, which find each other beside them.
WORKERS = ROOT / "octavo" / "bench" / "peers" / "workers"

COMMANDS = (
    *(["--help"], ["serve", "--help"], ["bench", "--help"], ["models"]),
    *(["doctor"], ["doctor", "--json"]),
    *(["generate", "MODEL", "--prompt", "a", "--max-tokens", "3", "--temperature", "0", "--json"],),
    ["build", "MODEL", "OUT"],
)
# Of commands that cannot be on Windows: that they say so. A server would run until it is stopped.
REFUSED = (["serve", "MODEL", "--port", "0"], ["bench", "startup", "MODEL"])

LINUX_ONLY = {
    "os": (
        *("sched_", "posix_fallocate", "posix_fadvise", "POSIX_FADV_", "memfd_create", "MFD_"),
        *("eventfd", "EFD_", "pipe2", "splice", "SPLICE_", "copy_file_range", "getrandom", "GRND_"),
        *("getxattr", "setxattr", "listxattr", "removexattr", "fdatasync", "pidfd_open", "unshare"),
        *("O_DIRECT", "O_TMPFILE", "O_PATH", "O_LARGEFILE", "O_NOATIME", "setres", "getres"),
    ),
    "signal": ("SIGPWR", "SIGSTKFLT", "SIGPOLL", "SIGRT", "sigtimedwait", "sigwaitinfo", "pidfd_"),
    "mmap": ("MAP_POPULATE", "MAP_STACK", "MADV_HUGE", "MADV_NOHUGE", "MADV_DO", "MADV_DONTFORK"),
    "select": ("epoll", "EPOLL"),
    "socket": ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_QUICKACK", "TCP_CORK", "SO_PEERCRED"),
    "resource": ("RUSAGE_THREAD", "prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RT"),
}
KEPT_ON_DARWIN = {"O_DIRECTORY"}  # begins as one that is not
POSIX_ONLY = {
    "os": (
        *LINUX_ONLY["os"],
        *("geteuid", "getuid", "getgid", "getegid", "getgroups", "getpg", "getpriority", "getsid"),
        *("setuid", "setgid", "seteuid", "setegid", "setsid", "setpg", "setpriority", "setre"),
        *("fork", "register_at_fork", "killpg", "nice", "wait", "WNOHANG", "WIF", "WEXIT", "P_PID"),
        *("chown", "fchown", "lchown", "fchmod", "fchdir", "chroot", "mkfifo", "mknod", "lockf"),
        *("openpty", "pread", "pwrite", "readv", "writev", "sysconf", "confstr", "pathconf"),
        *("fpathconf", "statvfs", "fstatvfs", "sync", "uname", "getloadavg", "sendfile", "posix_"),
        *("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_SYNC", "O_DSYNC", "O_NOCTTY"),
        *("ttyname", "ctermid", "tcgetpgrp", "tcsetpgrp", "set_blocking", "get_blocking", "F_LOCK"),
    ),
    "signal": ("alarm", "setitimer", "getitimer", "ITIMER", "pause", "pthread_", "sig", "pidfd_"),
    "mmap": ("MAP_", "PROT_", "MADV_"),
    "select": ("poll", "epoll", "EPOLL", "POLL", "kqueue"),
    "socket": (*LINUX_ONLY["socket"], "AF_UNIX", "SO_REUSEPORT", "MSG_DONTWAIT", "MSG_NOSIGNAL"),
}
NOT_ON_WINDOWS = {
    *("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline", "syslog", "crypt"),
    *("spwd", "nis", "curses", "_curses", "posix", "_posixsubprocess", "_posixshmem", "uvloop"),
}
SIGNALS_OF_WINDOWS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL",
                      "SIG_IGN"}  # fmt: skip


def module_names() -> list[str]:
    """Every module of octavo. A ``__main__`` runs what it imports, and is started by itself."""
    files = (file.relative_to(ROOT).with_suffix("") for file in (ROOT / "octavo").rglob("*.py"))
    names = (".".join(file.parts).removesuffix(".__init__") for file in files)
    return sorted(name for name in names if not name.endswith("__main__"))


def import_all() -> dict[str, str]:
    """What went wrong, by the names of modules."""
    failed = {}
    for name in module_names():
        try:
            importlib.import_module(name)
        except BaseException:
            failed[name] = traceback.format_exc(limit=-2)
    return failed


def run_commands(commands: Sequence[list[str]], model: str, out_folder: str) -> dict[str, Any]:
    results = {}
    for command in commands:
        argv = [{"MODEL": model, "OUT": out_folder}.get(word, word) for word in command]
        main = importlib.import_module("octavo.cli").main
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(argv)
        except BaseException:
            status = traceback.format_exc(limit=-3)
        results[" ".join(command)] = {
            "status": status,
            "out": out.getvalue(),
            "err": err.getvalue(),
        }
    return results


def forget_octavo() -> None:
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{ROOT / 'octavo'}/"):
            del sys.modules[name]


def stand_in(name: str, lacking: tuple[str, ...] = (), /, **changed: Any) -> None:
    """Put a copy of a module in its place, for whoever imports it from now on."""
    copy = ModuleType(name)
    there = vars(importlib.import_module(name)).items()
    copy.__dict__.update({key: value for key, value in there if not is_lacking(key, lacking)})
    copy.__dict__.update(changed)
    sys.modules[name] = copy


def is_lacking(name: str, lacking: tuple[str, ...]) -> bool:
    if sys.platform == "darwin" and name in KEPT_ON_DARWIN:
        return False
    return name.startswith(lacking) if lacking else False


class Hiding:
    """A finder as it is, that does not find some modules."""

    def __init__(self, finder: Any, hidden: set[str]):
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        return None if name in self._hidden else self._finder.find_spec(name, *where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide(hidden: set[str]) -> None:
    sys.meta_path[:] = [Hiding(finder, hidden) for finder in sys.meta_path]
    for name in list(sys.modules):
        if name.partition(".")[0] in hidden:
            del sys.modules[name]


def close_proc() -> None:
    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "there is none on this platform", arguments[0])

    sys.addaudithook(refuse)


def play_darwin() -> None:
    sys.platform = "darwin"
    for name, lacking in LINUX_ONLY.items():
        stand_in(name, lacking)
    play_machine("Darwin", "arm64", "macOS-14.5-arm64-arm-64bit")


def play_windows() -> None:
    sys.platform = "win32"
    hide(NOT_ON_WINDOWS)
    signals = [key for key in vars(signal) if key.startswith("SIG")]
    for name, lacking in POSIX_ONLY.items():
        changed = {"name": "nt"} if name == "os" else {}
        if name == "signal":
            lacking = (*lacking, *(key for key in signals if key not in SIGNALS_OF_WINDOWS))
            kept = {key: getattr(signal, key) for key in SIGNALS_OF_WINDOWS}
            changed = {**kept, "signal": signal.signal, "SIGBREAK": 21}
        stand_in(name, lacking, **changed)
    play_machine("Windows", "AMD64", "Windows-11-10.0.22631-SP0")
    play_ctypes()


def play_machine(system: str, machine: str, text: str) -> None:
    uname = SimpleNamespace(system=system, machine=machine, node="", release="", version="")
    values = {
        "system": system,
        "machine": machine,
        "platform": text,
        "processor": "",
        "uname": uname,
    }
    stand_in("platform", **{name: returning(value) for name, value in values.items()})


def returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def play_ctypes() -> None:
    """ctypes with a kernel32 of 16 GiB, 6 of them free, and no library of everything."""
    import ctypes

    class WindowsLibrary(ctypes.CDLL):
        def __init__(self, name: Any, *args: Any, **kwargs: Any):
            if name is None:
                raise TypeError("expected str, bytes or os.PathLike object, not NoneType")
            super().__init__(name, *args, **kwargs)

    def memory_status(pointer: Any) -> int:
        status = pointer._obj
        assert status[0] == 64, "dwLength must be the size of the structure"
        status[1], status[2] = 16 << 30, 6 << 30
        return 1

    windll = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=memory_status))
    stand_in("ctypes", CDLL=WindowsLibrary, windll=windll)


PLAYS = {"darwin": play_darwin, "win32": play_windows}


@contextlib.contextmanager
def played(platform: str) -> Iterator[None]:
    """The platform, and none of octavo imported, neither before nor after."""
    forget_octavo()
    before = sys.platform, sys.modules.copy(), sys.meta_path.copy()
    PLAYS[platform]()
    yield
    forget_octavo()
    sys.platform, modules, sys.meta_path[:] = before
    sys.modules.update(modules)


def tell(commands: Sequence[list[str]], model: str, out_folder: str) -> dict[str, Any]:
    return {"failed": import_all(), "commands": run_commands(commands, model, out_folder)}


def main(model: str, folder: str) -> None:
    sys.path.append(str(WORKERS))
    faulthandler.enable()  # as octavo does, which cannot where stderr is a buffer
    told = {"linux": tell(COMMANDS, model, f"{folder}/linux")}
    os.environ["OCTAVO_LIBRARY_DIR"] = folder
    close_proc()
    for platform in PLAYS:
        commands = [*COMMANDS, *REFUSED] if platform == "win32" else COMMANDS
        with played(platform):
            told[platform] = tell(commands, model, f"{folder}/{platform}")
    print(json.dumps({"num_modules": len(module_names()), **told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
