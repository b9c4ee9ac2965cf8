"""No test compares a time with a number of seconds: only with what was measured a moment before.

The next machine is slower, and this one will be, when somebody else has its other cores: a limit of
0.1 s says more of the machine than of octavo. So an upper bound of what a clock said is a multiple
of something else that a clock said, or of `pace.python_seconds`. Lower bounds are free (a timer
does not ring early), and so are deadlines with a name of their own, which only end a test that
would wait for ever.

This reads the tests' syntax trees. It sees what is measured with the clocks of ``time`` in the same
module, and what `live_server` and benchmarks name so; not what comes out of a document or a record.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
CLOCKS |= {f"{clock}_ns" for clock in CLOCKS}
PACES = {"python_seconds"}
DURATIONS = {"start_seconds", "idle_cpu_s", "send_lag"}  # attributes


class Times:
    """Which expressions in a part of a module are moments, as a clock said them, and which are
    durations: differences of moments, and what functions and attributes give that are some."""

    def __init__(self, part: ast.AST, attributes: set[str], functions: set[str]):
        self._attributes, self._functions = attributes, functions
        self._moments: set[str] = set()
        self._durations: set[str] = set()
        while self._learn(part):
            pass

    def is_moment(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("time"), attr=name)):
                return name in CLOCKS
            case ast.Name(name):
                return name in self._moments
        return False

    def is_duration(self, node: ast.AST) -> bool:
        """Whether it has one in it; of two that are divided, nothing is left."""
        match node:
            case ast.BinOp(op=ast.Sub()) if self.is_moment(node.left) or self.is_moment(node.right):
                return True
            case ast.BinOp(op=ast.Div()) if self.is_duration(node.right):
                return False
            case ast.Call(func=ast.Name(name)) if name in PACES | self._functions:
                return True
            case ast.Name(name) if name in self._durations:
                return True
            case ast.Attribute(attr=name) if name in self._attributes:
                return True
        return any(map(self.is_duration, ast.iter_child_nodes(node)))

    def _learn(self, part: ast.AST) -> bool:
        """Whether there were more names."""
        before = len(self._moments) + len(self._durations)
        for node in ast.walk(part):
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._bind(target, value)
                case (
                    ast.AnnAssign(target=target, value=ast.expr() as value)
                    | ast.AugAssign(target=target, value=value)
                    | ast.NamedExpr(target=target, value=value)
                    | ast.For(target=target, iter=value)
                    | ast.comprehension(target=target, iter=value)
                ):
                    self._bind(target, value)
                case ast.Call(func=ast.Attribute(ast.Name(name), "append"), args=[value]):
                    self._bind(ast.Name(name, ast.Store()), value)
        return len(self._moments) + len(self._durations) > before

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for each, of in zip(targets, values, strict=True):
                    self._bind(each, of)
            case ast.Name(name), _ if self.is_moment(value):
                self._moments.add(name)
            case _ if self.is_duration(value):
                names = (each for each in ast.walk(target) if isinstance(each, ast.Name))
                self._durations |= {each.id for each in names if isinstance(each.ctx, ast.Store)}


def bounds_in_seconds(text: str, attributes: set[str] = DURATIONS) -> list[int]:
    """The lines of assertions that a time is less than something that is none."""
    found: set[int] = set()
    if not re.search(rf"\btime\.|\.({'|'.join(attributes)})\b", text):
        return []  # as of most files: they need not be read
    tree = ast.parse(text)
    functions = functions_that_measure(tree, attributes)
    for part in tree.body:  # names of one test are not those of the next
        if not any(isinstance(node, ast.Assert) for node in ast.walk(part)):
            continue
        is_own = isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        times = Times(part if is_own else tree, attributes, functions)
        for assertion in (node for node in ast.walk(part) if isinstance(node, ast.Assert)):
            for node in ast.walk(assertion.test):
                if isinstance(node, ast.Compare) and is_bound(node, times):
                    found.add(node.lineno)
    return sorted(found)


def functions_that_measure(tree: ast.Module, attributes: set[str]) -> set[str]:
    """Those that return durations."""
    found: set[str] = set()
    while True:
        more = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                times = Times(node, attributes, found)
                values = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
                if any(value is not None and times.is_duration(value) for value in values):
                    more.add(node.name)
        if more <= found:
            return found
        found |= more


def is_bound(compared: ast.Compare, times: Times) -> bool:
    sides = [compared.left, *compared.comparators]
    for left, op, right in zip(sides, compared.ops, sides[1:], strict=False):
        match op:
            case ast.Gt() | ast.GtE():
                left, right = right, left
            case ast.Eq() if times.is_duration(left) and is_absolute_approx(right, times):
                return True
            case ast.Lt() | ast.LtE():
                pass
            case _:
                continue
        if times.is_duration(left) and not times.is_duration(right):
            return True
        match right:  # a deadline without a name
            case ast.BinOp(op=ast.Add()) if times.is_moment(left) and times.is_moment(right.left):
                if not times.is_duration(right.right):
                    return True
    return False


def is_absolute_approx(node: ast.expr, times: Times) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.approx"
        and any(word.arg == "abs" and not times.is_duration(word.value) for word in node.keywords)
    )


START = "start = time.monotonic()\n"


@pytest.mark.parametrize(
    "statement",
    [
        "assert time.monotonic() - start < 0.1",
        "assert 0.1 > time.monotonic() - start",
        "assert 0.05 < time.monotonic() - start <= MOST",
        "took = time.monotonic() - start\nassert took < MOST, 'late'",
        "assert time.monotonic() < start + 1.2",
        "def seconds():\n    return time.thread_time() - start\nassert seconds() < 2",
        "assert any(wait() < 0.1 for _ in range(3))\ndef wait():\n    return time.time() - start",
        "times = []\ntimes.append(time.perf_counter() - start)\nassert min(times) < 0.3",
        "times = [time.perf_counter() - start for _ in range(3)]\nassert sorted(times)[1] < 2",
        "a, b = 1, time.time() - start\nassert b < 3",
        "assert time.time() - start == pytest.approx(5, abs=0.1)",
        "assert server.start_seconds < 5",
        "if took := time.time() - start:\n    assert took < 5",
    ],
)
def test_bounds_in_seconds_are_seen(statement):
    assert bounds_in_seconds(START + statement)


@pytest.mark.parametrize(
    "statement",
    [
        "assert time.monotonic() - start > 0.1",
        "assert 0.1 <= time.monotonic() - start",
        "deadline = start + 10\nassert time.monotonic() < deadline, 'never'",
        "alone = time.monotonic() - start\nassert time.monotonic() - start < 3 * alone",
        "assert time.monotonic() - start < python_seconds(1e6)",
        "before = time.time()\nassert before <= answer['created'] <= time.time()",
        "a, b = 1, time.time() - start\nassert a < 3",
        "alone, beside = time.time() - start, time.time() - start\nassert beside / alone < 3",
        "def one():\n    took = time.time() - start\ndef other():\n    assert took < 3",
        "assert len(found) < 10",
    ],
)
def test_other_comparisons_are_not(statement):
    assert not bounds_in_seconds(START + statement)


def test_no_test_compares_a_time_with_a_number_of_seconds():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS)
        attributes = DURATIONS | ({"seconds"} if name.parts[:2] == ("server", "live") else set())
        if path != Path(__file__):
            lines = bounds_in_seconds(path.read_text("utf-8"), attributes)
            found += [f"{name}:{line}" for line in lines]
    assert not found, f"these compare with a number of seconds: {', '.join(found)}"
