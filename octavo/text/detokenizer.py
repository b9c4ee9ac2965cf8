"""`IncrementalDetokenizer`, which turns output tokens into text as they come.

Text is shown as soon as it is certain: never half a character, and never a beginning of a stop
string that may still be completed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one output, token by token.

    Pushing everything and finishing gives ``tokenizer.decode`` of all the tokens, up to the stop
    string that was found, if one was, and without an incomplete last character.
    Time per token does not grow with the output.

    ``stop``: ends the text; of several, the one that is complete first counts (of two complete at
    the same character, the longer), however the text is spread over tokens. A stop string that is
    complete before ``min_tokens`` tokens have come does not count.
    ``prompt_token_ids``: the tokens before; their text is not given again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        before = [i for i in prompt_token_ids if not self._is_skipped(i)]
        self._stream = tokenizer.decoder.stream(before)
        self._searches = [_StopSearch(text) for text in stop if text]
        first = "".join(re.escape(search.text[0]) for search in self._searches)
        self._may_begin = re.compile(f"[{first}]" if first else "(?!)").search
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""
        self._parts: list[str] = []
        self._finished = False
        self.num_tokens = 0  # pushed, up to the one that completed a stop string
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """All text shown so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that may be shown now.

        Tokens after a stop string are ignored.
        """
        shown = ""
        for token_id in token_ids:
            if self._finished:
                break
            self.num_tokens += 1
            if not self._is_skipped(token_id):
                shown += self._take(self._stream.push(token_id))
        return shown

    def finish(self) -> str:
        """Return the text that was held back: the output ends here."""
        if self._finished:
            return ""
        shown = self._take(self._stream.finish())
        if not self._finished:
            shown += self._show(self._held)
        self._finished = True
        self._held = ""
        return shown

    def _is_skipped(self, token_id: int) -> bool:
        return self._skip_special_tokens and self._tokenizer.is_special(token_id)

    def _take(self, text: str) -> str:
        """Show new text, but for a possible beginning of a stop string."""
        if not text:
            return ""
        if not self._held and self._may_begin(text) is None and not self._is_matching():
            return self._show(text)
        self._held += text
        end = len(self._held)
        for position, character in enumerate(text, end - len(text) + 1):
            complete = [search for search in self._searches if search.step(character)]
            if complete and self.num_tokens >= self._min_tokens:
                return self._stop(max((s.text for s in complete), key=len), position)
        # With the stop string shown anyway, nothing needs to wait for it.
        held = 0 if self._include_stop else max(search.matched for search in self._searches)
        shown, self._held = self._held[: end - held], self._held[end - held :]
        return self._show(shown)

    def _is_matching(self) -> bool:
        return any(search.matched for search in self._searches)

    def _stop(self, stop: str, position: int) -> str:
        """End the text at ``position`` of the held text, where ``stop`` ends."""
        self.stop_reason = stop
        self._finished = True
        end = position if self._include_stop else position - len(stop)
        shown, self._held = self._held[: max(end, 0)], ""
        return self._show(shown)

    def _show(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class _StopSearch:
    """Knuth-Morris-Pratt search for one stop string: ``matched`` characters of it end the text so
    far."""

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        self._fallback = [0] * (len(text) + 1)
        for i in range(1, len(text)):
            length = self._fallback[i]
            while length and text[i] != text[length]:
                length = self._fallback[length]
            self._fallback[i + 1] = length + (text[i] == text[length])

    def step(self, character: str) -> bool:
        """Take one more character; True if ``text`` ends with it.

        After a match ``matched`` is that of the longest shorter beginning, so that a match that
        does not count leaves the search going.
        """
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        matched += self.text[matched] == character
        complete = matched == len(self.text)
        self.matched = self._fallback[matched] if complete else matched
        return complete
