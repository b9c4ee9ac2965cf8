"""A tokenizer whose tokens are bytes: 256 ends the text, 257 is another special token."""

from __future__ import annotations

from octavo.text.decoders import ByteDecoder
from octavo.text.special_tokens import SpecialTokens
from octavo.text.tokenizer import Tokenizer

EOS = 256
STOP = 257
VOCAB = 258


class ByteEncoder:
    def encode(self, pieces):
        ids = []
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else piece.encode()
        return ids


def byte_tokenizer(further: tuple[bytes, ...] = (), control: tuple[str, ...] = ()) -> Tokenizer:
    """``further``: tokens of several bytes, from 258 on, which encoding never makes; ``control``:
    further special tokens, behind those."""
    texts = [bytes([i]) for i in range(256)] + [b"<eos>", b"<stop>", *further]
    specials = {"<eos>": EOS, "<stop>": STOP}
    specials |= {text: len(texts) + i for i, text in enumerate(control)}
    texts += [text.encode() for text in control]
    return Tokenizer(
        encoder=ByteEncoder(),
        decoder=ByteDecoder(
            lambda i: texts[i].decode("latin-1") if i < len(texts) else None,
            lambda token: token.encode("latin-1"),
        ),
        specials=SpecialTokens(specials),
        vocab_size=len(texts),
        bos_token_id=None,
        eos_token_id=EOS,
        stop_token_ids=frozenset({EOS}),
    )
