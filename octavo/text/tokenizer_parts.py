"""The parts of a tokenizer, as readers of model files make them for `Tokenizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.text.decoders import Decoder
from octavo.text.encoders import Encoder
from octavo.text.special_tokens import SpecialTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """Everything that a `Tokenizer` is made from.

    ``vocab_size``: one more than the largest id, added tokens included.
    ``stop_token_ids``: EOS and every token that ends a turn.
    ``prefix_ids``, ``suffix_ids``: the ids that go before and after a text.
    ``named_tokens``: the texts that templates know as ``bos_token``, ``eos_token``, ...
    ``chat_templates``: sources of templates by name; the model's usual one is "default".
    """

    encoder: Encoder
    decoder: Decoder
    specials: SpecialTokens
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: Iterable[int]
    prefix_ids: Sequence[int] = ()
    suffix_ids: Sequence[int] = ()
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
