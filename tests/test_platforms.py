"""octavo on macOS and Windows, as far as Linux can play them: see support/other_platform.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import other_platform
import pytest

from octavo import doctor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that is changed")

# What `octavo doctor` has to say there, by words of each line.
LACKS = {
    "darwin": {
        *("prctl", "posix_fallocate", "sched_getaffinity", "/proc/cpuinfo", "/proc/meminfo"),
        *("/proc/stat", "posix_fadvise"),
    },
    "win32": {
        *("native CPU kernels", "pass_fds", "prctl", "uvloop", "fcntl", "os.geteuid"),
        *("os.O_DIRECTORY", "posix_fallocate", "sched_getaffinity", "/proc/cpuinfo"),
        *("(resource)", "/proc/stat", "os.killpg", "posix_fadvise", "termios"),
    },
}


@pytest.fixture(scope="module")
def told(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process tells that finds itself on each platform, without native libraries."""
    libraries = tmp_path_factory.mktemp("libraries")
    reason = "there are no native kernels for this platform here"
    (libraries / "build.json").write_text(json.dumps({"skipped": {"all": reason}}))
    folders = [os.path.dirname(os.path.dirname(doctor.__file__)), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, other_platform.__file__, tiny_model, libraries],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=sorted(LACKS))
def platform(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.slow
def test_every_module_can_be_imported(told: dict[str, Any], platform: str) -> None:
    assert told["num_modules"] > 250
    assert told["linux"]["failed"] == {}, "what fails on Linux tells nothing of other platforms"
    assert told[platform]["failed"] == {}


@pytest.mark.slow
def test_commands_do_what_they_can_do(told: dict[str, Any], platform: str) -> None:
    """Without native kernels there is no engine folder, and without ``pass_fds`` no server: that is
    told in a line."""
    refusals = {"build MODEL OUT": "there can be no engine folder of"}
    if platform == "win32":
        refusals["serve MODEL --port 0"] = "octavo serve cannot run on this system"
        refusals["bench startup MODEL"] = "octavo bench startup cannot run on this system"
    for command, result in told[platform]["commands"].items():
        refusal = refusals.pop(command, None)
        assert result["status"] == (1 if refusal else 0), f"{command}: {result}"
        if refusal:
            (line,) = [line for line in result["err"].splitlines() if "error" in line]
            assert line.startswith(f"octavo: error: {refusal}")
    assert refusals == {}
    generate = " ".join(other_platform.COMMANDS[6])
    answers = [
        json.loads(told[where]["commands"][generate]["out"]) for where in ("linux", platform)
    ]
    assert answers[0].keys() == answers[1].keys()


@pytest.mark.slow
def test_doctor_says_what_the_platform_lacks(told: dict[str, Any], platform: str) -> None:
    commands = told[platform]["commands"]
    lacks = json.loads(commands["doctor --json"]["out"])["platform_lacks"]
    text = commands["doctor"]["out"]
    assert len(lacks) == len(LACKS[platform])
    for word in LACKS[platform]:
        (lack,) = [lack for lack in lacks if word in lack["missing"]]
        assert f"  - {lack['missing']}: {lack['consequence']}\n" in text


@pytest.mark.slow
def test_memory_and_processor_are_not_made_up(told: dict[str, Any], platform: str) -> None:
    report = json.loads(told[platform]["commands"]["doctor --json"]["out"])
    of_apple = ["asimd", "asimddp"]  # what all have; of the rest, nobody tells here
    assert report["cpu"]["isa"] == (of_apple if platform == "darwin" else [])
    assert report["native"]["chosen"] is None
    assert not [one for one in report["findings"] if "AVX2" in one["problem"]]
    if platform == "win32":
        assert report["memory"] == {"total": 16 << 30, "available": 6 << 30, "limit": None}


def test_linux_lacks_nothing() -> None:
    """But what a build of Python may leave out."""
    assert {lack.missing for lack in doctor.platform_lacks()} <= set()
