"""Writes the metadata of a GGUF file from the tokenizer of a Hugging Face folder.

GGUF names a way of cutting text into words instead of carrying it, and has scores where
``tokenizer.json`` has merges. So the metadata is tried on a text of all sorts; it is an error if it
gives other ids than the folder's own tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.base.errors import ModelFileError, UnsupportedModelError
from octavo.text.encoders import library_errors
from octavo.text.folder_tokenizer import (
    FolderLibrary,
    chat_templates,
    load_folder_tokenizer,
    open_library,
)
from octavo.text.gguf_tokenizer import (
    TokenType,
    library_pre_tokenizer,
    load_gguf_tokenizer,
    token_of,
)
from octavo.text.pretokenizers import PRE_TOKENIZERS
from octavo.text.spm_encoder import SPACE
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}

# By the folder's names of the tokens; the misspelling is GGUF's.
_NAMES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}

# Text on which tokenizers differ: digits, contractions, capitals, marks, white space.
_PROBE = (
    "Hello,  World!!! it's IT'S they'll THEY'LL we\u2019re 1 12 123 1234567 3.14159 x86_64\n\n\n"
    " \tfoo_bar(baz[0]) -> {'a': 1}; // no\u00a0break \u3000 wide\r\n  indented\n\ttab   \n"
    "caf\u00e9 cafe\u0301 na\u00efve \u0130stanbul CamelCaseWord HTTPServer \u00df "
    "\u0141\u00f3d\u017a \u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d\uff0c\u4e16"
    "\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0939\u093f\u0928\u094d"
    "\u0926\u0940 \u0967\u0968\u0969 \u0e2a\u0e27 \U0001f600\U0001f468\u200d\U0001f469"
    " $100 50% a+b=c <tag> `code` ... --- ??? "
)


def tokenizer_metadata(folder: Path, num_tokens: int) -> dict[str, Any]:
    """Return the entries ``tokenizer.*`` of the metadata of a GGUF file.

    Args:
        folder: with a ``tokenizer.json`` and the files beside it.
        num_tokens: rows of the embedding; ids that the tokenizer lacks become unused tokens.

    Raises:
        ModelFileError: the folder's files are damaged, or of another model.
        UnsupportedModelError: GGUF files, or octavo when it reads them, cannot give the same ids.
    """
    path = folder / "tokenizer.json"
    tokenizer = load_folder_tokenizer(folder)
    if tokenizer.vocab_size > num_tokens:
        raise ModelFileError(
            path, f"{tokenizer.vocab_size} tokens, but the embedding has {num_tokens} rows"
        )
    with library_errors(path):
        own = open_library(folder)
        described = json.loads(own.library.to_str())
        kind = _kind(own.library, described, path)
    lists = _lists(own, described["model"], kind["model"], num_tokens)
    values = {**kind, **lists, **_named_ids(own, kind["model"], path)}
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    for name, template in chat_templates(own.files, own.config).items():
        place = "tokenizer.chat_template"
        metadata[place if name == "default" else f"{place}.{name}"] = template
    _check_ids(tokenizer, load_gguf_tokenizer(metadata, path), path)
    return metadata


def _kind(library: LibraryTokenizer, described: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the metadata that says which kind of tokenizer it is, and that only this kind has."""
    model = described["model"]
    if model["type"] == "BPE" and (described["decoder"] or {}).get("type") == "ByteLevel":
        return {
            "model": "gpt2",
            "pre": _pre_tokenizer(library, bool(model.get("ignore_merges")), path),
            "merges": [" ".join(merge) for merge in model["merges"]],
        }
    if model["type"] == "BPE" and model.get("byte_fallback"):
        first = library.encode("x", add_special_tokens=False).tokens[0]
        return {
            "model": "llama",
            "pre": "default",
            "add_space_prefix": first.startswith(SPACE),
        }
    if model["type"] == "WordPiece" and model.get("continuing_subword_prefix") == "##":
        return {"model": "bert", "pre": "default"}
    raise UnsupportedModelError(
        f"{path}: only byte-level BPE, BPE of pieces with bytes to fall back on, and WordPiece can "
        f"be in a GGUF file, and this is {model['type']}"
    )


def _pre_tokenizer(library: LibraryTokenizer, ignore_merges: bool, path: Path) -> str:
    """Return the name of the rules that cut the probe as the library does."""
    from tokenizers import normalizers

    wanted = _words(library.normalizer, library.pre_tokenizer)
    for name, family in PRE_TOKENIZERS.items():
        normalizer = normalizers.NFC() if family.nfc else None
        words = _words(normalizer, library_pre_tokenizer(family))
        if words == wanted and family.ignore_merges == ignore_merges and family.has_bos:
            return name
    raise UnsupportedModelError(
        f"{path}: GGUF has no name (tokenizer.ggml.pre) for how it cuts text into words"
    )


def _words(normalizer: Any, pre_tokenizer: Any) -> list[str]:
    text = _PROBE if normalizer is None else normalizer.normalize_str(_PROBE)
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _lists(own: FolderLibrary, model: dict[str, Any], kind: str, num_tokens: int) -> dict[str, Any]:
    """Return the metadata lists that have an entry for each token."""
    types = _types(own, model, num_tokens)
    tokens = [own.library.id_to_token(i) or f"[PAD{i}]" for i in range(num_tokens)]
    if kind == "bert":
        return {"tokens": list(map(token_of, tokens)), "token_type": types}
    if kind != "llama":
        return {"tokens": tokens, "token_type": types}
    for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
        tokens[i] = tokens[i].replace(SPACE, " ")  # looked for in the text as it is
    return {"tokens": tokens, "token_type": types, "scores": _scores(model, num_tokens)}


def _named_ids(own: FolderLibrary, kind: str, path: Path) -> dict[str, int | bool]:
    """Return the ids of tokens with names, and whether BOS and EOS go around a text."""
    values: dict[str, int | bool] = {
        f"{ours}_token_id": own.ids[theirs] for theirs, ours in _NAMES.items() if theirs in own.ids
    }
    if kind == "bert":
        around = [own.ids.get("cls")], [own.ids.get("sep")]
        if (own.prefix_ids, own.suffix_ids) != around:
            raise UnsupportedModelError(f"{path}: tokens other than CLS and SEP are around a text")
        return {**values, "token_type_count": 2}
    for name, added in (("bos", own.prefix_ids), ("eos", own.suffix_ids)):
        if added not in ([], [own.ids.get(name)]):
            raise UnsupportedModelError(
                f"{path}: it puts the tokens {added} around a text; a GGUF file can only have "
                "BOS before it and EOS after it"
            )
        values[f"add_{name}_token"] = bool(added)
    return values


def _types(own: FolderLibrary, model: dict[str, Any], num_tokens: int) -> np.ndarray:
    """Return the TokenType of each id, int32 [num_tokens]."""
    types = np.full(num_tokens, TokenType.UNUSED, np.int32)
    for token, i in model["vocab"].items():
        is_byte = model.get("byte_fallback") and token in _BYTES
        types[i] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for i, added in own.library.get_added_tokens_decoder().items():
        types[i] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    return types


def _scores(model: dict[str, Any], num_tokens: int) -> np.ndarray:
    """Return scores by which pieces are merged in the order of ``merges``, float32 [num_tokens].

    Pieces that no merge makes come last; their scores are not used.
    """
    scores = np.full(num_tokens, -float(len(model["vocab"])), np.float32)
    ids = model["vocab"]
    seen: set[str] = set()
    for left, right in model["merges"]:
        piece = left + right
        if piece not in seen:
            scores[ids[piece]] = -len(seen)
            seen.add(piece)
    return scores


def _check_ids(theirs: Tokenizer, ours: Tokenizer, path: Path) -> None:
    specials = "".join(sorted(theirs.specials.matcher.ids, key=len)[:4])
    for text in (_PROBE, *_PROBE.split(" "), f" {_PROBE}", f"{specials} {specials}\n"):
        if ours.encode(text, parse_special=True) != theirs.encode(text, parse_special=True):
            raise UnsupportedModelError(
                f"{path}: a GGUF file of this tokenizer gives other tokens, as of {text[:60]!r}"
            )
