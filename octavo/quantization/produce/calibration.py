"""Calibration text as windows of tokens.

The statistics that quantization goes by are those of a text, which should be like what the model
will be used for. Where nobody has one, there is a short one here, in nine languages, with code,
tables, mathematics, letters and conversations (``calibration_text.txt``, written for this purpose).
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer

WINDOW = 512
MAX_TOKENS = 128 * WINDOW

_BUILT_IN = "calibration_text.txt"


def calibration_windows(
    tokenizer: Tokenizer,
    path: str | Path | None = None,
    *,
    window: int = WINDOW,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    chat: bool = False,
) -> Tensor:
    """Windows of a text's tokens, int64 [W, window].

    The text is cut into windows that do not overlap; what is left at its end is dropped. If there
    are more than ``max_tokens`` allow, some are drawn by ``seed``, and stay in the text's order.
    Each begins with BOS where the model wants texts to begin with one.

    Args:
        path: a file of text in UTF-8; None is the text that comes with octavo.
        chat: paragraphs become messages of conversations, by turns the user's and the model's, in
            the model's own chat template, so that its special tokens are seen as they are in use.

    Raises:
        ConfigError: the file cannot be read, or there is not one whole window.
        ChatTemplateError: ``chat`` with a model that has no template, or whose template fails.
    """
    text = _read(path)
    bos = None if chat else tokenizer.leading_bos
    length = window if bos is None else window - 1
    if length < 1 or max_tokens < window:
        raise ConfigError(
            f"windows of {window} tokens cannot be made of {max_tokens}: raise max_tokens, or the "
            "window to two or more"
        )
    token_ids = _chat_tokens(tokenizer, text) if chat else _tokens(tokenizer, text)
    count = len(token_ids) // length
    if not count:
        raise ConfigError(
            f"{path or 'the built-in text'} has {len(token_ids):,} tokens, and one window takes "
            f"{window:,}: give a longer text, or a smaller window"
        )
    windows = torch.tensor(token_ids[: count * length]).view(count, length)
    windows = windows[_drawn(count, max_tokens // window, seed)]
    if bos is None:
        return windows
    return torch.cat([torch.full((len(windows), 1), bos), windows], dim=1)


def _read(path: str | Path | None) -> str:
    if path is None:
        return (files(__package__) / _BUILT_IN).read_text("utf-8")
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"the calibration text {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the calibration text {path} is not UTF-8 at byte {error.start}: convert it first"
        ) from None


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _chat_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Conversations of two messages each, one after the other."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    token_ids: list[int] = []
    for question, answer in zip(paragraphs[::2], paragraphs[1::2], strict=False):
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        token_ids += tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    return token_ids


def _drawn(count: int, most: int, seed: int) -> Tensor:
    """At most ``most`` of ``count`` numbers, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:most].sort().values
