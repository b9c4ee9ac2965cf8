"""`Tokenizer`, which turns text to token ids and back for every kind of model file.

    Tokenizer ── encoder   plain text -> ids           encoders.py, spm_encoder.py
              ├─ specials  special tokens in text      special_tokens.py
              ├─ decoder   ids -> bytes, text          decoders.py
              └─ chat      conversation -> text        chat_rendering.py, chat_template.py

Built by ``folder_tokenizer.py`` (tokenizer.json) or ``gguf_tokenizer.py`` (GGUF metadata).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import ChatTemplateError, InvalidRequestError
from octavo.text.decoders import Decoder
from octavo.text.encoders import Encoder
from octavo.text.special_tokens import Disguise, SpecialTokens
from octavo.text.unicode import clean_text

if TYPE_CHECKING:
    from octavo.text.chat_template import ChatTemplate


class ChatPrompt(NamedTuple):
    """The prompt of a conversation. ``text`` has the messages as they were written."""

    text: str
    token_ids: list[int]


class PairTemplate(NamedTuple):
    """The ids that go before, between and after two texts, and the types of all tokens."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, int, int, int, int]  # before, first text, between, second text, after

    @property
    def num_added(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def joined(self, first: list[int], second: list[int]) -> tuple[list[int], tuple[int, ...]]:
        """Return the ids of two texts together, and the type of each; no types if all are 0."""
        parts = [self.before, first, self.between, second, self.after]
        ids = [token_id for part in parts for token_id in part]
        if not any(self.types):
            return ids, ()
        pairs = zip(parts, self.types, strict=True)
        return ids, tuple(kind for part, kind in pairs for _ in part)


@dataclass(eq=False, kw_only=True)
class Tokenizer:
    """One model's tokenizer. It does not change after loading; any threads may share it.

    Args:
        vocab_size: one more than the largest id, added tokens included.
        stop_token_ids: EOS and every token that ends a turn.
        prefix_ids, suffix_ids: the ids that go before and after a text.
        pair_template: those of two texts that go together; None: as of two texts in turn.
        named_tokens: the texts that templates know as ``bos_token``, ``eos_token``, ...
        chat_templates: sources of templates by name; the model's usual one is "default".
    """

    encoder: Encoder
    decoder: Decoder
    specials: SpecialTokens
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: frozenset[int]
    prefix_ids: Sequence[int] = ()
    suffix_ids: Sequence[int] = ()
    pair_template: PairTemplate | None = None
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @property
    def leading_bos(self) -> int | None:
        """BOS if the model wants it at the beginning of a text, else None."""
        return self.bos_token_id if self.bos_token_id in self.prefix_ids[:1] else None

    @property
    def pair(self) -> PairTemplate:
        """The ids around two texts that go together."""
        before, after = tuple(self.prefix_ids), tuple(self.suffix_ids)
        return self.pair_template or PairTemplate(before, after, after, (0, 0, 0, 1, 1))

    @property
    def chat_template(self) -> str | None:
        """The source of the model's default chat template, if it has one."""
        return self.chat_templates.get("default")

    # -- text to ids ------------------------------------------------------------------------------

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of ``text``.

        ``add_special_tokens``: adds BOS and EOS where the model wants them.
        ``parse_special``: the texts of special tokens in ``text`` become these tokens; otherwise
        they are text like any other. A lone surrogate is read as U+FFFD.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"expected text, got a {type(text).__name__}", "prompt")
        text = clean_text(text)
        pieces: list[str | int]
        pieces = self.specials.split(text) if parse_special else [text] if text else []
        ids = self.encoder.encode(pieces)
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def encode_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of words, each as it is at the start of a text and after a space."""
        encoded: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                if ids := self.encode(text, add_special_tokens=False):
                    encoded[tuple(ids)] = None
        return tuple(encoded)

    # -- ids to text ------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; an id that names no token has none."""
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self.specials.ids]
        return self.decoder.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token contributes to text; of a special token, its own text."""
        return self.decoder.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Return one token for display; bytes that are no character by themselves become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """True if the token is a control or unknown token, which output does not show."""
        return token_id in self.specials.ids

    # -- conversations ----------------------------------------------------------------------------

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Return the prompt of a conversation as ids. See ``chat_prompt`` for the arguments."""
        return self.chat_prompt(messages, **options).token_ids

    def render_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt of a conversation as text. See ``chat_prompt`` for the arguments."""
        text, disguise = self._render_chat(messages, **options)
        return disguise.reveal(text)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """Return the prompt of a conversation as text and as ids.

        The special tokens that the template writes are special; the same texts in messages, tools
        and further options are not. The template writes BOS itself where the model wants it.

        ``tools``: JSON schemas of functions that the model may call.
        ``add_generation_prompt`` (True): ends with the header of the assistant's next message.
        ``continue_final_message``: ends inside the last message, which the model continues.
        ``chat_template``: a template, or the name of one of the model's, instead of its default.
        ``chat_template_content_format``: whether the template gets contents as text ("string"), as
        lists of parts ("openai"), or as it reads them ("auto").
        Other options are variables for the template.

        Raises InvalidRequestError for a conversation of the wrong shape, ChatTemplateError for a
        template that fails, refuses the messages, or exceeds its bounds.
        """
        text, disguise = self._render_chat(messages, **options)
        pieces = self.specials.split(text)
        token_ids = self.encoder.encode(
            [disguise.reveal(piece) if isinstance(piece, str) else piece for piece in pieces]
        )
        return ChatPrompt(disguise.reveal(text), token_ids)

    def chat_template_source(self, chat_template: str | None = None, *, tools: Any = None) -> str:
        """Return the source of the template that ``chat_prompt`` takes for these arguments."""
        return self._compiled_template(chat_template, tools).source

    def _render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        **user_variables: Any,
    ) -> tuple[str, Disguise]:
        from octavo.text.chat_rendering import render_chat  # Jinja is loaded when first needed

        return render_chat(
            self._compiled_template(chat_template, tools),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=chat_template_content_format,
            variables=self.named_tokens,
            user_variables=user_variables,
            specials=self.specials,
        )

    def _compiled_template(self, chat_template: str | None, tools: Any) -> ChatTemplate:
        from octavo.text.chat_template import compile_chat_template

        if chat_template is None:
            name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
            source = self.chat_templates.get(name)
            if source is None:
                raise ChatTemplateError(
                    "this model has no chat template: use raw prompts, or give a chat_template"
                )
            return compile_chat_template(source)
        if not isinstance(chat_template, str):
            raise InvalidRequestError("expected the text of a template", "chat_template")
        return compile_chat_template(self.chat_templates.get(chat_template, chat_template))
