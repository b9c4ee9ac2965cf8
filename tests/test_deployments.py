"""The files in ``examples`` by which others run octavo: their own linters read them, where these
are installed, and their commands are those that octavo has."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli import build_parser

EXAMPLES = Path(__file__).parent.parent / "examples"
MANIFEST = EXAMPLES / "kubernetes" / "octavo-on-ray.yaml"
UNIT = EXAMPLES / "systemd" / "octavo.service"


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """The objects of the manifest, by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """All pod templates, wherever they are."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for each in value.values():
            yield from pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from pods(each)


def test_the_manifest_has_what_it_says(objects):
    assert set(objects) == {"RayCluster", "Deployment", "Service", "NetworkPolicy"}
    for each in objects.values():
        assert each["apiVersion"] and each["metadata"]["name"] and each["spec"]
    assert objects["RayCluster"]["spec"]["authOptions"] == {"mode": "token"}


def test_ray_is_the_version_that_is_pinned(objects):
    pinned = re.search(r"ray==([\d.]+)", (EXAMPLES.parent / "pyproject.toml").read_text())
    assert objects["RayCluster"]["spec"]["rayVersion"] == pinned[1]


def test_all_pods_are_those_that_the_policy_lets_in(objects):
    policy = objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    found = list(pods(list(objects.values())))
    assert len(found) == 3
    for pod in found:
        assert policy.items() <= pod["metadata"]["labels"].items()
        for container in pod["spec"]["containers"]:
            resources = container["resources"]
            assert resources["requests"] == resources["limits"]
            mounted = {each["name"] for each in container.get("volumeMounts", ())}
            assert mounted <= {each["name"] for each in pod["spec"].get("volumes", ())}


def test_names_of_one_object_in_another_are_right(objects):
    server = objects["Deployment"]["spec"]["template"]
    wanted = objects["Service"]["spec"]["selector"]
    assert wanted == objects["Deployment"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= server["metadata"]["labels"].items()
    (container,) = server["spec"]["containers"]
    values = {each["name"]: each for each in container["env"]}
    cluster = objects["RayCluster"]["metadata"]["name"]
    assert values["RAY_ADDRESS"]["value"] == f"{cluster}-head-svc:6379"
    secret = values["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": cluster, "key": "auth_token"}
    ports = {each["name"] for each in container["ports"]}
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] in ports


def test_commands_of_the_manifest_are_octavos(objects):
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    commands = [shlex.split(each.removeprefix("exec ")) for each in script.split(" && ")]
    for command in commands:
        assert command[0] == "octavo"
        build_parser(command[1:]).parse_args(command[1:])
    assert [command[1] for command in commands] == ["cluster", "serve"]
    # A replica has the CPUs of a worker.
    (workers,) = objects["RayCluster"]["spec"]["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    threads = commands[1][commands[1].index("--threads") + 1]
    assert worker["resources"]["limits"]["cpu"] == threads


@pytest.mark.skipif(shutil.which("kubeconform") is None, reason="kubeconform is not installed")
def test_kubeconform_accepts_the_manifest():
    command = ["kubeconform", "-strict", "-ignore-missing-schemas", str(MANIFEST)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_unit_runs_a_command_that_there_is():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[0].endswith("/octavo")
    build_parser(command[1:]).parse_args(command[1:])
    assert int(unit["Service"]["TimeoutStopSec"]) > 30  # longer than the server drains


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_accepts_the_unit(tmp_path):
    """Of a copy whose program is there, since systemd looks for it."""
    program = tmp_path / "octavo"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "octavo.service"
    copy.write_text(UNIT.read_text().replace("/opt/octavo/bin/octavo", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if "octavo.service" in line]
    assert not ours, done.stderr
