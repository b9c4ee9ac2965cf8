"""Log-probabilities, in the forms of chats, of completions and of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for -inf, which JSON does not have


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # a NaN is not above it


class TokenNames:
    """Names of tokens, where text is expected.

    A token whose bytes are only a part of a character is named by its bytes, as OpenAI does; with
    ``as_ids`` every token is named by its id.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


# -- chat --------------------------------------------------------------------------------------


def chat_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice."""
    return {"content": [_chat_entry(entry, names) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    return {
        **_chat_token(entry.token_id, entry.logprob, names),
        "top_logprobs": [_chat_token(token_id, logprob, names) for token_id, logprob in entry.top],
    }


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": finite(logprob),
        "bytes": list(names.bytes(token_id)),
    }


# -- completions -------------------------------------------------------------------------------


class CompletionLogprobs:
    """Makes the ``logprobs`` objects of one choice of completions, piece by piece.

    ``text_offset`` is where a token's text begins in the whole text of the choice: the number of
    characters that were complete before it.

    Args:
        before: the tokens that came before, if their text is not in the choice.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        names: TokenNames,
        *,
        before: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._names = names
        self._skips_special = skip_special_tokens
        self._stream = tokenizer.decoder.stream([i for i in before if not self._is_skipped(i)])
        self._offset = 0

    def next(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> Any:
        """Return the object for the next tokens. An entry of None is unknown."""
        return {
            "text_offset": [self._advance(token_id) for token_id in token_ids],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in entries],
            "tokens": [self._names.name(token_id) for token_id in token_ids],
            "top_logprobs": [None if one is None else self._top(one) for one in entries],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens, and the one that was sampled."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._names.name(token_id), finite(logprob))
        return top

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        if not self._is_skipped(token_id):
            self._offset += len(self._stream.push(token_id))
        return offset

    def _is_skipped(self, token_id: int) -> bool:
        return self._skips_special and self._tokenizer.is_special(token_id)


# -- prompts -----------------------------------------------------------------------------------


def prompt_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames) -> list[Any]:
    """Return vLLM's ``prompt_logprobs``: by position and token id. The first token has none."""
    return [None, *(_prompt_entry(entry, names) for entry in entries)]


def _prompt_entry(entry: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
    position: dict[str, Any] = {}
    for token_id, logprob, rank in ranked:
        described = {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": names.name(token_id),
        }
        position.setdefault(str(token_id), described)
    return position
