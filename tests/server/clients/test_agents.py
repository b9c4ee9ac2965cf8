"""Frameworks for agents and structured answers against a live server, each in an environment of its
own: their pins would fight with those of others, and one is for Node.

Each has a program in ``programs/``, as its users would write one, which ends with an error if an
answer is not as it should be. The folder ``$OCTAVO_CLIENT_ENVIRONMENTS``, if set, keeps their
environments; else they are made anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.network,
    pytest.mark.xdist_group("clients"),
]

PROGRAMS = Path(__file__).parent / "programs"
MODEL = "qwen2.5-coder-0.5b"
PACKAGES = {
    "openai_agents": "openai-agents==0.24.0",
    "instructor": "instructor==1.17.0",
    "pydantic_ai": "pydantic-ai-slim[openai]==2.68.0",
    "smolagents": "smolagents[openai]==1.26.0",
}
NODE_PACKAGES = ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("OCTAVO_CLIENT_ENVIRONMENTS")
    return Path(kept) if kept else tmp_path_factory.mktemp("environments")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("client", PACKAGES)
def test_python(client: str, environments: Path, coder_server) -> None:
    folder = environments / client
    python = folder / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", PACKAGES[client])
    # Isolated, as the program has the name of what it imports.
    run(python, "-P", PROGRAMS / f"{client}_client.py", coder_server.base_url, MODEL)


def test_node(environments: Path, coder_server) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("needs Node and npm")
    folder = environments / "ai"
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(npm, "install", "--no-audit", "--no-fund", *NODE_PACKAGES, cwd=folder)
    program = folder / "ai_client.mjs"  # beside the packages, where Node looks for them
    shutil.copy(PROGRAMS / program.name, program)
    run(node, program, coder_server.base_url, MODEL, cwd=folder)
