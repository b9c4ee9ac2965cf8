"""A file that is cut off while it is mapped ends the process, and the process says which it was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.cpu import library

pytestmark = pytest.mark.skipif(
    not library.runnable() or sys.platform != "linux", reason="needs a native library, and /proc"
)

START = """
import faulthandler, mmap, os, resource, signal, sys, threading
from octavo.kernels.cpu.library import report_bus_errors
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
path = sys.argv[1]
def cut_off():
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    os.truncate(path, 0)
    return data[5000]
"""


def run(code: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "a model, 50% of it.gguf"
    path.write_bytes(bytes(10_000))
    return path


def test_the_file_is_named(file):
    result = run("report_bus_errors(); report_bus_errors(); cut_off()", file)
    assert result.returncode == -signal.SIGBUS
    assert result.stderr.count("octavo: ") == 1
    assert f"octavo: {file} has been truncated or replaced" in result.stderr


def test_in_any_thread(file):
    result = run("report_bus_errors(); t = threading.Thread(target=cut_off); t.start()", file)
    assert result.returncode == -signal.SIGBUS and str(file) in result.stderr


def test_a_file_that_is_gone_by_now(file):
    result = run(
        "report_bus_errors()\n"
        "data = mmap.mmap((f := open(path, 'r+b')).fileno(), 0)\n"
        "os.unlink(path); f.truncate(0); data[5000]",
        file,
    )
    assert result.returncode == -signal.SIGBUS and f"{file} (deleted) has been" in result.stderr


def test_a_handler_that_was_there_before_has_its_say(file):
    result = run("faulthandler.enable(); report_bus_errors(); cut_off()", file)
    assert result.returncode == -signal.SIGBUS
    assert f"octavo: {file} has been" in result.stderr and "in cut_off" in result.stderr


def test_a_signal_that_another_process_sends(file):
    result = run("report_bus_errors(); os.kill(os.getpid(), signal.SIGBUS); print('on')", file)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGBUS, "", "")


def test_without_a_native_library(file, tmp_path):
    result = run("report_bus_errors(); cut_off()", file, OCTAVO_LIBRARY_DIR=str(tmp_path))
    assert result.returncode == -signal.SIGBUS and "in cut_off" in result.stderr


@pytest.mark.slow
def test_packed_weights_that_are_cut_off_while_a_model_runs(tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns(".octavo"))
    result = run(
        "from pathlib import Path\n"
        "from octavo import LLM, SamplingParams\n"
        "llm = LLM(path, num_blocks=8, kernels='native')\n"
        "llm.generate('a', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "(packed,) = Path(os.environ['OCTAVO_PACKED_DIR']).glob('*.v16')\n"
        "os.truncate(packed, 0)\n"
        "llm.generate('b', SamplingParams(max_tokens=2), use_tqdm=False)",
        model,
        OCTAVO_PACKED_DIR=str(tmp_path / "packed"),
    )
    assert result.returncode == -signal.SIGBUS, result.stderr
    assert f"octavo: {tmp_path}/packed/model.safetensors-" in result.stderr
