"""llama.cpp's ``llama-perplexity``, where it is: the same figures, of the same windows."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.system.machine import cpu


class Perplexity(NamedTuple):
    value: float
    stderr: float


class RefusedError(Exception):
    """llama.cpp would not read a file."""


class Scored(NamedTuple):
    tokens: list[int]
    log_probs: np.ndarray  # float32 [positions, vocab_size]


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


def log_probs_by_llama_cpp(gguf: Path, text: Path, ctx: int, folder: Path) -> list[Scored]:
    """Of windows of ``ctx`` tokens of a file of text: what follows each position of the second half
    but the last, by attention in float32.

    llama-perplexity leaves them in ``folder``, as 16 bits between the least and the most of a
    position (``tools/perplexity``).
    """
    program, out = llama_perplexity(), folder / "log-probs.bin"
    assert program is not None
    exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", "1"]
    named = ["-m", str(gguf), "-f", str(text), "--kl-divergence-base", str(out)]
    done = subprocess.run(
        [str(program), *named, "-c", str(ctx), *exact], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RefusedError(done.stderr[-2000:])
    return _read_log_probs(out.read_bytes())


def _read_log_probs(content: bytes) -> list[Scored]:
    magic, ctx, num_tokens, num_windows = struct.unpack_from("<8sIii", content)
    assert magic == b"_logits_"
    tokens = np.frombuffer(content, np.int32, ctx * num_windows, 20).reshape(num_windows, ctx)
    width = num_tokens + num_tokens % 2  # of a row, behind a scale and the least of it
    rows = np.frombuffer(content, np.uint16, offset=20 + tokens.nbytes).reshape(-1, 4 + width)
    scale, least = (rows[:, i : i + 2].copy().view(np.float32) for i in (0, 2))
    log_probs = (rows[:, 4 : 4 + num_tokens] * scale + least).reshape(num_windows, -1, num_tokens)
    return [Scored(*each) for each in zip(tokens.tolist(), log_probs, strict=True)]
