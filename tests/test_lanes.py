"""How tests are dealt out to processes: of a small project, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import compiled_ahead
import pytest

pytest.importorskip("xdist")

TWO = ("-p", "xdist", "-n2")
PROJECT = {
    "conftest.py": """
        import json, os, pathlib, time
        import pytest

        @pytest.fixture(autouse=True)
        def noted(request):
            began = time.time()
            yield
            entry = [request.node.nodeid, os.getpid(), began, time.time()]
            with open(pathlib.Path(__file__).with_name("log"), "a") as log:
                log.write(json.dumps(entry) + "\\n")
        """,
    "test_a_timing.py": """
        import json, os, pytest, time

        @pytest.mark.timing
        @pytest.mark.parametrize("i", range(3))
        def test_time(i, request):
            time.sleep(0.1)
            failures = json.loads(os.environ.get("FAILURES", "[0, 0, 0]"))[i]
            assert getattr(request.node, "execution_count", 1) > failures

        def test_no_time():
            time.sleep(0.1)
        """,
    "test_b.py": """
        import pytest, time
        pytestmark = pytest.mark.xdist_group("shared")

        @pytest.mark.parametrize("i", range(3))
        def test_b(i):
            time.sleep(0.05)
        """,
    "test_c.py": """
        import pytest, time
        pytestmark = pytest.mark.xdist_group("shared")

        @pytest.mark.slow
        def test_c():
            time.sleep(0.1)
        """,
    "test_d.py": """
        import os, pytest, time

        @pytest.mark.parametrize("i", range(4))
        def test_d(i):
            time.sleep(0.1)
            if os.environ.get("CRASH") and i == 1:
                os._exit(1)
        """,
}


@pytest.fixture
def run(tmp_path):
    """Runs the project: pytest's answer, and (test, process, start, end) in order of their end."""
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    timing\n")

    def run(*arguments: str, **environment: str):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        path = os.pathsep.join([str(Path(__file__).with_name("support")), *sys.path])
        environment |= {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "lanes", "-p", "no:cacheprovider", *arguments],
            env={**os.environ, "PYTEST_ADDOPTS": "", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        lines = log.read_text().splitlines() if log.exists() else []
        return done, [tuple(json.loads(line)) for line in lines]

    return run


def check_alone(log) -> None:
    """Those that are timed: last, in one process, one after the other."""
    timed = [entry for entry in log if "::test_time" in entry[0]]
    assert len(timed) == 3 and len({pid for _, pid, _, _ in timed}) == 1
    assert log[-3:] == timed
    assert max(end for _, _, _, end in log[:-3]) <= timed[0][2]


def test_lanes_run_side_by_side_and_what_is_timed_runs_alone(run):
    done, log = run(*TWO)
    assert "12 passed" in done.stdout.splitlines()[-1], done.stdout
    check_alone(log)
    processes: dict[str, set[int]] = {}
    for test, pid, _, _ in log[:-3]:
        processes.setdefault(test.partition("::")[0], set()).add(pid)
    assert all(len(pids) == 1 for pids in processes.values())  # a file stays together
    assert processes["test_b.py"] == processes["test_c.py"]  # and so does a group
    assert len(set.union(*processes.values())) == 2
    assert log[0][0].startswith(("test_b", "test_d"))  # the lane with a slow test was the first


@pytest.mark.thinned(1, most=1)
@pytest.mark.parametrize(
    "flags", [(), pytest.param(("-p", "xdist", "-n1"), marks=pytest.mark.long), (*TWO, "-n3")]
)
def test_any_number_of_processes(run, flags):
    done, log = run(*flags)
    assert "12 passed" in done.stdout.splitlines()[-1], done.stdout
    check_alone(log)


@pytest.mark.long
def test_only_some_of_them(run):
    for flags, count in ((("-k", "test_time"), 3), (("test_d.py::test_d[2]",), 1)):
        done, log = run(*TWO, *flags)
        assert f"{count} passed" in done.stdout.splitlines()[-1] and len(log) == count
    done, log = run(*TWO, "-k", "nothing")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and not log


def test_a_process_that_dies_fails_its_test_and_no_other(run):
    done, log = run(*TWO, CRASH="1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 11 passed" in done.stdout.splitlines()[-1], done.stdout
    assert "test_d.py::test_d[1]" in done.stdout
    # What was left of its lane begins again with a new process, maybe beside those that are timed.
    timed = [entry for entry in log if "::test_time" in entry[0]]
    assert len(timed) == 3 and len({pid for _, pid, _, _ in timed}) == 1


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.long), TWO])
def test_what_is_timed_is_tried_again(run, flags):
    pytest.importorskip("pytest_rerunfailures")
    done, log = run(*flags, "-p", "pytest_rerunfailures", FAILURES="[0, 2, 3]")
    last = done.stdout.splitlines()[-1]
    assert "1 failed, 11 passed" in last and "4 rerun" in last, done.stdout
    assert "test_time[2]" in done.stdout.splitlines()[-2]
    timed = [test.partition("::")[2] for test, *_ in log[-7:]]
    assert timed.count("test_time[1]") == timed.count("test_time[2]") == 3


def test_what_a_process_compiles_ahead_is_what_pytest_looks_for(
    tmp_path, monkeypatch, pytestconfig
):
    from _pytest.assertion import rewrite as hook

    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    file = tmp_path / "test_it.py"
    file.write_text("def test():\n    assert 1 == 1\n")
    compiled_ahead.rewrite(file, pytestconfig)
    (compiled,) = (tmp_path / "cache").rglob("*.pyc")
    assert compiled == hook.get_cache_dir(file) / f"test_it{hook.PYC_TAIL}"
    code = hook._read_pyc(file, compiled)
    assert code is not None and "@pytest_ar" in code.co_names
