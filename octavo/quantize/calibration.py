"""Calibration text as windows of tokens.

Calibration text should resemble what the model will be used for. A short built-in one has nine
languages, code, tables, mathematics, letters and conversations (``calibration_text.txt``, written
for this purpose).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.quantize.calibration_files import Conversation, conversations_of, read_documents
from octavo.text.tokenizer import Tokenizer

WINDOW = 512
MAX_TOKENS = 128 * WINDOW


def calibration_windows(
    tokenizer: Tokenizer,
    path: str | Path | None = None,
    *,
    window: int = WINDOW,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    chat: bool = False,
) -> Tensor:
    """Cut a text into windows of tokens, int64 [W, window].

    Windows do not overlap; a rest at the end is dropped. If there are more than ``max_tokens``
    allow, some are drawn by ``seed``, and stay in the text's order. Each begins with BOS if the
    model's texts begin with one.

    Args:
        path: a file of text in UTF-8, or a data set, see ``calibration_files.py``; None is the
            built-in text. Conversations are rendered with the model's chat template, so that its
            special tokens occur as they do in use.
        chat: whether paragraphs of texts become messages, alternately of the user and the model.

    Raises:
        ConfigError: the file cannot be read, or there is not one whole window.
        ChatTemplateError: conversations, and a model that has no template, or whose template fails.
    """
    documents = read_documents(path)
    if chat:
        documents = list(_conversations(documents))
    is_text = all(isinstance(document, str) for document in documents)
    bos = tokenizer.leading_bos if is_text else None
    length = window if bos is None else window - 1
    if length < 1 or max_tokens < window:
        raise ConfigError(
            f"windows of {window} tokens cannot be made of {max_tokens}: raise max_tokens, or the "
            "window to two or more"
        )
    token_ids = _tokens_of(documents, tokenizer, max_tokens, seed)
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


def _conversations(documents: Iterable[str | Conversation]) -> Iterator[Conversation]:
    for document in documents:
        if isinstance(document, str):
            yield from conversations_of(document)
        else:
            yield document


def _tokens_of(
    documents: Sequence[str | Conversation], tokenizer: Tokenizer, most: int, seed: int
) -> list[int]:
    """Concatenated tokens of as many documents as have ``most`` tokens, drawn by ``seed``, in the
    order of the file."""
    taken: dict[int, list[int]] = {}
    missing = most
    for index in _permutation(len(documents), seed).tolist():
        document = documents[index]
        if isinstance(document, str):
            taken[index] = tokenizer.encode(document, add_special_tokens=False)
        else:
            taken[index] = tokenizer.apply_chat_template(document, add_generation_prompt=False)
        missing -= len(taken[index])
        if missing <= 0:
            break
    return [token for index in sorted(taken) for token in taken[index]]


def in_epochs(num_windows: int, count: int, seed: int) -> Tensor:
    """Draw ``count`` numbers of windows, int64 [count], each once in an epoch."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-count // num_windows)
    drawn = [torch.randperm(num_windows, generator=generator) for _ in range(epochs)]
    return torch.cat(drawn)[:count]


def _drawn(count: int, most: int, seed: int) -> Tensor:
    """Draw at most ``most`` of ``count`` numbers, ascending."""
    return _permutation(count, seed)[:most].sort().values


def _permutation(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
