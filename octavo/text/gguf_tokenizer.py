"""The tokenizer that a GGUF file's metadata describes.

Three kinds are supported: ``gpt2`` (byte-level BPE, words cut as ``tokenizer.ggml.pre`` says),
``llama`` (SentencePiece-style BPE by scores, with byte fallback) and ``bert`` (WordPiece of words
in lower case). Every list is checked before use; a wrong one is a ModelFileError that names its
key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields
from octavo.text.decoders import (
    ByteDecoder,
    WindowDecoder,
    byte_level_bytes,
    sentencepiece_bytes,
)
from octavo.text.encoders import LibraryEncoder, library_errors
from octavo.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from octavo.text.special_tokens import END_OF_TURN, SpecialTokens, end_of_turn_ids
from octavo.text.spm_encoder import SPACE, SpmEncoder
from octavo.text.tokenizer import PairTemplate, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.pre_tokenizers import PreTokenizer as LibraryPreTokenizer

_NAMED = ("bos", "eos", "unknown", "padding", "seperator", "mask", "cls")  # GGUF's own spelling
_TEMPLATE_NAMES = {"unknown": "unk", "padding": "pad", "seperator": "sep"}
_STOPS = ("eos", "eot", "eom")


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load_gguf_tokenizer(
    metadata: Mapping[str, Any], path: Path, *, extra_stop_ids: Iterable[int] = ()
) -> Tokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes.

    ``path`` is for messages only. Raises ModelFileError if the metadata is damaged, and
    UnsupportedModelError for a kind of tokenizer that octavo does not have.
    """
    vocabulary = Vocabulary(metadata, path)
    model = vocabulary.fields.text("model")
    if model == "gpt2":
        parts = _byte_level_parts(vocabulary)
    elif model == "llama":
        parts = _sentencepiece_parts(vocabulary)
    elif model == "bert":
        parts = _wordpiece_parts(vocabulary)
    else:
        raise UnsupportedModelError(
            f"{path}: tokenizer model {model!r} is not supported; known are gpt2, llama, bert"
        )
    ids = vocabulary.ids
    stop_ids = {ids[name] for name in _STOPS if name in ids} | end_of_turn_ids(vocabulary.specials)
    return Tokenizer(
        **parts,
        vocab_size=len(vocabulary.tokens),
        bos_token_id=ids.get("bos"),
        eos_token_id=ids.get("eos"),
        stop_token_ids=frozenset(stop_ids.union(extra_stop_ids)),
        named_tokens={
            f"{_TEMPLATE_NAMES.get(name, name)}_token": vocabulary.tokens[ids[name]]
            for name in _NAMED
            if name in ids
        },
        chat_templates=chat_templates(vocabulary),
    )


class Vocabulary:
    """The checked token lists of the metadata.

    ``tokens``: the texts by id; ``types``: TokenType by id, as int8; ``specials``: text -> id of
    control and unknown tokens; ``ids``: the ids that have names (``bos``, ``eos``, ``eot``, ...).
    """

    def __init__(self, metadata: Mapping[str, Any], path: Path):
        self.metadata = metadata
        self.path = path
        self.fields = Fields(path, metadata, "tokenizer.ggml.")
        self.tokens = self.fields.texts("tokens")
        if not self.tokens:
            raise self.fields.error("tokens", "the vocabulary is empty")
        self.types = self._types()
        self.ids = {
            name: self._token_id(f"{name}_token_id")
            for name in (*_NAMED, "eot", "eom")
            if f"{name}_token_id" in self.fields
        }
        self.specials = self.by_type(TokenType.UNKNOWN, TokenType.CONTROL)

    def by_type(self, *types: TokenType) -> dict[str, int]:
        """Return the ids of the tokens of some types, by text."""
        found = np.flatnonzero(np.isin(self.types, types))
        return {self.tokens[i]: i for i in found.tolist()}

    def numbers(self, key: str, kinds: str) -> np.ndarray:
        """Return the list ``key``, one number for each token, of some ``kinds`` of numpy dtypes."""
        self.fields.entries(key, len(self.tokens))
        array = np.asarray(self.fields.raw(key))
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise self.fields.error(key, "expected a list of numbers")
        return array

    def _types(self) -> np.ndarray:
        if "token_type" not in self.fields:
            return np.full(len(self.tokens), TokenType.NORMAL, np.int8)
        types = self.numbers("token_type", "iu")
        if types.min() < 0 or types.max() > max(TokenType):
            raise self.fields.error("token_type", "a token type is out of range")
        types = types.astype(np.int8)
        # In some files, tokens that end a turn are not control tokens.
        ends_turn = set(END_OF_TURN)
        user_defined = np.flatnonzero(types == TokenType.USER_DEFINED)
        for i in user_defined.tolist():
            if self.tokens[i] in ends_turn:
                types[i] = TokenType.CONTROL
        return types

    def _token_id(self, key: str) -> int:
        token_id: int = self.fields.integer(key, minimum=0)
        if token_id >= len(self.tokens):
            raise self.fields.error(key, f"token id {token_id} of {len(self.tokens)} tokens")
        return token_id


def added_ids(vocabulary: Vocabulary, *, add_bos: bool) -> dict[str, list[int]]:
    """Return the ids that go before and after a prompt."""
    added: dict[str, list[int]] = {}
    for name, default, place in (("bos", add_bos, "prefix_ids"), ("eos", False, "suffix_ids")):
        key = f"add_{name}_token"
        wanted = vocabulary.fields.boolean(key, default)
        if wanted and name not in vocabulary.ids and key in vocabulary.fields:
            raise vocabulary.fields.error(key, f"true, but {name}_token_id is missing")
        added[place] = [vocabulary.ids[name]] if wanted and name in vocabulary.ids else []
    return added


def special_tokens(vocabulary: Vocabulary) -> SpecialTokens:
    name = Fields(vocabulary.path, vocabulary.metadata).text("general.name", "")
    strip_right: list[int] = []
    if any(phi in name.lower() for phi in ("phi-3", "phi3")):
        # Phi 3's tokenizer says so, but GGUF has no place for it.
        keep = ("<unk>", "<s>", "<|endoftext|>")
        strip_right = [i for text, i in vocabulary.specials.items() if text not in keep]
    return SpecialTokens(vocabulary.specials, strip_right=strip_right)


def chat_templates(vocabulary: Vocabulary) -> dict[str, str]:
    """Return templates by name: ``tokenizer.chat_template`` is "default", others have names after a
    dot."""
    fields = Fields(vocabulary.path, vocabulary.metadata, "tokenizer.chat_template")
    return {
        name.removeprefix(".") or "default": fields.text(name)
        for name in fields
        if name == "" or name.startswith(".")
    }


# -- byte-level BPE -------------------------------------------------------------------------------


def _byte_level_parts(vocabulary: Vocabulary) -> dict[str, Any]:
    family = byte_level_family(vocabulary)
    if not family.has_bos:
        vocabulary.ids.pop("bos", None)
    user_defined = vocabulary.by_type(TokenType.USER_DEFINED)
    specials = special_tokens(vocabulary)
    with library_errors(vocabulary.path):
        library = byte_level_library(vocabulary, family)
        encoder = LibraryEncoder(library, specials, vocabulary.ids.get("unknown"))
    tokens = vocabulary.tokens
    return {
        "encoder": encoder,
        "decoder": ByteDecoder(
            lambda i: tokens[i] if 0 <= i < len(tokens) else None,
            byte_level_bytes,
            specials.ids.union(user_defined.values()),
        ),
        "specials": specials,
        **added_ids(vocabulary, add_bos=family.add_bos),
    }


def byte_level_family(vocabulary: Vocabulary) -> PreTokenizer:
    """Return the rules that ``tokenizer.ggml.pre`` names. UnsupportedModelError if unknown."""
    name = vocabulary.fields.text("pre", "default")
    family = PRE_TOKENIZERS.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"{vocabulary.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return family


def library_pre_tokenizer(family: PreTokenizer) -> LibraryPreTokenizer:
    """Return the library's object that cuts text into words and writes their bytes as BPE does."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in family.patterns]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, bytewise])


def byte_level_library(vocabulary: Vocabulary, family: PreTokenizer) -> LibraryTokenizer:
    """Return the library's tokenizer of byte-level BPE, without special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    texts = vocabulary.fields.texts("merges")
    # A merge cannot begin with the space between its tokens.
    merges = [(text[:i], text[i + 1 :]) for text in texts if (i := text.find(" ", 1)) > 0]
    try:
        model = models.BPE(ids, merges, ignore_merges=family.ignore_merges)
    except Exception:  # it says that a token of a merge is missing, but not of which one
        _check_merges(vocabulary, texts, ids)
        raise
    if len(merges) < len(texts):
        _check_merges(vocabulary, texts, ids)
    library = Tokenizer(model)
    if family.nfc:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = library_pre_tokenizer(family)
    user_defined = vocabulary.by_type(TokenType.USER_DEFINED)
    library.add_tokens([AddedToken(text, normalized=False) for text in user_defined if text])
    return library


def _check_merges(vocabulary: Vocabulary, merges: list[str], ids: Mapping[str, int]) -> None:
    """Raise a ModelFileError that names the wrong merge, if there is one."""
    for i, merge in enumerate(merges):
        left, space, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.fields.error(
                "merges", f"merge {i} ({merge!r:.60}) is not of two tokens"
            )


# -- SentencePiece --------------------------------------------------------------------------------


def _sentencepiece_parts(vocabulary: Vocabulary) -> dict[str, Any]:
    name_sentencepiece_ids(vocabulary)
    add_space_prefix = vocabulary.fields.boolean("add_space_prefix", True)
    tokens = vocabulary.tokens
    normal = vocabulary.types == TokenType.NORMAL
    encoder = SpmEncoder(
        dict(zip(compress(tokens, normal), np.flatnonzero(normal).tolist(), strict=True)),
        merge_order(vocabulary.numbers("scores", "fiu")),
        _byte_ids(vocabulary),
        vocabulary.by_type(TokenType.USER_DEFINED),
        add_space_prefix=add_space_prefix,
        remove_extra_whitespaces=vocabulary.fields.boolean("remove_extra_whitespaces", False),
    )
    specials = special_tokens(vocabulary)
    return {
        "encoder": encoder,
        "decoder": ByteDecoder(
            lambda i: tokens[i] if 0 <= i < len(tokens) else None,
            sentencepiece_bytes,
            specials.ids,
            strip_space=add_space_prefix,
        ),
        "specials": specials,
        **added_ids(vocabulary, add_bos=True),
    }


def name_sentencepiece_ids(vocabulary: Vocabulary) -> None:
    """Set the ids that this kind of tokenizer has by default."""
    for name, default in (("bos", 1), ("eos", 2), ("unknown", 0)):
        if name not in vocabulary.ids and default < len(vocabulary.tokens):
            vocabulary.ids[name] = default


def merge_order(scores: np.ndarray) -> Sequence[int]:
    """Return the rank of each token's score, the highest first; equal scores have equal ranks."""
    order: list[int] = np.unique(-scores.astype(np.float64), return_inverse=True)[1].tolist()
    return order


# -- WordPiece ------------------------------------------------------------------------------------


def _wordpiece_parts(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = vocabulary.ids
    for name, other in (("cls", "bos"), ("seperator", "eos")):  # some files have these alone
        if name not in ids and other in ids:
            ids[name] = ids[other]
    for name in ("cls", "seperator", "unknown"):
        if name not in ids:
            raise vocabulary.fields.error(f"{name}_token_id", "is missing")
    specials = special_tokens(vocabulary)
    with library_errors(vocabulary.path):
        library = wordpiece_library(vocabulary)
        encoder = LibraryEncoder(library, specials, ids["unknown"])
    before, after = ids["cls"], ids["seperator"]
    size = len(vocabulary.tokens)
    return {
        "encoder": encoder,
        "decoder": WindowDecoder(
            lambda i: library.id_to_token(i) if 0 <= i < size else None,
            lambda tokens: library.decode(list(tokens), skip_special_tokens=False),
        ),
        "specials": specials,
        "prefix_ids": [before],
        "suffix_ids": [after],
        "pair_template": PairTemplate((before,), (after,), (after,), (0, 0, 0, 1, 1)),
    }


def wordpiece_library(vocabulary: Vocabulary) -> LibraryTokenizer:
    """Return the library's tokenizer of WordPiece. Words begin with a mark in GGUF files, and in
    the library's vocabulary all other pieces do."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {piece_of(token): i for i, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.tokens[vocabulary.ids["unknown"]]
    library = Tokenizer(models.WordPiece(ids, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


def piece_of(token: str) -> str:
    """Return a token of a GGUF file as WordPiece has it: ``##`` before what goes on in a word."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def token_of(piece: str) -> str:
    """Return the inverse of ``piece_of``."""
    if piece.startswith("[") and piece.endswith("]"):
        return piece
    return piece[2:] if piece.startswith("##") else SPACE + piece


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of the 256 bytes; the unknown token for bytes that have none."""
    found = vocabulary.by_type(TokenType.BYTE)
    unknown = vocabulary.ids.get("unknown")
    byte_ids = [found.get(f"<0x{byte:02X}>", unknown) for byte in range(256)]
    if None in byte_ids:
        raise vocabulary.fields.error("tokens", "no token for some bytes, and no unknown_token_id")
    return [i for i in byte_ids if i is not None]
