"""Tests of `RayPlacement` without a cluster; those that need one are in `test_ray.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import octavo
from octavo.base.errors import ConfigError
from octavo.cluster import ray_placement
from octavo.cluster.placement import Bundle, ProcessSpec


def test_bundles_in_words():
    assert str(Bundle(1)) == "1 CPU"
    assert str(Bundle(4, 2)) == "4 CPUs and 2 GPUs"
    assert str(Bundle(0, 1)) == "1 GPU"
    assert str(Bundle(0)) == "nothing"


def test_a_shortage_says_what_was_asked_what_there_is_and_what_does_not_fit():
    machines = [Bundle(8, 1), Bundle(4)]
    text = ray_placement.shortage(Bundle(16), machines, Bundle(12, 1))
    assert text.startswith("16 CPUs on one machine are asked for")
    assert "2 machines with 8 CPUs and 1 GPU, 4 CPUs, of which 12 CPUs and 1 GPU are free" in text
    assert text.endswith("no machine has enough CPUs: join one that has, or ask for fewer")
    assert "enough GPUs" in ray_placement.shortage(Bundle(1, 2), machines, Bundle(12, 1))
    assert "enough CPUs and GPUs" in ray_placement.shortage(Bundle(16, 2), machines, Bundle(0))
    assert "enough of both" in ray_placement.shortage(Bundle(8, 1), [Bundle(8), Bundle(1, 1)], 0)
    assert "fits as soon as others" in ray_placement.shortage(Bundle(8), machines, Bundle(0))
    assert "0 machines with none" in ray_placement.shortage(Bundle(1), [], Bundle(0))


def test_secrets_of_processes_are_not_shown():
    spec = ProcessSpec("m", ("a",), "secret-ticket", 1, "1.0")
    assert "secret-ticket" not in repr(spec)
    assert ProcessSpec.of_json(spec.as_json()) == spec


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:port"])
def test_nothing_at_an_address_is_said_at_once(address):
    with pytest.raises(ConfigError, match="no Ray cluster answers at"):
        ray_placement.RayPlacement(address, "s", allow_open=False, lease_timeout=1.0)


def test_two_modules_import_ray():
    package = Path(octavo.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "ray" for name in names):
                found.add(file.relative_to(package).as_posix())
    assert found == {"cluster/ray_placement.py", "cluster/ray_serve.py"}
