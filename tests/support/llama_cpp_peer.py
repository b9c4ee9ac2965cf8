"""llama.cpp's ``llama-perplexity``, where it is: the same estimate, of the same windows."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from octavo.machine import cpu


class Perplexity(NamedTuple):
    value: float
    stderr: float


def llama_perplexity() -> Path | None:
    """llama.cpp's program: where the variable says, or benchmarks/peers/setup_llama_cpp put it."""
    named = os.environ.get("OCTAVO_LLAMA_PERPLEXITY")
    peers = Path.home() / ".cache" / "octavo-peers" / "llama.cpp" / "bin" / "llama-perplexity"
    path = Path(named) if named else peers
    return path if path.is_file() else None


def perplexity_by_llama_cpp(gguf: Path, text: Path, num_windows: int, ctx: int) -> Perplexity:
    """Of the first windows of a file of text."""
    program = llama_perplexity()
    assert program is not None
    flags = ["-c", str(ctx), "--chunks", str(num_windows), "-t", str(cpu().usable_cores)]
    done = subprocess.run(
        [str(program), "-m", str(gguf), "-f", str(text), *flags],
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout + done.stderr)
    assert match is not None, done.stderr[-2000:]
    return Perplexity(float(match[1]), float(match[2]))
